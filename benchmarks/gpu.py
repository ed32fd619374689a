"""Runs everything that needs a GPU, part by part, each within its seconds.

A part writes its log, and perhaps tables, into build/gpu. After each part build/gpu.tar.gz has all
of them, because a run may be ended before its last part.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.cpp_extension import CUDA_HOME, include_paths

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "build" / "gpu"


class Part(NamedTuple):
    name: str
    seconds: int
    decides: str
    command: str  # for bash, with the variables of environment()


# In the order in which a first look at a GPU needs them.
PARTS = [
    Part(
        "build", 180, "whether there are kernels for this GPU, without which nothing else runs",
        "FORCE_CUDA=1 make in-place PYTHON=python3",
    ),
    Part(
        "truth", 120, "whether the recurrence is right; if not, it must be off by default",
        """nvcc -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr -arch=sm_$SM $INCLUDES -x cu \
             tests/cuda/recurrence/check.cpp csrc/cuda/recurrence/lltm_recurrence_kernel.cu \
             -o build/gpu/check
           for tiles in 1 2 4; do
             build/gpu/check --cases=40 --units=1024 --blocks=$BLOCKS --tiles=$tiles
           done""",
    ),
    Part(
        "first_call", 30, "whether a graph may capture the first call of a process; if not, the "
        "kernels must be loaded with the library",
        "python3 -m pytest -v tests/cuda/test_cuda.py -k first_call",
    ),
    Part(
        "operators", 200, "whether operators are right on a GPU, also on streams and in graphs",
        "python3 -m pytest -v tests/cuda/test_cuda.py",
    ),
    Part(
        "float16", 100, "how the recurrence compares with cuDNN's kernel for all steps",
        """nvidia-smi -q -d CLOCK
           python3 benchmarks/recurrence.py --dtypes float16 --sizes 256 1024 512 \
             --batches 8 16 32 64 128 --rounds 2 --output build/gpu/float16""",
    ),
    Part(
        "bfloat16", 60, "how it compares with nn.LSTM, for which cuDNN has no such kernel",
        """python3 benchmarks/recurrence.py --dtypes bfloat16 --sizes 256 1024 --rounds 2 \
             --output build/gpu/bfloat16""",
    ),
    Part(
        "graphs", 20, "whether recurrences in parallel branches of a graph may hang; if so, "
        "limits.md has to say it",
        """python3 benchmarks/recurrence.py --dtypes bfloat16 --times 64 --sizes 256 --batches 16 \
             --forms both_directions_on_two_streams --output build/gpu/graphs""",
    ),
    Part(
        "benchmark", 90, "what may be said of the cell, and of layers in float32",
        """python3 benchmarks/cell.py --device cuda --dtypes bfloat16 float32 --rounds 2 \
             --output build/gpu/cell
           python3 benchmarks/sequence.py --device cuda --dtypes float32 --rounds 2 \
             --output build/gpu/sequence""",
    ),
    Part(
        "checkers", 60, "whether the kernels access memory as they must; truth has built the "
        "program",
        """for tool in memcheck racecheck synccheck; do
             compute-sanitizer --error-exitcode 99 --report-api-errors no --tool $tool \
               build/gpu/check --cases=4 --units=256
           done""",
    ),
    Part(
        "tests", 1200, "whether all other tests pass on a GPU",
        "python3 -m pytest -v --continue-on-collection-errors tests/ops tests/modules "
        "tests/packaging/test_packaging.py -k cuda",
    ),
    Part(
        "learn", 600, "whether the packages and chapters of learn work on a GPU",
        "python3 -m pytest -v learn -m gpu",
    ),
    Part(
        "shapes", 300, "which sequences the recurrence should take",
        """run() { python3 benchmarks/recurrence.py --output build/gpu/$*; }
           run short --dtypes bfloat16 --times 3 8 32 128 --sizes 512
           run larger --times 256 --sizes 768 2048 --batches 16 256
           run tf32 --dtypes float32 --tf32 --times 256 --sizes 512
           run forms --dtypes bfloat16 --times 256 --sizes 512 --batches 16 \
             --forms packed resets odd_input two_layers both_directions""",
    ),
]  # fmt: skip


def environment() -> dict[str, str]:
    major, minor = torch.cuda.get_device_capability()
    # All blocks have to run at once, and a multiprocessor runs one.
    blocks = min(100, torch.cuda.get_device_properties(0).multi_processor_count)
    folders = (ROOT / "csrc", ROOT / "tests" / "cuda" / "recurrence", *include_paths())
    path = (str(Path(sys.executable).parent), f"{CUDA_HOME}/bin", os.environ["PATH"])
    variables = {
        "SM": f"{major}{minor}",
        "BLOCKS": str(blocks),
        "INCLUDES": " ".join(f"-I{folder}" for folder in folders),
        "PATH": os.pathsep.join(path),
    }
    return {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"} | os.environ | variables


def run(part: Part, variables: dict[str, str]) -> bool:
    print(f"{part.name} decides {part.decides}.", flush=True)
    log, begin = OUTPUT / f"{part.name}.log", time.monotonic()
    # At SIGINT pytest sums up.
    limit = ["timeout", "--signal=INT", "--kill-after=10", str(part.seconds)]
    with log.open("w") as output:
        status = subprocess.run(
            [*limit, "bash", "-ec", part.command],
            cwd=ROOT,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    verdict = "ok" if status == 0 else f"FAILED with {status}, see {log}"
    print(f"{part.name}: {verdict}, {time.monotonic() - begin:.0f} s, {last[:200]}", flush=True)
    shutil.make_archive(str(OUTPUT), "gztar", OUTPUT)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(f"{part.name}, {part.seconds} s: {part.decides}" for part in PARTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART")
    chosen = parser.parse_args().parts
    if not torch.cuda.is_available():
        parser.error(f"expected a GPU, but torch {torch.__version__} finds none")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    variables, passed = environment(), True
    for part in PARTS:
        if part.name in chosen:
            ok = run(part, variables)
            passed = passed and ok
            if not ok and part.name in ("build", "truth"):
                break  # what follows would be of an older library, or of wrong values
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
