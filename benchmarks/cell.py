"""One step of the cell beside what else PyTorch offers for it, and the roofs of the machine.

Everything is measured in one process, the contenders taking turns: the median microseconds of
inference and of training (forward, and backward for gradients of the parameters), through the
modules, with the state given. Prints a table; writes a JSON file and a picture.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import roofs
import timing
import torch
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed

import lltm_ops

State = tuple[Tensor, Tensor]
# batch, input, state: the tutorial's is the second.
SHAPES = ["1x32x128", "16x32x128", "64x256x512", "256x1024x1024"]


class EagerCell(lltm_ops.LLTMCell):
    """The same parameters, the mathematics in plain PyTorch."""

    def forward(self, input: Tensor, state: State) -> State:
        return lltm_ops.reference(input, self.weights, self.bias, *state)


class TutorialCell(lltm_ops.LLTMCell):
    """The same parameters, the mathematics in C++ out of ATen's operators."""

    def forward(self, input: Tensor, state: State) -> State:
        return torch.ops.lltm_benchmark.tutorial_cell(input, self.weights, self.bias, *state)


class EmptyCell(lltm_ops.LLTMCell):
    """The same call, of an operator that allocates the results and does nothing else."""

    def forward(self, input: Tensor, state: State) -> State:
        return torch.ops.lltm_benchmark.empty_call(input, self.weights, self.bias, *state)


def contenders(input_size: int, hidden_size: int, options: dict[str, Any]) -> dict[str, nn.Module]:
    torch._dynamo.reset()
    return {
        "lltm_ops": lltm_ops.LLTMCell(input_size, hidden_size, **options),
        "eager": EagerCell(input_size, hidden_size, **options),
        "compile": torch.compile(EagerCell(input_size, hidden_size, **options), dynamic=False),
        "C++": TutorialCell(input_size, hidden_size, **options),
        "LSTMCell": nn.LSTMCell(input_size, hidden_size, **options),
    }


def inference(cell: nn.Module, input: Tensor, state: State) -> Callable[[], Any]:
    return lambda: cell(input, state)


def training(cell: nn.Module, input: Tensor, state: State) -> Callable[[], Any]:
    parameters = list(cell.parameters())
    return lambda: torch.autograd.grad(cell(input, state), parameters, state)


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def measure_shape(
    shape: tuple[int, int, int], args: argparse.Namespace, progress: tqdm
) -> list[dict[str, Any]]:
    """Rows of the table: for inference and training, in calls and (on CUDA) in graphs."""
    batch, input_size, hidden_size = shape
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    cells = contenders(input_size, hidden_size, options)
    input = torch.randn(batch, input_size, **options)
    state = (torch.randn(batch, hidden_size, **options), torch.randn(batch, hidden_size, **options))
    weights = cells["lltm_ops"].weights
    with torch.no_grad():
        empty = inference(EmptyCell(input_size, hidden_size, **options), input, state)
        call = timing.medians({"": empty})[""]
    rows = []
    for what, prepare in (("inference", inference), ("training", training)):
        for graph in (False, True) if args.device == "cuda" else (False,):
            with torch.set_grad_enabled(what == "training"):
                functions = {name: prepare(cell, input, state) for name, cell in cells.items()}
                if graph:
                    functions = {name: captured(function) for name, function in functions.items()}
                times = timing.medians(functions, args.rounds, device=args.device)
            progress.update(1)
            best = min(time for name, time in times.items() if name != "lltm_ops")
            row = {
                "shape": " x ".join(map(str, shape)),
                "threads": torch.get_num_threads(),
                "what": what + (" in a CUDA graph" if graph else ""),
                "microseconds": {name: time * 1e6 for name, time in times.items()},
                "ratio": best / times["lltm_ops"],
            }
            products = 2 if what == "training" else 1
            flop = products * 2 * batch * weights.numel()
            row |= {"flop": flop, "weight_bytes": weights.nbytes}
            if args.device == "cpu":
                row["call_microseconds"] = call * 1e6
                row["gigabytes_per_second_at_best"] = roofs.bandwidth(weights.nbytes) * 1e-9
                row["gflop_per_second_at_best"] = roofs.product_rate(options["dtype"]) * 1e-9
            rows.append(row)
    return rows


def add_share_of_roof(rows: list[dict[str, Any]]) -> None:
    """What the products, or reading the weights, take at best, of our time beyond that of a call.

    Only for inference: training writes gradients too. The best rate of products is the best of all
    that were measured between the rows.
    """
    rate = max(row["gflop_per_second_at_best"] for row in rows)
    for row in rows:
        row["gflop_per_second_at_best"] = rate
        if row["what"] != "inference":
            continue
        products = row["flop"] / rate
        reading = row["weight_bytes"] / row["gigabytes_per_second_at_best"]
        time = row["microseconds"]["lltm_ops"] - row["call_microseconds"]
        row["share_of_roof"] = max(products, reading) * 1e-3 / time


def print_table(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["microseconds"])
    header = ["batch x input x state", "threads", "what", *names, "ratio", "roof"]
    table = [header] + [
        [
            row["shape"],
            str(row["threads"]),
            row["what"],
            *(f"{row['microseconds'][name]:.1f}" for name in names),
            f"{row['ratio']:.2f}",
            f"{row['share_of_roof']:.0%}" if "share_of_roof" in row else "",
        ]
        for row in rows
    ]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="as batch x input x state")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    args = parser.parse_args()
    timing.load_native()
    timing.settle_allocator()
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    threads = args.threads if args.device == "cpu" else [1]
    rows = []
    total = len(shapes) * len(threads) * (4 if args.device == "cuda" else 2)
    with tqdm(total=total, desc="timing", unit="row") as progress:
        for count in threads:
            torch.set_num_threads(count)
            of_this_count = []
            for shape in shapes:
                of_this_count += measure_shape(shape, args, progress)
            if args.device == "cpu":
                add_share_of_roof(of_this_count)
            rows += of_this_count
    print_table(rows)
    run = timing.describe(args.device, args.dtype) | {"rounds": args.rounds, "rows": rows}
    timing.save(run, "plot_cell", args.output / f"cell_{args.device}_{args.dtype}.json")


if __name__ == "__main__":
    main()
