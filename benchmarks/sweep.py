"""One step of the cell compared with eager PyTorch over many shapes: is any of them slower?

Prints the shapes that are. Writes sweep.csv, with eager's time over ours.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import figures
import timing
import torch
from cell import EagerCell
from contest import options, show
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed

import lltm_ops

BATCHES = [1, 2, 7, 15, 16, 33, 64, 200, 512]
INPUTS = [0, 1, 100, 513, 2048]
STATES = [1, 7, 31, 64, 130, 512, 1000, 2048]


def call(cell: nn.Module, input: Tensor, *state: Tensor) -> Any:
    return cell(input, state)


def ratios(batch: int, input_size: int, hidden_size: int, rounds: int) -> dict[str, float]:
    input = torch.randn(batch, input_size)
    state = torch.randn(batch, hidden_size), torch.randn(batch, hidden_size)
    classes = {"lltm_ops": lltm_ops.LLTMCell, "eager": EagerCell}
    cells = {name: make(input_size, hidden_size) for name, make in classes.items()}
    found = {}
    for what in timing.KINDS:
        with torch.set_grad_enabled(what != "inference"):
            timed = timing.calls(what, cells, call, (input, *state), state)
            times = timing.medians(timed, rounds, 0.005)
        found[what] = times["eager"] / times["lltm_ops"]
    return found


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--inputs", nargs="+", type=int, default=INPUTS)
    parser.add_argument("--states", nargs="+", type=int, default=STATES)
    parser.set_defaults(threads=[1], rounds=3)
    args = parser.parse_args()
    timing.settle_allocator()
    about = figures.describe(rounds=args.rounds)
    rows = []
    cases = itertools.product(args.threads, args.batches, args.inputs, args.states)
    for threads, *shape in tqdm(list(cases), desc="timing", unit="shape"):
        torch.set_num_threads(threads)
        found = ratios(*shape, args.rounds)
        sizes = dict(zip(("threads", "batch", "input", "state"), (threads, *shape), strict=True))
        rows.append(sizes | found)
        for what, ratio in found.items():
            if ratio < 1:
                show(sizes | {what: ratio})
        figures.write(args.output / "sweep.csv", about, rows)
    every = [row[what] for row in rows for what in timing.KINDS]
    print(
        f"{len(every)} figures, {sum(ratio < 1 for ratio in every)} slower than eager; eager over "
        f"ours: lowest {min(every):.2f}, median {statistics.median(every):.2f}"
    )


if __name__ == "__main__":
    main()
