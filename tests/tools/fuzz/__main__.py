"""Differential fuzzing: python -m tests.tools.fuzz --help. The cases are divided among processes.

Which instructions the kernels use, and which products of oneDNN, is chosen once in a process, by
variables of its environment: so each process runs the cases of one path.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis

sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))

from poison import poison_fresh_memory

from .cases import Case, cases
from .checks import Outcome, run_case

ROOT = Path(__file__).resolve().parents[3]
# The kernels: as the machine has them, portable, AVX2, and without oneDNN's products of bfloat16.
PATHS = {
    "native": {},
    "portable": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "onednn-avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
# A process grows with its cases: hypothesis remembers what it has drawn.
CASES_OF_A_PROCESS = 500
# A case that takes longer hangs: the process ends, with the stacks of its threads.
SECONDS_OF_A_CASE = 300


def command(path: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.tools.fuzz", "--path", path, *arguments]


def environment(path: str) -> dict[str, str]:
    # Passive: threads that wait for work must not take the cores of other processes.
    return {**os.environ, "OMP_WAIT_POLICY": "passive", **PATHS[path]}


def repeat_line(path: str, case: str) -> str:
    return f"python -m tests.tools.fuzz --path {path} --case '{case}'"


def run_process(path: str, seed: int, count: int, shrink: bool) -> Outcome:
    """Runs cases in a process of their own, and survives what kills it."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "case"
        arguments = ["--worker", str(journal), "--seed", str(seed), "--cases", str(count)]
        process = subprocess.run(
            command(path, *arguments, *[] if shrink else ["--no-shrink"]),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(path), cwd=ROOT,
        )  # fmt: skip
        *_, last = process.stdout.splitlines() or [""]
        if last.startswith("{"):
            return Outcome(**json.loads(last))
        case = journal.read_text() if journal.exists() else ""
        failure = f"ends with {process.returncode}\n{repeat_line(path, case)}"
        return Outcome(failure=f"{failure}\n{process.stdout[-3000:]}")


def work(options: argparse.Namespace) -> None:
    """One process: prints its outcome as the last line."""
    faulthandler.enable()
    warnings.filterwarnings("ignore", message="TF32 acceleration")
    poison_fresh_memory()
    outcome = Outcome()

    def run(case: Case) -> None:
        faulthandler.dump_traceback_later(SECONDS_OF_A_CASE, exit=True)
        line = case.to_json()
        Path(options.worker).write_text(line)
        outcome.cases += not outcome.failure
        try:
            run_case(case, outcome)
        except Exception as error:
            # While it shrinks, the last one is the smallest.
            outcome.failure = f"{error}\n{repeat_line(options.path, line)}"
            raise

    if options.case is not None:
        run(Case.from_json(options.case))
        print("nothing wrong")
        return
    settings = hypothesis.settings(
        max_examples=options.cases,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate] + [hypothesis.Phase.shrink] * options.shrink,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
    )
    try:
        hypothesis.seed(options.seed)(settings(hypothesis.given(cases())(run)))()
    except Exception:
        if not outcome.failure:
            raise
    print(json.dumps(vars(outcome)))


def drive(options: argparse.Namespace) -> Outcome:
    """All processes, a few at a time, until one fails."""
    paths = [options.path] if options.path else list(PATHS)
    tasks = []
    for i, path in enumerate(paths):
        rest = options.cases // len(paths) + (i < options.cases % len(paths))
        for k in range(0, rest, CASES_OF_A_PROCESS):
            seed = options.seed * 1_000_003 + len(tasks)
            tasks.append((k, path, seed, min(CASES_OF_A_PROCESS, rest - k)))
    total = Outcome()

    def run(task: tuple[int, str, int, int]) -> None:
        if not total.failure:
            total.add(run_process(*task[1:], options.shrink))

    with ThreadPoolExecutor(os.cpu_count()) as executor:
        list(executor.map(run, sorted(tasks)))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", choices=PATHS, help="all unless given")
    parser.add_argument("--case", help="a case to repeat, as a failure prints it")
    parser.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="print the first failure as it is"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return 0
    if options.case is not None:
        path = options.path or "native"
        arguments = "--worker", os.devnull, "--case", options.case
        os.execve(sys.executable, command(path, *arguments), environment(path))
    begin = time.time()
    outcome = drive(options)
    if outcome.failure:
        print(f"failed after {outcome.cases} cases (seed {options.seed}): {outcome.failure}")
        return 1
    print(
        f"{outcome.cases} cases, seed {options.seed}, {time.time() - begin:.0f} s: nothing wrong. "
        f"{outcome.elements} elements compared, {outcome.undecided / max(1, outcome.elements):.1%} "
        "of them undecided."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
