"""Everything that needs a GPU: tests, compute-sanitizer, times. Each part can be run by itself.

A part ends in under nine minutes, prints a line and writes a JSON file. One that fails or takes too
long stops none of the others, and loses nothing that it has written. The library has to be built in
place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch.utils.cpp_extension import CUDA_HOME, include_paths

import lltm_ops

ROOT = Path(__file__).parent.parent
BENCHMARKS = Path(__file__).parent
GRACE = 10  # seconds between SIGINT and SIGKILL
RECURRENCE = ROOT / "tests" / "recurrence"
# pytest's names of what every way of a sequence has to pass.
OF_SEQUENCES = "cuda and (sequence or half_types)"
SANITIZERS = ("memcheck", "racecheck", "synccheck")


def finish(command: list[str], seconds: float, log: Path, **environment: str) -> int | str:
    """The exit status, or that there was none in time.

    Then all processes of the command get SIGINT, by which pytest still writes its report, and
    SIGKILL, by which nobody goes on using the GPU.
    """
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                env=os.environ | environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return type(error).__name__
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            return type(error).__name__
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def verdict(statuses: dict[str, Any]) -> dict[str, Any]:
    return {
        "ok": all(status == 0 for status in statuses.values()),
        "summary": ", ".join(f"{name} {status}" for name, status in statuses.items()),
        "statuses": statuses,
    }


class Commands:
    """One after the other, until the time of a part is over."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.end = time.monotonic() + seconds
        self.statuses: dict[str, Any] = {}

    def run(self, name: str, command: list[str], most: float = 600, **environment: str) -> bool:
        left = min(most, self.end - time.monotonic())
        log = self.folder / f"{name.replace(' ', '_')}.log"
        status = finish(command, left, log, **environment) if left > 0 else "no time left"
        self.statuses[name] = status
        return status == 0


def read_results(report: Path) -> tuple[Counter[str], list[str]]:
    """Counts, and the names of what failed, of a report in JUnit's form."""
    counts: Counter[str] = Counter()
    failed = []
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        outcome = next((child.tag for child in case if child.tag in ("failure", "error")), "")
        outcome = outcome or ("skipped" if case.find("skipped") is not None else "passed")
        counts[outcome] += 1
        if outcome in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed


def compile_check(commands: Commands) -> Path:
    """tests/recurrence/check.cpp for this GPU: a program without Python."""
    program = commands.folder / "check"
    major, minor = torch.cuda.get_device_capability()
    command = [
        f"{CUDA_HOME}/bin/nvcc",
        "-std=c++20",
        "-O3",
        "-lineinfo",
        f"-arch=sm_{major}{minor}",
    ]
    command += ["--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}", f"-I{RECURRENCE}"]
    command += [f"-I{path}" for path in include_paths()]
    sources = [RECURRENCE / "check.cpp", ROOT / "csrc" / "cuda" / "lltm_recurrence_kernel.cu"]
    commands.run("compile", [*command, "-x", "cu", *map(str, sources), "-o", str(program)])
    return program


def run_truth(folder: Path, seconds: float) -> dict[str, Any]:
    """The recurrence against double, first by itself; then the tests of it in PyTorch."""
    commands = Commands(folder, seconds)
    program = compile_check(commands)
    for repeat in range(20):
        # A hang is one, not twenty.
        options = [f"--seed={1000 * repeat}", "--cases=50", "--units=1024", "--blocks=100"]
        if not commands.run(f"check {repeat}", [str(program), *options], 30):
            break
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-k", OF_SEQUENCES]
    pytest += ["tests/test_cuda.py", "tests/test_sequence.py"]
    for on in ("0", "1"):
        commands.run(f"recurrence {on}", pytest, 150, LLTM_CUDA_RECURRENCE=on)
    return verdict(commands.statuses)


def run_checkers(folder: Path, seconds: float) -> dict[str, Any]:
    """compute-sanitizer, on a program without Python."""
    commands = Commands(folder, seconds)
    program = compile_check(commands)
    for tool in SANITIZERS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
        command += ["--report-api-errors", "no", str(program)]
        commands.run(tool, [*command, "--cases=10", "--units=256"], 150)
    return verdict(commands.statuses)


def run_tests(folder: Path, seconds: float) -> dict[str, Any]:
    """All that a GPU runs, each file in a process of its own, three at a time."""
    end = time.monotonic() + seconds

    def run_file(file: Path) -> tuple[str, Any]:
        report = folder / f"{file.stem}.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", f"--junitxml={report}"]
        left = max(1.0, end - time.monotonic())
        status = finish([*command, str(file)], left, folder / f"{file.stem}.log")
        return file.stem, (status, *read_results(report))

    # The longest begin first.
    files = sorted((ROOT / "tests").glob("test_*.py"), key=lambda file: -file.stat().st_size)
    with ThreadPoolExecutor(3) as pool:
        results = dict(pool.map(run_file, files))
    counts = sum((counts for _, counts, _ in results.values()), Counter())
    no_tests = 5  # pytest's status
    return {
        "ok": all(status in (0, no_tests) for status, _, _ in results.values()),
        "summary": ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none",
        "statuses": {name: status for name, (status, _, _) in results.items()},
        "failed": [name for _, _, failed in results.values() for name in failed],
    }


def run_scripts(folder: Path, seconds: float, *scripts: list[str]) -> dict[str, Any]:
    """Scripts of this folder one after the other, which write their figures themselves."""
    commands = Commands(folder, seconds)
    for script, *options in scripts:
        command = [sys.executable, str(BENCHMARKS / script), *options, "--output", str(folder)]
        commands.run(" ".join([script, *options]), command)
    return verdict(commands.statuses)


def run_times(folder: Path, seconds: float) -> dict[str, Any]:
    dtypes = ("bfloat16", "float16", "float32")
    return run_scripts(folder, seconds, *(["recurrence.py", "--dtype", dtype] for dtype in dtypes))


def run_probes(folder: Path, seconds: float) -> dict[str, Any]:
    return run_scripts(folder, seconds, ["probes.py"])


def run_benchmark(folder: Path, seconds: float) -> dict[str, Any]:
    return run_scripts(
        folder,
        seconds,
        *(
            [script, "--device", "cuda", "--dtype", dtype, "--rounds", "3"]
            for dtype in ("float32", "bfloat16")
            for script in ("cell.py", "sequence.py")
        ),
    )


# In the order in which a first look at a GPU needs them; with the seconds that each may take.
PARTS: dict[str, tuple[Callable[[Path, float], dict[str, Any]], float]] = {
    "truth": (run_truth, 480),
    "checkers": (run_checkers, 500),
    "times": (run_times, 500),
    "tests": (run_tests, 500),
    "probes": (run_probes, 120),
    "benchmark": (run_benchmark, 400),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="a folder")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"expected a GPU, but torch {torch.__version__} finds none")
    if lltm_ops.build_info()["cuda"] == "not built":
        parser.error(
            "expected a library with CUDA kernels, but it was built without: set CUDA_HOME"
        )
    folder = args.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ok = True
    for name in args.parts:
        run, seconds = PARTS[name]
        begin = time.monotonic()
        result = run(folder, seconds) | {"seconds": round(time.monotonic() - begin, 1)}
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        verdict = "ok" if result["ok"] else f"FAILED, see {folder}"
        print(f"{name}: {verdict}, {result['summary']}, {result['seconds']} s", flush=True)
        ok = ok and result["ok"]
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
