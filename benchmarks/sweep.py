"""One step of the cell beside eager PyTorch over many shapes: is any of them slower?

Prints the shapes that are; writes a JSON file and a picture.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import timing
import torch
from cell import EagerCell
from contest import KINDS, functions
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed

import lltm_ops

BATCHES = [1, 2, 7, 15, 16, 33, 64, 200, 512]
INPUTS = [0, 1, 100, 513, 2048]
STATES = [1, 7, 31, 64, 130, 512, 1000, 2048]


def measure_shape(shape: tuple[int, int, int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each kind."""
    batch, input_size, hidden_size = shape
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    input = torch.randn(batch, input_size, **options)
    state = (torch.randn(batch, hidden_size, **options), torch.randn(batch, hidden_size, **options))
    ours = lltm_ops.LLTMCell(input_size, hidden_size, **options)
    eager = EagerCell(input_size, hidden_size, **options)
    rows = []
    cells = {"lltm_ops": ours, "eager": eager}

    def call(cell: nn.Module, input: Tensor, *state: Tensor) -> Any:
        return cell(input, state)

    for what in KINDS:
        with torch.set_grad_enabled(what != "inference"):
            timed = functions(what, cells, call, (input, *state), state)
            times = timing.medians(timed, 3, 0.005, device=args.device)
        row = {"batch": batch, "input": input_size, "state": hidden_size, "what": what}
        row["microseconds"] = {name: time * 1e6 for name, time in times.items()}
        rows.append(row | {"ratio": times["eager"] / times["lltm_ops"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--inputs", nargs="+", type=int, default=INPUTS)
    parser.add_argument("--states", nargs="+", type=int, default=STATES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    timing.settle_allocator()
    shapes = list(itertools.product(args.batches, args.inputs, args.states))
    rows = []
    with tqdm(total=len(shapes), desc="timing", unit="shape") as progress:
        for shape in shapes:
            rows += measure_shape(shape, args)
            progress.update(1)
    slower = [row for row in rows if row["ratio"] < 1]
    for row in slower:
        print("slower:", *(f"{key} {row[key]}" for key in row))
    ratios = sorted(row["ratio"] for row in rows)
    print(
        f"{len(rows)} figures, {len(slower)} slower than eager; eager over ours: "
        f"lowest {ratios[0]:.2f}, median {ratios[len(ratios) // 2]:.2f}, highest {ratios[-1]:.2f}"
    )
    plural = "s" if args.threads > 1 else ""
    name = f"sweep_{args.device}_{args.dtype}_{args.threads}_thread{plural}.json"
    run = timing.describe(args.device, args.dtype) | {"threads": args.threads, "rows": rows}
    timing.save(run, "plot_sweep", args.output / name)


if __name__ == "__main__":
    main()
