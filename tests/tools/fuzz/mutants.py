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
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
COPY = ROOT / "build" / "mutants"
ON_HOST = "tests/cuda/test_cuda_without_gpu.py"
FUZZER = "the fuzzer"


class Mutant(NamedTuple):
    file: str
    old: str  # stands there once
    new: str
    finder: str  # the fuzzer, or a test of ON_HOST

    def apply(self, root: Path) -> None:
        path = root / self.file
        source = path.read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"expected once in {self.file}: {self.old}")
        path.write_text(source.replace(self.old, self.new))


# Who finds it, and in which file what is replaced by what.
REPLACED = {
    (FUZZER, "csrc/ops/gate_math.h"): [
        ("d_cell * g * i * (one - i),", "d_cell * g * i * (one + i),"),
        ("1.6666665459e-1f", "1.6676665459e-1f"),
    ],
    (FUZZER, "csrc/ops/lltm_sequence_steps.cpp"): [
        ("std::min(steps[i].rows, steps[i - 1].rows);", "steps[i].rows;"),
    ],
    (FUZZER, "csrc/cpu/lltm_forward.cpp"): [
        ("a.old_cell.expect_contiguous()", "c10::MaybeOwned<at::Tensor>::borrowed(a.old_cell)"),
        ("rest_products + (first_gate + i) *", "rest_products + (2 - first_gate - i) *"),
        ("{from + packed_rows_ * size, size},", "{from, size},"),
    ],
    (FUZZER, "csrc/cpu/lltm_gradients.h"): [
        ("if (computed.numel() == 0) {", "if (initial.numel() == 0) {"),
        ("empty(output_mask[3], initial.sizes()),", "empty(output_mask[4], initial.sizes()),"),
    ],
    (FUZZER, "csrc/cpu/lltm_sequence_states.h"): [
        ("return reset != 0;", "return reset > 1;"),
        ("rows.end <= step.carried ||", "rows.begin < step.carried ||"),
        ("std::fill_n(states.row(row) + units.begin, units.size(), T(0));", ""),
    ],
    (FUZZER, "csrc/cpu/lltm_sequence_backward_steps.h"): [
        ("chunk != chunks_.rbegin());", "false);"),
        ("{d_h_.data(), d_cell_.data()}", "{d_h_.data()}"),
    ],
    (FUZZER, "csrc/cpu/lltm_sequence_team.h"): [
        ("std::min(rows.end, rows_of_step);", "std::min(rows.end, rows_of_step - 1);"),
    ],
    (FUZZER, "csrc/cpu/primitives/barrier.h"): [
        ("phase_.load(std::memory_order_acquire) == phase;", "spin < 0;"),
    ],
    (FUZZER, "csrc/cpu/primitives/panels.h"): [
        ("if (row + 1 < rows) {", "if (row + 2 < rows) {"),
    ],
    (FUZZER, "csrc/cpu/primitives/dot.h"): [("to[i][j] = j < rest ?", "to[i][j] = j + 1 < rest ?")],
    (FUZZER, "csrc/cpu/primitives/product_bfloat16.cpp"): [
        ("p.accumulate || k > 0,", "k > 0,"),
    ],
    (FUZZER, "csrc/cpu/primitives/tile.h"): [
        ("sum += sums[chain][i][j];", ""),
        ("auto tiles = (rows + kMost - 1) / kMost;", "auto tiles = rows / kMost;"),
        ("B.row(k + chain) + j", "B.data + (k + chain) * kVectors * lanes + j"),
        ("lane < columns ? B.row", "lane + 1 < columns ? B.row"),
    ],
    (FUZZER, "csrc/cpu/primitives/product_on_threads.h"): [
        ("packed_.panel((column + j) / width_, k)", "packed_.panel(j / width_, k)"),
        ("packed_block.panel(j / width_);", "packed_block.panel(0);"),
    ],
    ("test_indices_have_64_bits", "csrc/cuda/lltm_pointwise.h"): [
        (
            "gates + row * 3 * state_size + i,",
            "gates + static_cast<int32_t>(row * 3 * state_size + i),",
        ),
        ("nullptr : d_gates + gate,", "nullptr : d_gates + static_cast<int32_t>(gate),"),
        (
            "const int64_t unit = row * state_size + i;\n    if (row",
            "const int32_t unit = row * state_size + i;\n    if (row",
        ),
    ],
    ("test_backward", "csrc/cuda/lltm_pointwise.h"): [
        ("d_gates == nullptr ? nullptr : d_gates + gate,", "d_gates + gate,"),
    ],
    ("test_backward", "csrc/cuda/lltm_impl.h"): [
        (".grad_h = grad_h->", ".grad_h = grad_cell->"),
    ],
    ("test_rows_that_a_step_has_not_are_not_reset", "csrc/cuda/lltm_pointwise.h"): [
        ("resets != nullptr && row < rows &&", "resets != nullptr &&"),
    ],
    ("test_the_grid_comes_by_each_element_once", "csrc/cuda/launch_pointwise.h"): [
        ("std::min(rows, kMost)", "rows"),
    ],
    ("test_everything_runs_on_the_current_stream", "csrc/cuda/launch_pointwise.h"): [
        ("Device::stream(), rows, columns, body", "typename Device::Stream{}, rows, columns, body"),
    ],
    ("test_everything_runs_on_the_current_stream", "csrc/cuda/lltm_sequence_forward.h"): [
        (
            "launch_recurrence(args, Device::stream())",
            "launch_recurrence(args, typename Device::Stream{})",
        ),
    ],
    ("test_everything_runs_on_the_current_stream", "csrc/cuda/lltm_sequence_backward.h"): [
        (
            "launch_recurrence(args, Device::stream())",
            "launch_recurrence(args, typename Device::Stream{})",
        ),
    ],
    ("test_sequences_that_the_recurrence_does_not_take", "csrc/cuda/lltm_sequence_recurrence.h"): [
        ("(packed ? recurrence::kMostPackedBatch : INT32_MAX)", "INT32_MAX"),
        ("state_size <= recurrence::kMostUnits &&", "true &&"),
        ("state_size % recurrence::kColumns == 0 &&", "true &&"),
        ("(a.h0.scalar_type() == at::kHalf ||", "(a.h0.scalar_type() != at::kDouble ||"),
    ],
    ("test_sequences_of_which_launches_are_refused", "csrc/cuda/lltm_sequence_forward.h"): [
        ("sequence_.reset();", ""),
    ],
    ("test_sequences_of_which_launches_are_refused", "csrc/cuda/lltm_sequence_backward.h"): [
        ("if (run_recurrence(d_h0, d_c0)) {", "if (run_recurrence(d_h0, d_c0) || true) {"),
    ],
    ("test_h0_may_begin_anywhere", "csrc/cuda/lltm_sequence_forward.h"): [
        ("address % sizeof(recurrence::Words)", "address % 4"),
    ],
    ("test_device_branches_of_the_gates_match_double", "csrc/ops/gate_math.h"): [
        ("x < 0 ? e : 1.0f", "x > 0 ? e : 1.0f"),
        ("at_most(1.0f, __fdividef(e, e + 2.0f))", "__fdividef(e, e + 2.0f)"),
    ],
    ("test_sequences_by_the_recurrence", "csrc/cuda/lltm_sequence_backward.h"): [
        ("grad_output = grad_output_.", "grad_output = grad_cells_."),
    ],
    ("test_missing_gradients_of_cells_are_zeros", "csrc/cuda/lltm_pointwise.h"): [
        ("grad_cells == nullptr ? scalar_t(0) :", "grad_cells == nullptr ? scalar_t(1) :"),
    ],
    ("test_missing_gradients_of_cells_are_zeros", "csrc/cuda/recurrence/backward.h"): [
        ("? scalar_t(0)", "? scalar_t(1)"),
    ],
    ("test_the_grid_of_the_recurrence", "csrc/cuda/recurrence/launch.h"): [
        ("2 * tiles * args.kSums", "tiles * args.kSums"),
    ],
    ("test_the_largest_sequences_that_the_recurrence_takes", "csrc/cuda/recurrence/forward.h"): [
        ("(work_.warp + i * kWarps) + column);", "(work_.warp + i % 3 * kWarps) + column);"),
    ],
}
MUTANTS = [
    Mutant(file, old, new, finder) for (finder, file), rows in REPLACED.items() for old, new in rows
]


def copy_checkout() -> None:
    """What git knows of; what has not changed there keeps its time, for ninja."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        source, target = ROOT / name, COPY / name
        if not source.is_file():  # removed, but not yet in a commit
            continue
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def run(*arguments: str, **variables: str) -> tuple[int, str]:
    """Python in the copy. Its status, and what it printed."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=COPY,
        env=os.environ | {"PYTHONPATH": str(COPY)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return result.returncode, result.stdout


def build() -> None:
    # Without optimisation: faults are in what is computed, and it compiles in a fifth of the time.
    flags = {"DEBUG": "1", "FORCE_CPU": "1", "FORCE_CUDA": "0"}
    status, printed = run("setup.py", "--quiet", "build_ext", "--inplace", **flags)
    if status != 0:
        raise RuntimeError(printed)


def fuzz(cases: int) -> str | None:
    """After how many cases a fault was found, and by which check."""
    status, printed = run("-m", "tests.tools.fuzz", "--no-shrink", f"--cases={cases}")
    found = re.search(r"^failed (after \d+ cases) \(seed \d+\): ([^:\n]*)", printed, re.M)
    if status != 0 and found is None:
        raise RuntimeError(printed)
    return found and f"{found[1]}: {found[2]}"


def run_tests(*names: str) -> str | None:
    """Which test a fault was found by: it failed, or ended the process."""
    status, printed = run("-m", "pytest", "-v", "-x", *(f"{ON_HOST}::{name}" for name in names))
    if status == 0:
        return None
    ran = re.findall(r"^tests/\S+?::(.+?) *(PASSED|FAILED|ERROR|$)", printed, re.M)
    if not ran or ran[-1][1] == "ERROR":  # it does not compile
        raise RuntimeError(printed)
    return f"by {ran[-1][0]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the files to plant in")
    only = parser.parse_args().only
    mutants = [mutant for mutant in MUTANTS if only in mutant.file]
    copy_checkout()
    build()
    tests = {mutant.finder for mutant in mutants} - {FUZZER}
    if found := fuzz(400) or (tests and run_tests(*tests)):
        print(f"a fault that nobody planted, {found}")
        return 1
    missed = 0
    for mutant in mutants:
        mutant.apply(COPY)
        build()
        found = fuzz(4000) if mutant.finder == FUZZER else run_tests(mutant.finder)
        missed += found is None
        print(f"{found or 'NOT FOUND'}: {mutant.file}: {mutant.old} -> {mutant.new}", flush=True)
        copy_checkout()
    print(f"{len(mutants) - missed} of {len(mutants)} planted faults were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
