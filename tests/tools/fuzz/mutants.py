"""Faults planted into a copy of the checkout, each of which the fuzzer or a test has to find.

python -m tests.tools.fuzz.mutants builds the copy once, and for each fault what it touches.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ON_HOST = "tests/cuda/test_cuda_without_gpu.py"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    text: str  # stands there once
    replacement: str
    test: str = ""  # of ON_HOST, that finds it; if empty, the fuzzer has to

    def apply(self, root: Path) -> None:
        path = root / self.file
        source = path.read_text()
        if source.count(self.text) != 1:
            raise ValueError(
                f"mutant '{self.name}': expected its text once in {self.file}, "
                f"but it stands there {source.count(self.text)} times"
            )
        path.write_text(source.replace(self.text, self.replacement))


MUTANTS = [
    Mutant(
        "a sign in a derivative",
        "csrc/ops/gate_math.h",
        "d_cell * g * i * (one - i),",
        "d_cell * g * i * (one + i),",
    ),
    Mutant(
        "a digit of a polynomial",
        "csrc/ops/gate_math.h",
        "1.6666665459e-1f",
        "1.6676665459e-1f",
    ),
    Mutant(
        "a lost reset",
        "csrc/cpu/lltm_sequence_states.h",
        "return reset != 0;",
        "return reset > 1;",
    ),
    Mutant(
        "a gradient that passes a reset",
        "csrc/cpu/lltm_sequence_backward_steps.h",
        "std::fill_n(d_cell_.data() + at, units, opmath_t(0));",
        "",
    ),
    Mutant(
        "a row bound off by one",
        "csrc/cpu/primitives/team.h",
        "rows.end = std::min(rows.end, rows_of_step);",
        "rows.end = std::min(rows.end, rows_of_step - 1);",
    ),
    Mutant(
        "a stride ignored",
        "csrc/cpu/lltm_forward.cpp",
        "const auto old_cell = a.old_cell.expect_contiguous();",
        "const auto old_cell = c10::MaybeOwned<at::Tensor>::borrowed(a.old_cell);",
    ),
    Mutant(
        "memory not written",
        "csrc/cpu/lltm_empty_gradients.cpp",
        "const bool nothing_to_sum = computed.numel() == 0;",
        "const bool nothing_to_sum = initial.numel() == 0;",
    ),
    Mutant(
        "a mask bit swapped",
        "csrc/cpu/lltm_empty_gradients.cpp",
        "empty(output_mask[3], initial.sizes()),",
        "empty(output_mask[4], initial.sizes()),",
    ),
    Mutant(
        "a lost accumulation over chunks",
        "csrc/cpu/lltm_sequence_backward.cpp",
        "chunk != chunks_.rbegin());",
        "false);",
    ),
    Mutant(
        "a race at the barrier",
        "csrc/cpu/primitives/team.h",
        "phase_.load(std::memory_order_acquire) == phase;",
        "spin < 0;",
    ),
    Mutant(
        "a wrong row of a packed step",
        "csrc/cpu/lltm_sequence_states.h",
        "end <= step.carried || begin >= step.carried;",
        "begin < step.carried || begin >= step.carried;",
    ),
    Mutant(
        "rows carried that have not begun",
        "csrc/ops/lltm_sequence_steps.cpp",
        "steps[i].carried = std::min(steps[i].rows, steps[i - 1].rows);",
        "steps[i].carried = steps[i].rows;",
    ),
    Mutant(
        "the wrong order of gates in one path",
        "csrc/cpu/lltm_forward.cpp",
        ".C = {products + (first_gate + i) * ld_rest_, 3 * ld_rest_},",
        ".C = {products + (2 - first_gate - i) * ld_rest_, 3 * ld_rest_},",
    ),
    Mutant(
        "a lost tail of bfloat16",
        "csrc/cpu/primitives/pack.h",
        "if (i < rows_left) {",
        "if (i + 1 < rows_left) {",
    ),
    Mutant(
        "a lost tail of a dot product",
        "csrc/cpu/primitives/dot.h",
        "to[i][j] = j < rest ?",
        "to[i][j] = j + 1 < rest ?",
    ),
    Mutant(
        "a chain of a tile that is not added",
        "csrc/cpu/primitives/tile.h",
        "sum += sums[chain][i][j];",
        "",
    ),
    Mutant(
        "lost rows beyond whole tiles",
        "csrc/cpu/primitives/tile.h",
        "const auto tiles = (rows + kMost - 1) / kMost;",
        "const auto tiles = rows / kMost;",
    ),
    Mutant(
        "products of bfloat16 that take the place of earlier ones",
        "csrc/cpu/primitives/gemm.h",
        "p.accumulate || k > 0,",
        "k > 0,",
    ),
    Mutant(
        "a wrong stride for the terms of a sum",
        "csrc/cpu/primitives/tile.h",
        "load_lanes(B.row(k + chain) + j * lanes, b[j]);",
        "load_lanes(B.data + (k + chain) * kVectors * lanes + j * lanes, b[j]);",
    ),
    Mutant(
        "rows that no panel holds, in the place of others",
        "csrc/cpu/lltm_forward_batch.h",
        "{{from + packed_rows_ * size, size},",
        "{{from, size},",
    ),
    Mutant(
        "lost columns beyond whole vectors",
        "csrc/cpu/primitives/product.cpp",
        "for (int64_t j = 0; j < columns; ++j) {",
        "for (int64_t j = 0; j + 1 < columns; ++j) {",
    ),
    Mutant(
        "a panel of weights in the place of another",
        "csrc/cpu/primitives/product_on_threads.h",
        "return {packed_.data() + (panel * terms_ + k) * width_, width_};",
        "return {packed_.data() + k * width_, width_};",
    ),
    Mutant(
        "directions that change places",
        "lltm_ops/layer.py",
        "output, cells = torch.cat(outputs, -1)",
        "output, cells = torch.cat(outputs[::-1], -1)",
    ),
    Mutant(
        "an index of gates in 32 bits",
        "csrc/cuda/lltm_pointwise.h",
        "gates + row * 3 * state_size + i,",
        "gates + static_cast<int32_t>(row * 3 * state_size + i),",
        "test_indices_have_64_bits",
    ),
    Mutant(
        "an index of d_gates in 32 bits",
        "csrc/cuda/lltm_pointwise.h",
        "d_gates == nullptr ? nullptr : d_gates + gate,",
        "d_gates == nullptr ? nullptr : d_gates + static_cast<int32_t>(gate),",
        "test_indices_have_64_bits",
    ),
    Mutant(
        "an index of a step's units in 32 bits",
        "csrc/cuda/lltm_pointwise.h",
        "const int64_t unit = row * state_size + i;\n    if (row < rows) {",
        "const int32_t unit = row * state_size + i;\n    if (row < rows) {",
        "test_indices_have_64_bits",
    ),
    Mutant(
        "gradients of gates that nobody wants",
        "csrc/cuda/lltm_pointwise.h",
        "d_gates == nullptr ? nullptr : d_gates + gate,",
        "d_gates + gate,",
        "test_backward",
    ),
    Mutant(
        "resets of rows that no step has",
        "csrc/cuda/lltm_pointwise.h",
        "resets != nullptr && row < rows && resets[row] != 0;",
        "resets != nullptr && resets[row] != 0;",
        "test_rows_that_a_step_has_not_are_not_reset",
    ),
    Mutant(
        "a grid of too many rows",
        "csrc/cuda/launch_pointwise.h",
        "static_cast<unsigned>(std::min(rows, kMost))",
        "static_cast<unsigned>(rows)",
        "test_the_grid_comes_by_each_element_once",
    ),
    Mutant(
        "a kernel on the default stream",
        "csrc/cuda/launch_pointwise.h",
        "Device::stream(), rows, columns, body",
        "typename Device::Stream{}, rows, columns, body",
        "test_everything_runs_on_the_current_stream",
    ),
    Mutant(
        "gradients that change places",
        "csrc/cuda/lltm_impl.h",
        ".grad_h = grad_h.const_data_ptr",
        ".grad_h = grad_cell.const_data_ptr",
        "test_backward",
    ),
    Mutant(
        "a recurrence on the default stream",
        "csrc/cuda/lltm_sequence_impl.h",
        "launch_recurrence(args, Device::stream())",
        "launch_recurrence(args, typename Device::Stream{})",
        "test_everything_runs_on_the_current_stream",
    ),
    Mutant(
        "a packed batch beyond the arguments",
        "csrc/cuda/lltm_sequence_impl.h",
        "batch <= (packed ? recurrence::kMostPackedBatch : INT32_MAX)",
        "batch <= INT32_MAX",
        "test_sequences_that_the_recurrence_does_not_take",
    ),
    Mutant(
        "more units than registers hold",
        "csrc/cuda/lltm_sequence_impl.h",
        "state_size <= recurrence::kMostUnits &&",
        "true &&",
        "test_sequences_that_the_recurrence_does_not_take",
    ),
    Mutant(
        "units that do not fill a block of columns",
        "csrc/cuda/lltm_sequence_impl.h",
        "state_size % recurrence::kColumns == 0 &&",
        "true &&",
        "test_sequences_that_the_recurrence_does_not_take",
    ),
    Mutant(
        "a recurrence in float32",
        "csrc/cuda/lltm_sequence_impl.h",
        "(a.h0.scalar_type() == at::kHalf ||",
        "(a.h0.scalar_type() != at::kDouble ||",
        "test_sequences_that_the_recurrence_does_not_take",
    ),
    Mutant(
        "a recurrence that is tried again",
        "csrc/cuda/lltm_sequence_impl.h",
        "sequence_.reset();",
        "",
        "test_sequences_of_which_launches_are_refused",
    ),
    Mutant(
        "a refused launch for one that ran",
        "csrc/cuda/lltm_sequence_impl.h",
        "if (run_recurrence(d_h0, d_c0)) {",
        "if (run_recurrence(d_h0, d_c0) || true) {",
        "test_sequences_of_which_launches_are_refused",
    ),
    Mutant(
        "gradients that change places in a sequence",
        "csrc/cuda/lltm_sequence_impl.h",
        "args.grad_output = grad_output_.const",
        "args.grad_output = grad_cells_.const",
        "test_sequences_by_the_recurrence",
    ),
    Mutant(
        "half of the shared memory",
        "csrc/cuda/recurrence/launch.h",
        "return 2 * kForwardSums<tiles>;",
        "return kForwardSums<tiles>;",
        "test_the_grid_of_the_recurrence",
    ),
    Mutant(
        "a wrong fourth block of weights",
        "csrc/cuda/recurrence/forward.h",
        "kColumns * (part_.warp + i * kWarps) + column);",
        "kColumns * (part_.warp + i % 3 * kWarps) + column);",
        "test_the_largest_sequences_that_the_recurrence_takes",
    ),
]


def copy_checkout(to: Path) -> None:
    """What git knows of; what has not changed there keeps its time, for ninja."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in files:
        source, target = ROOT / name, to / name
        if not source.is_file():
            continue
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def build(root: Path) -> None:
    # Without optimisation: faults are in what is computed, and it compiles in a fifth of the time.
    result = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=root,
        env={
            **os.environ,
            "DEBUG": "1",
            "FORCE_CPU": "1",
            "FORCE_CUDA": "0",
            "PYTHONPATH": str(root),
        },
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise RuntimeError(f"building {root}:\n{(result.stdout + result.stderr)[-3000:]}")


def fuzz(root: Path, cases: int, seed: int) -> tuple[int, str] | None:
    """After how many cases a fault was found, and by which check."""
    result = subprocess.run(
        [
            sys.executable, "-m", "tests.tools.fuzz", "--no-shrink",
            "--cases", str(cases), "--seed", str(seed),
        ],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )  # fmt: skip
    found = re.search(r"^failed after (\d+) cases \(seed \d+\): ([^:\n]*)", result.stdout, re.M)
    if found is None:
        if result.returncode != 0:
            raise RuntimeError(result.stdout + result.stderr)
        return None
    return int(found[1]), found[2]


def run_tests(root: Path, names: Iterable[str]) -> tuple[int, str] | None:
    """After how many tests a fault was found, and by which: it failed, or ended the process."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-x", *(f"{ON_HOST}::{name}" for name in names)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    if result.returncode == 0:
        return None
    ran = re.findall(r"^tests/\S+?::(.+?) *(PASSED|FAILED|ERROR|$)", result.stdout, re.M)
    if not ran or ran[-1][1] == "ERROR":  # it does not compile
        raise RuntimeError(result.stdout + result.stderr)
    return len(ran), ran[-1][0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz.mutants", description=__doc__)
    parser.add_argument("--cases", type=int, default=4000, help="for each fault, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a part of the names of those to run")
    parser.add_argument("--folder", type=Path, help="where the copy is kept, for the next time")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    mutants = [m for m in MUTANTS if options.only is None or options.only in m.name]
    missed = 0
    try:
        copy_checkout(folder)
        build(folder)
        tests = {mutant.test for mutant in mutants} - {""}
        found = fuzz(folder, 400, options.seed) or (run_tests(folder, tests) if tests else None)
        if found is not None:
            print(f"a fault that nobody planted, after {found[0]}: {found[1]}")
            return 1
        print("| planted fault | found after | by |\n|---|---|---|", flush=True)
        for mutant in mutants:
            mutant.apply(folder)
            build(folder)
            if mutant.test:
                found = run_tests(folder, [mutant.test])
            else:
                found = fuzz(folder, options.cases, options.seed)
            count, by = found or ("not found", "")
            missed += found is None
            print(f"| {mutant.name} | {count} | {by} |", flush=True)
            copy_checkout(folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
