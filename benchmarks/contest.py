"""What the benchmarks of the cell and of the layer share: options, measuring, writing."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import timing
import torch
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed
from torch.utils.cpp_extension import load


@dataclass
class Contest:
    """Modules that do the same, and what they are called with."""

    modules: dict[str, nn.Module]
    call: Callable[..., Any]  # as in timing.calls
    inputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]

    def rows(self, rounds: int, device: str) -> Iterator[dict[str, Any]]:
        """One of each kind, in calls and (on CUDA) in graphs."""
        for what in timing.KINDS:
            for graph in (False, True) if device == "cuda" else (False,):
                with torch.set_grad_enabled(what != "inference"):
                    timed = timing.calls(what, self.modules, self.call, self.inputs, self.grads)
                    if graph:
                        timed = {name: timing.captured(call) for name, call in timed.items()}
                    times = timing.medians(timed, rounds)
                yield {"what": what + (" in a CUDA graph" if graph else ""), **times}


def load_tutorial_cell() -> None:
    """Builds it, and loads it: ``torch.ops.lltm_benchmark``."""
    # pip puts ninja beside python, which need not be on PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # A folder of its own: a build that was killed leaves a lock behind in torch's cache.
    with tempfile.TemporaryDirectory() as directory:
        load(
            "lltm_benchmark",
            [str(Path(__file__).with_name("tutorial_cell.cpp"))],
            extra_cflags=["-O3", "-march=native", "-fopenmp"],
            build_directory=directory,
            is_python_module=False,
        )


def options(description: str) -> argparse.ArgumentParser:
    """What all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--output", type=Path, default=figures.OUTPUT, help="a folder")
    return parser


def show(row: dict[str, Any]) -> None:
    values = (f"{value:.4g}" if isinstance(value, float) else value for value in row.values())
    print(", ".join(f"{name} {value}" for name, value in zip(row, values, strict=True)), flush=True)


def run(
    description: str,
    name: str,
    shapes: list[str],
    sizes: str,
    make: Callable[[tuple[int, ...], dict[str, Any]], Contest],
) -> None:
    """Measures all shapes in each dtype and with each number of threads."""
    parser = options(description)
    parser.add_argument("--shapes", nargs="+", default=shapes, help=f"as {sizes}")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtypes", nargs="+", default=dtypes[:1], choices=dtypes)
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    if name == "cell":
        load_tutorial_cell()  # a minute of compiling
    timing.settle_allocator()
    about = figures.describe(args.device, rounds=args.rounds)
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    rows: list[dict[str, Any]] = []
    cases = [
        (dtype, threads, shape)
        for dtype in args.dtypes
        for threads in (args.threads if on_cpu else [1])
        for shape in args.shapes
    ]
    for dtype, threads, shape in tqdm(cases, desc="timing", unit="shape"):
        torch.set_num_threads(threads)
        tensors = {"device": args.device, "dtype": getattr(torch, dtype)}
        contest = make(tuple(map(int, shape.split("x"))), tensors)
        for row in contest.rows(args.rounds, args.device):
            rows.append({"dtype": dtype, "threads": threads, "shape": shape} | row)
            show(rows[-1])
        figures.write(args.output / f"{name}.csv", about, rows)
