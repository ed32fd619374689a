"""Everything that needs a GPU, in one go: tests, compute-sanitizer, probes, benchmark.

Each part prints a line and writes a JSON file; one that fails or takes too long stops none of the
others. The library has to be built in place.
"""

from __future__ import annotations

import argparse
import json
import os
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

import lltm_ops

ROOT = Path(__file__).parent.parent
BENCHMARKS = Path(__file__).parent
# pytest's names, of what is small and comes by every kernel.
SANITIZED = "cuda and float32 and not 1100 and (test_values_and_gradients or test_forward_matches)"
SANITIZERS = ("memcheck", "racecheck", "initcheck")


def finish(command: list[str], seconds: float, log: Path, **environment: str) -> int | str:
    """The exit status, or that there was none in time."""
    with log.open("w") as output:
        try:
            return subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=seconds,
                env=os.environ | environment,
            ).returncode  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return type(error).__name__


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


def run_tests(folder: Path, seconds: float) -> dict[str, Any]:
    """All that a GPU runs, each file in a process of its own, several at a time."""
    end = time.monotonic() + seconds

    def run_file(file: Path) -> tuple[str, Any]:
        report = folder / f"{file.stem}.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", f"--junitxml={report}"]
        left = max(1.0, end - time.monotonic())
        status = finish([*command, str(file)], left, folder / f"{file.stem}.log")
        return file.stem, (status, *read_results(report))

    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        results = dict(pool.map(run_file, sorted((ROOT / "tests").glob("test_*.py"))))
    counts = sum((counts for _, counts, _ in results.values()), Counter())
    no_tests = 5  # pytest's status
    return {
        "ok": all(status in (0, no_tests) for status, _, _ in results.values()),
        "summary": ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none",
        "statuses": {name: status for name, (status, _, _) in results.items()},
        "failed": [name for _, _, failed in results.values() for name in failed],
    }


def run_sanitizers(folder: Path, seconds: float) -> dict[str, Any]:
    """Short tests under each tool of compute-sanitizer, all at a time."""

    def run_tool(tool: str) -> tuple[str, Any]:
        log = folder / f"{tool}.log"
        # initcheck has to see what other kernels write.
        only = [] if tool == "initcheck" else ["--kernel-name", "kns=pointwise_kernel_device"]
        command = ["compute-sanitizer", "--tool", tool, *only, "--error-exitcode", "99"]
        command += [sys.executable, "-m", "pytest", "-q", "-x", "-k", SANITIZED]
        command += ["tests/test_values.py", "tests/test_sequence.py"]
        # Blocks of their own, of which the end is known.
        status = finish(command, seconds, log, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        return tool, {"status": status, "end": log.read_text().splitlines()[-5:]}

    with ThreadPoolExecutor(len(SANITIZERS)) as pool:
        results = dict(pool.map(run_tool, SANITIZERS))
    return {
        "ok": all(result["status"] == 0 for result in results.values()),
        "summary": ", ".join(f"{tool} {result['status']}" for tool, result in results.items()),
        "tools": results,
    }


def run_scripts(folder: Path, seconds: float, name: str, *commands: list[str]) -> dict[str, Any]:
    """Scripts of this folder one after the other, which write their figures themselves."""
    end = time.monotonic() + seconds
    statuses = {}
    for i, (script, *options) in enumerate(commands):
        command = [sys.executable, str(BENCHMARKS / script), *options, "--output", str(folder)]
        left = max(1.0, end - time.monotonic())
        statuses[" ".join([script, *options])] = finish(command, left, folder / f"{name}_{i}.log")
    return {
        "ok": all(status == 0 for status in statuses.values()),
        "summary": ", ".join(f"{script} {status}" for script, status in statuses.items()),
        "statuses": statuses,
    }


def run_probes(folder: Path, seconds: float) -> dict[str, Any]:
    return run_scripts(folder, seconds, "probes", ["probes.py"])


def run_benchmark(folder: Path, seconds: float) -> dict[str, Any]:
    commands = [
        [script, "--device", "cuda", "--dtype", dtype, "--rounds", "3"]
        for dtype in ("float32", "bfloat16")
        for script in ("cell.py", "sequence.py")
    ]
    return run_scripts(folder, seconds, "benchmark", *commands)


# With the seconds that each may take: under eight minutes together.
PARTS: dict[str, tuple[Callable[[Path, float], dict[str, Any]], float]] = {
    "tests": (run_tests, 170),
    "sanitizers": (run_sanitizers, 90),
    "probes": (run_probes, 60),
    "benchmark": (run_benchmark, 140),
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
