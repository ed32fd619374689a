"""Everything that needs a GPU, step by step: build, values, times, compute-sanitizer, tests.

Each step has a limit of time and a log. The parts up to checkers take at most 15 minutes together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import CUDA_HOME, include_paths

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "build" / "gpu"
# What each part decides. In the order in which a first look at a GPU needs them.
PARTS = {
    "build": "whether there are kernels for this GPU, without which nothing else runs",
    "truth": "whether the recurrence is right; if not, it must be off by default",
    "first_call": "whether a graph may capture the first call of a process; if not, the kernels "
    "must be loaded with the library",
    "operators": "whether operators are right on a GPU, also on streams and in graphs",
    "times": "whether waiting or instructions take the time of a step, so what to improve first, "
    "and how it compares with nn.LSTM",
    "graphs": "whether recurrences in parallel branches of a graph may hang; if so, limits.md has "
    "to say it",
    "benchmark": "what may be said of the cell, and of layers in float32",
    "checkers": "whether the kernels access memory as they must, as compute-sanitizer sees it",
    "tests": "whether all other tests pass on a GPU",
    "learn": "whether the packages and chapters of learn work on a GPU",
    "shapes": "whether a cell of few rows becomes one kernel, and which sequences the recurrence "
    "should take",
}
Step = tuple[str, int, list[str]]  # name, seconds at most, command


def compiled(name: str, *sources: str) -> Step:
    """For this GPU, and without PyTorch's libraries."""
    options = ["-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr"]
    folders = [ROOT / "csrc", ROOT / "tests" / "cuda" / "recurrence", *include_paths()]
    arch = "-arch=sm_{}{}".format(*torch.cuda.get_device_capability())
    command = [f"{CUDA_HOME}/bin/nvcc", *options, arch, *(f"-I{folder}" for folder in folders)]
    files = [str(ROOT / source) for source in sources]
    return f"compile_{name}", 60, [*command, "-x", "cu", *files, "-o", str(OUTPUT / name)]


def timed(name: str, seconds: int, script: str, options: str) -> Step:
    """A program of this folder, which writes its table into a folder of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options.split()]
    return name, seconds, [*command, "--output", str(OUTPUT / name)]


def tested(name: str, file: Path, seconds: int, *options: str) -> Step:
    pytest = [sys.executable, "-m", "pytest", "-v", "-o", "faulthandler_timeout=60", *options]
    return name, seconds, [*pytest, str(file)]


def files_of_tests() -> list[Path]:
    """Those that have tests for a GPU; the longest begin first."""
    marks = ("each_device", "needs_cuda", '"cuda"')
    files = [
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        if any(mark in file.read_text() for mark in marks)
        and file.stem not in ("test_cuda", "test_cuda_without_gpu")
    ]
    return sorted(files, key=lambda file: -file.stat().st_size)


def steps_of(part: str) -> list[Step]:
    this_gpu = "{}.{}".format(*torch.cuda.get_device_capability())
    arch = f"TORCH_CUDA_ARCH_LIST={os.environ.get('TORCH_CUDA_ARCH_LIST', this_gpu)}"
    make = ["env", "FORCE_CUDA=1", arch, "make", "in-place"]
    check = str(OUTPUT / "check")
    test_cuda = ROOT / "tests" / "cuda" / "test_cuda.py"
    # All blocks have to run at once, and a multiprocessor runs one.
    blocks = min(100, torch.cuda.get_device_properties(0).multi_processor_count)
    large = [check, "--cases=40", "--units=1024", f"--blocks={blocks}"]
    places = os.pathsep.join([os.environ["PATH"], f"{CUDA_HOME}/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=places) or "compute-sanitizer"
    checked = [sanitizer, "--error-exitcode", "99", "--report-api-errors", "no"]
    parts: dict[str, list[Step]] = {
        "build": [("build", 180, [*make, f"PYTHON={sys.executable}"])],
        "truth": [
            compiled(
                "check",
                "tests/cuda/recurrence/check.cpp",
                "csrc/cuda/recurrence/lltm_recurrence_kernel.cu",
            ),
            *((f"check_{n}_tiles", 20, [*large, f"--tiles={n}"]) for n in (1, 2, 4)),
        ],
        "first_call": [tested("first_call", test_cuda, 30, "-k", "first_call")],
        "operators": [tested("operators", test_cuda, 200)],
        "times": [
            ("clocks", 5, ["nvidia-smi", "-q", "-d", "CLOCK"]),
            compiled("ablations", "benchmarks/ablations.cu"),
            ("ablations", 20, [str(OUTPUT / "ablations")]),
            timed(
                "float16", 90, "recurrence.py",
                "--dtypes float16 --sizes 256 1024 512 --batches 8 16 32 64 128 --rounds 2",
            ),
            timed("bfloat16", 60, "recurrence.py", "--dtypes bfloat16 --sizes 256 1024 --rounds 2"),
        ],
        "graphs": [
            timed(
                "two_streams", 20, "recurrence.py",
                "--dtypes bfloat16 --times 64 --sizes 256 --batches 16 "
                "--forms both_directions_on_two_streams",
            ),
        ],
        "benchmark": [
            timed("cell", 70, "cell.py", "--device cuda --dtypes bfloat16 float32 --rounds 2"),
            timed("sequence", 20, "sequence.py", "--device cuda --dtypes float32 --rounds 2"),
        ],
        "checkers": [
            (tool, 20, [*checked, "--tool", tool, check, "--cases=4", "--units=256"])
            for tool in ("memcheck", "racecheck", "synccheck")
        ],
        "tests": [tested(file.stem, file, 300, "-k", "cuda") for file in files_of_tests()],
        "learn": [tested("learn", ROOT / "learn", 600, "-m", "gpu")],
        "shapes": [
            timed("few_rows", 120, "few_rows.py", "--rounds 2"),
            timed("short", 60, "recurrence.py", "--dtypes bfloat16 --times 3 8 32 128 --sizes 512"),
            timed("larger", 60, "recurrence.py", "--times 256 --sizes 768 2048 --batches 16 256"),
            timed("tf32", 60, "recurrence.py", "--dtypes float32 --tf32 --times 256 --sizes 512"),
            timed(
                "forms", 90, "recurrence.py",
                "--dtypes bfloat16 --times 256 --sizes 512 --batches 16 "
                "--forms packed resets odd_input two_layers both_directions",
            ),
        ],
    }  # fmt: skip
    return parts[part]


def finish(command: list[str], seconds: int, log: Path) -> int:
    """The exit status. When time is over pytest gets SIGINT, at which it sums up."""
    limited = ["timeout", "--signal=INT", "--kill-after=10", str(seconds), *command]
    with log.open("w") as output:
        process = subprocess.Popen(
            limited, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        status = process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the command has left behind
    return status


def run(step: Step) -> bool:
    name, seconds, command = step
    log, begin = OUTPUT / f"{name}.log", time.monotonic()
    status = finish(command, seconds, log)
    # pytest's 5: no test of this file needs a GPU.
    ok = status == 0 or (status == 5 and command[-3:-1] == ["-k", "cuda"])
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    verdict = "ok" if ok else f"FAILED with {status}, see {log}"
    print(f"{name}: {verdict}, {time.monotonic() - begin:.0f} s, {last[:200]}", flush=True)
    return ok


def write_archive() -> None:
    """Packs all that there is so far, because a run may be ended before its last part."""
    new = shutil.make_archive(f"{OUTPUT}.new", "gztar", OUTPUT)
    Path(new).replace(f"{OUTPUT}.tar.gz")


def main() -> int:
    # A shell in the background may ignore it, and then the steps would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=", ".join(PARTS),
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"expected a GPU, but torch {torch.__version__} finds none")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    passed = True
    for part in args.parts:
        print(f"{part} decides {PARTS[part]}.", flush=True)
        with ThreadPoolExecutor(3 if part == "tests" else 1) as pool:
            ok = all(list(pool.map(run, steps_of(part))))
        passed = passed and ok
        write_archive()
        if part in ("build", "truth") and not ok:
            break  # what follows would be of an older library, or of wrong values
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
