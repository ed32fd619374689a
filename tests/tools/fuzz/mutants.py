"""Faults planted into a copy of the checkout, each of which the fuzzer has to find.

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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    text: str  # stands there once
    replacement: str

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
        found = fuzz(folder, 400, options.seed)
        if found is not None:
            print(f"a fault that nobody planted, after {found[0]} cases: {found[1]}")
            return 1
        print("| planted fault | found after | by |\n|---|---|---|", flush=True)
        for mutant in mutants:
            mutant.apply(folder)
            build(folder)
            found = fuzz(folder, options.cases, options.seed)
            cases, check = found or ("not found", "")
            missed += found is None
            print(f"| {mutant.name} | {cases} | {check} |", flush=True)
            copy_checkout(folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
