"""Differential fuzzing: python -m tests.tools.fuzz --help. The cases are divided among processes.

Which instructions the kernels use, and which products of oneDNN, is chosen once in a process, by
variables of its environment: so each process runs the cases of one path.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# The kernels: as the machine has them, portable, AVX2. oneDNN: AVX-512 without bfloat16, AVX2, and
# nothing that it has products for, where PyTorch takes the BLAS.
PATHS = {
    "native": {},
    "portable": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "onednn-avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "onednn-none": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
}
ROOT = Path(__file__).resolve().parents[3]
# A process grows with its cases: hypothesis remembers what it has drawn.
CASES_OF_A_PROCESS = 500
# Without a new case for so long, a process hangs.
SECONDS_OF_A_CASE = 300


@dataclass
class Outcome:
    cases: int = 0
    elements: int = 0
    undecided: int = 0
    worst: float = 0.0
    failure: str | None = None

    def add(self, other: Outcome) -> None:
        self.cases += other.cases
        self.elements += other.elements
        self.undecided += other.undecided
        self.worst = max(self.worst, other.worst)
        if self.failure is None:
            self.failure = other.failure


def repeat_line(path: str, case: str) -> str:
    return f"python -m tests.tools.fuzz --path {path} --case '{case}'"


def environment(path: str) -> dict[str, str]:
    # Passive: threads that wait for work must not take the cores of other processes.
    return {**os.environ, "OMP_WAIT_POLICY": "passive", **PATHS[path]}


def run_process(path: str, seed: int, count: int, options: argparse.Namespace) -> Outcome:
    """Runs cases in a process of their own, and survives what kills it."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "case"
        journal.touch()
        command = [
            sys.executable, "-X", "faulthandler", "-m", "tests.tools.fuzz",
            "--worker", str(journal), "--path", path,
            "--seed", str(seed), "--cases", str(count),
        ]  # fmt: skip
        if not options.shrink:
            command.append("--no-shrink")
        with open(Path(folder) / "output", "w+") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment(path), cwd=ROOT
            )
            hangs = False
            while True:
                try:
                    process.wait(1)
                    break
                except subprocess.TimeoutExpired:
                    written = journal.stat()
                    waited = time.time() - written.st_mtime
                    # Until the first case, it imports.
                    if written.st_size > 0 and waited > SECONDS_OF_A_CASE:
                        hangs = True
                        process.send_signal(signal.SIGABRT)  # faulthandler says where
            output.seek(0)
            text = output.read()
        lines = text.splitlines()
        if process.returncode in (0, 1) and lines and lines[-1].startswith("{"):
            return Outcome(**json.loads(lines[-1]))
        written = journal.read_text().split(maxsplit=1)
        done, case = (int(written[0]), written[1]) if written else (0, "")
        how = "hangs" if hangs else f"dies with {process.returncode}"
        return Outcome(done, failure=f"{how}\n{repeat_line(path, case)}\n{text[-3000:]}")


def work(options: argparse.Namespace) -> int:
    """One process: prints its outcome as the last line."""
    import warnings

    import hypothesis

    sys.path.append(str(ROOT / "tests" / "support"))
    from poison import poison_fresh_memory

    from . import cases, checks

    warnings.filterwarnings("ignore", message="TF32 acceleration")
    poison_fresh_memory()
    statistics = checks.Statistics()
    threads_matter = options.path == "onednn-none"
    outcome = Outcome()
    falsifying: list[tuple[str, Exception]] = []
    if options.case is not None:
        checks.run_case(cases.Case.from_json(options.case), statistics, threads_matter)
        print(f"nothing wrong: {statistics}")
        return 0

    def run(case: cases.Case) -> None:
        if not falsifying:
            outcome.cases += 1
        line = case.to_json()
        Path(options.worker).write_text(f"{outcome.cases} {line}")
        try:
            checks.run_case(case, statistics, threads_matter)
        except Exception as error:
            # While it shrinks, the last one is the smallest.
            falsifying.append((line, error))
            raise

    phases = [hypothesis.Phase.generate]
    if options.shrink:
        phases.append(hypothesis.Phase.shrink)
    settings = hypothesis.settings(
        max_examples=options.cases,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
    )
    try:
        hypothesis.seed(options.seed)(settings(hypothesis.given(cases.cases())(run)))()
    except Exception:
        line, error = falsifying[-1]
        outcome.failure = f"{error}\n{repeat_line(options.path, line)}"
    outcome.elements, outcome.undecided = statistics.elements, statistics.undecided
    outcome.worst = statistics.worst
    print(json.dumps(vars(outcome)))
    return 0 if outcome.failure is None else 1


def drive(options: argparse.Namespace) -> Outcome:
    """All processes, a few at a time, until one fails."""
    paths = options.path.split(",") if options.path else list(PATHS)
    tasks = []
    for i, path in enumerate(paths):
        rest = options.cases // len(paths) + (i < options.cases % len(paths))
        for k in range(0, rest, CASES_OF_A_PROCESS):
            seed = options.seed * 1_000_003 + len(tasks)
            tasks.append((k, path, seed, min(CASES_OF_A_PROCESS, rest - k)))
    tasks.sort(key=lambda task: task[0])
    total = Outcome()

    def run(task: tuple[int, str, int, int]) -> Outcome:
        if total.failure is not None:
            return Outcome()
        outcome = run_process(*task[1:], options)
        total.add(outcome)
        return outcome

    with ThreadPoolExecutor(os.cpu_count()) as executor:
        list(executor.map(run, tasks))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", help=f"of {', '.join(PATHS)}, with commas; all unless given")
    parser.add_argument("--case", help="a case to repeat, as a failure prints it")
    parser.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="print the first failure as it is"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options)
    if options.case is not None:
        path = options.path or "native"
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.tools.fuzz", *sys.argv[1:], "--worker", os.devnull],
            environment(path),
        )
    begin = time.time()
    outcome = drive(options)
    if outcome.failure is not None:
        print(f"failed after {outcome.cases} cases (seed {options.seed}): {outcome.failure}")
        return 1
    print(
        f"{outcome.cases} cases, seed {options.seed}, {time.time() - begin:.0f} s: nothing wrong. "
        f"{outcome.elements} elements compared, {outcome.undecided / max(1, outcome.elements):.1%} "
        f"of them undecided; the largest error was {outcome.worst:.2f} of its bound."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
