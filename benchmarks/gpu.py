"""Everything that needs a GPU: build, tests, compute-sanitizer, times. Each part runs by itself.

A part ends in under nine minutes, prints a line and writes a JSON file. One that fails or takes too
long stops none of the others, but for the build, and loses nothing that it has written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch.utils.cpp_extension import CUDA_HOME, include_paths

ROOT = Path(__file__).parent.parent
BENCHMARKS = Path(__file__).parent
GRACE = 10  # seconds between SIGINT and SIGKILL
running: set[int] = set()  # process groups
RECURRENCE = ROOT / "tests" / "cuda" / "recurrence"
KERNELS = ROOT / "csrc" / "cuda" / "recurrence" / "lltm_recurrence_kernel.cu"
CHECK = (RECURRENCE / "check.cpp", KERNELS)
SANITIZERS = ("memcheck", "racecheck", "synccheck")
PACKAGES = ("pytest", "expecttest", "hypothesis")
TESTING = {"truth", "tests"}  # the parts that need them


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def kill_all(*_: Any) -> None:
    """For SIGTERM: the children are in sessions of their own, and would go on."""
    for group in running:
        kill(group)
    os._exit(128 + signal.SIGTERM)


def finish(command: list[str], seconds: float, log: Path) -> int | str:
    """The exit status, or that there was none in time. What is printed is added to the log.

    Then all processes of the command get SIGINT, by which pytest still writes its report, and
    SIGKILL, by which nobody goes on using the GPU.
    """
    with log.open("a") as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return type(error).__name__
        running.add(process.pid)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            return type(error).__name__
        finally:
            kill(process.pid)
            running.discard(process.pid)
            # One that the driver holds is left behind.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def verdict(statuses: dict[str, Any]) -> dict[str, Any]:
    return {
        "ok": all(status == 0 for status in statuses.values()),
        "summary": ", ".join(f"{name}: {status}" for name, status in statuses.items()),
        "statuses": statuses,
    }


class Commands:
    """One after the other, until the time of a part is over. They share a log."""

    def __init__(self, folder: Path, part: str, seconds: float) -> None:
        self.folder = folder
        self.log = folder / f"{part}.log"
        self.log.unlink(missing_ok=True)
        self.end = time.monotonic() + seconds
        self.statuses: dict[str, Any] = {}

    def run(self, name: str, command: list[str], most: float = 600) -> bool:
        with self.log.open("a") as log:
            log.write(f"--- {name}: {shlex.join(command)}\n")
        left = min(most, self.end - time.monotonic())
        status = finish(command, left, self.log) if left > 0 else "no time left"
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
        if case.get("name") is None:  # SIGINT came while it ran
            outcome = "unfinished"
        counts[outcome] += 1
        if outcome in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed


def compile_program(commands: Commands, name: str, *sources: Path) -> str:
    """For this GPU, and without PyTorch's libraries."""
    program = Path(tempfile.mkdtemp()) / name
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
    command += ["-x", "cu", *map(str, sources), "-o", str(program)]
    commands.run(f"compile {name}", command)
    return str(program)


def run_build(folder: Path, seconds: float) -> dict[str, Any]:
    """The library, in place, for this GPU alone unless TORCH_CUDA_ARCH_LIST says more."""
    commands = Commands(folder, "build", seconds)
    major, minor = torch.cuda.get_device_capability()
    options = {
        "FORCE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}"),
    }
    environment = [f"{name}={value}" for name, value in options.items()]
    commands.run("make", ["env", *environment, "make", "in-place", f"PYTHON={sys.executable}"])
    return verdict(commands.statuses)


def run_truth(folder: Path, seconds: float) -> dict[str, Any]:
    """The recurrence against double, first by itself; then the tests of it in PyTorch."""
    commands = Commands(folder, "truth", seconds)
    program = compile_program(commands, "check", *CHECK)
    right = True
    # All have to run at once, and a multiprocessor runs one.
    blocks = min(100, torch.cuda.get_device_properties(0).multi_processor_count)
    for repeat in range(6):
        for tiles in (1, 2, 4):
            options = [f"--seed={1000 * repeat}", "--cases=20", "--units=1024"]
            options += [f"--blocks={blocks}", f"--tiles={tiles}"]
            name = f"check {repeat} with {tiles} tiles a block"
            right = right and commands.run(name, [program, *options], 60)
    pytest = [sys.executable, "-m", "pytest", "-v", "-o", "faulthandler_timeout=60"]
    # If the program failed, the tests of the recurrence may hang.
    chosen = [] if right else ["-k", "not recurrence"]
    commands.run("test_cuda.py", [*pytest, *chosen, "tests/cuda/test_cuda.py"])
    return verdict(commands.statuses)


def run_checkers(folder: Path, seconds: float) -> dict[str, Any]:
    """compute-sanitizer, on a program without Python."""
    commands = Commands(folder, "checkers", seconds)
    program = compile_program(commands, "check", *CHECK)
    places = os.pathsep.join([os.environ["PATH"], f"{CUDA_HOME}/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=places) or "compute-sanitizer"
    for tool in SANITIZERS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "99"]
        command += ["--report-api-errors", "no", program]
        # Under some virtual machines it knows no device, which is no fault of the kernels.
        if commands.run(f"{tool} of one case", [*command, "--cases=1", "--units=32"], 30):
            commands.run(tool, [*command, "--cases=10", "--units=256"], 70)
    return verdict(commands.statuses)


def files_of_tests() -> list[Path]:
    """Those that have tests for a GPU; the longest begin first."""
    files = [
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        if any(word in file.read_text() for word in ("each_device", "needs_cuda", '"cuda"'))
        and file.name != "test_cuda_without_gpu.py"
    ]
    return sorted(files, key=lambda file: -file.stat().st_size)


def run_tests(folder: Path, seconds: float) -> dict[str, Any]:
    """All that a GPU runs, each file in a process of its own, three at a time."""
    end = time.monotonic() + seconds
    reports = Path(tempfile.mkdtemp())

    def run_file(file: Path) -> tuple[str, Any]:
        report, log = reports / f"{file.stem}.xml", reports / f"{file.stem}.log"
        command = [sys.executable, "-m", "pytest", "-v", "-k", "cuda", f"--junitxml={report}"]
        command += ["-o", "faulthandler_timeout=60", str(file)]
        left = end - time.monotonic()
        status = finish(command, left, log) if left > 0 else "no time left"
        return file.stem, (status, *read_results(report))

    with ThreadPoolExecutor(3) as pool:
        results = dict(pool.map(run_file, files_of_tests()))
    logs = [log.read_text(errors="replace") for log in sorted(reports.glob("*.log"))]
    (folder / "tests.log").write_text("".join(logs))
    counts = sum((counts for _, counts, _ in results.values()), Counter())
    no_tests = 5  # pytest's status
    return {
        "ok": all(status in (0, no_tests) for status, _, _ in results.values()),
        "summary": ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none",
        "statuses": {name: status for name, (status, _, _) in results.items()},
        "failed": [name for _, _, failed in results.values() for name in failed],
    }


def run_scripts(commands: Commands, *scripts: list[str]) -> dict[str, Any]:
    """Runs scripts of this folder one after the other; each writes its own figures.

    They share what is left of the time: one that hangs takes its own part of it.
    """
    for i, (script, *options) in enumerate(scripts):
        command = [sys.executable, str(BENCHMARKS / script), *options]
        most = (commands.end - time.monotonic()) / (len(scripts) - i)
        name = " ".join([script, *options])
        commands.run(name, [*command, "--output", str(commands.folder)], most)
    return verdict(commands.statuses)


def run_times(folder: Path, seconds: float) -> dict[str, Any]:
    """The recurrence beside step by step and nn.LSTM, and what each of its parts costs."""
    commands = Commands(folder, "times", seconds)
    program = compile_program(commands, "ablations", BENCHMARKS / "ablations.cu")
    commands.run("ablations", [program], 60)
    dtypes = ("bfloat16", "float16", "float32")
    return run_scripts(commands, *(["recurrence.py", "--dtype", dtype] for dtype in dtypes))


def run_shapes(folder: Path, seconds: float) -> dict[str, Any]:
    """Larger sizes and batches, and other forms of sequences and layers, as in times."""
    larger = ["--name", "larger", "--sizes", "512", "2048", "--batches", "16", "128", "256"]
    others = ["--name", "forms", "--sizes", "512", "--batches", "16", "--forms"]
    return run_scripts(
        Commands(folder, "shapes", seconds),
        *(
            ["recurrence.py", "--dtype", dtype, "--time", "256", *options]
            for dtype in ("bfloat16", "float32")
            for options in (larger, others)
        ),
    )


def run_probes(folder: Path, seconds: float) -> dict[str, Any]:
    """Launches, barriers and exchanges, which bound the recurrence from below."""
    return run_scripts(Commands(folder, "probes", seconds), ["probes.py"])


def run_benchmark(folder: Path, seconds: float) -> dict[str, Any]:
    """Cell and layer beside what else PyTorch offers."""
    return run_scripts(
        Commands(folder, "benchmark", seconds),
        *(
            [script, "--device", "cuda", "--dtype", dtype, "--rounds", "3"]
            for dtype in ("float32", "bfloat16")
            for script in ("cell.py", "sequence.py")
        ),
    )


# In the order in which a first look at a GPU needs them, with the seconds that each may take.
PARTS: dict[str, tuple[Callable[[Path, float], dict[str, Any]], float]] = {
    "build": (run_build, 300),
    "truth": (run_truth, 300),
    "times": (run_times, 400),
    "probes": (run_probes, 60),
    "checkers": (run_checkers, 280),
    "tests": (run_tests, 360),
    "shapes": (run_shapes, 200),
    "benchmark": (run_benchmark, 180),
}


def run_part(name: str, folder: Path) -> dict[str, Any]:
    run, seconds = PARTS[name]
    if name != "build":
        try:
            import lltm_ops  # there is no library before it is built

            if lltm_ops.build_info()["cuda"] == "not built":
                raise ImportError("expected a library with CUDA kernels, but it has none")
        except ImportError as error:
            return {"ok": False, "summary": f"{error} (run the part build first)"}
    return run(folder, seconds)


def main() -> int:
    # In the background a shell lets it be ignored, and pytest writes its report at SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n"
        + "\n".join(
            f"  {name:<10} {seconds:3.0f} s at most. {str(run.__doc__).splitlines()[0]}"
            for name, (run, seconds) in PARTS.items()
        ),
    )
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS),
        help="all in this order, unless given",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "gpu",
        help="the folder for logs and figures, build/gpu unless given",
    )  # fmt: skip
    args = parser.parse_args()
    lacking = [name for name in PACKAGES if find_spec(name) is None]
    if lacking and not TESTING.isdisjoint(args.parts):
        parser.error(f"expected the packages {' '.join(PACKAGES)}, but got no {' '.join(lacking)}")
    if not torch.cuda.is_available():
        parser.error(f"expected a GPU, but torch {torch.__version__} finds none")
    folder = args.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ok = True
    for name in args.parts:
        begin = time.monotonic()
        result = run_part(name, folder) | {"seconds": round(time.monotonic() - begin, 1)}
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        verdict = "ok" if result["ok"] else f"FAILED, see {folder}"
        print(f"{name}: {verdict}, {result['summary']}, {result['seconds']} s", flush=True)
        ok = ok and result["ok"]
        if name == "build" and not ok:
            break  # the others would take what was built before
    return 0 if ok else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, kill_all)
    sys.exit(main())
