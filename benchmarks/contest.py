"""What the benchmarks of the cell and of the layer share: how contenders are measured and shown."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import roofs
import timing
import torch
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed

Modules = dict[str, nn.Module]
# Calls a module with inputs, and returns what backward begins with.
Call = Callable[..., Any]
# Training takes gradients of the parameters. In a model a step needs those of its inputs, too:
# for the step before it, and for the layer below.
ALL_GRADIENTS = "training, all gradients"
KINDS = ("inference", "training", ALL_GRADIENTS)


def functions(
    what: str, modules: Modules, call: Call, inputs: tuple[Any, ...], grads: tuple[Tensor, ...]
) -> dict[str, Callable[[], Any]]:
    """What is timed, one of KINDS: a call of each module, or of each that can be trained."""
    if what == "inference":
        return {name: partial(call, module, *inputs) for name, module in modules.items()}
    leaves: tuple[Tensor, ...] = ()
    if what == ALL_GRADIENTS:
        inputs = leaves = tuple(input.detach().requires_grad_() for input in inputs)

    def training(module: nn.Module) -> Callable[[], Any]:
        wanted = [*module.parameters(), *leaves]
        return lambda: torch.autograd.grad(call(module, *inputs), wanted, grads)

    return {name: training(module) for name, module in modules.items() if [*module.parameters()]}


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


def measure(
    modules: Modules,
    call: Call,
    inputs: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    flop: dict[str, int],
    args: argparse.Namespace,
    progress: tqdm,
) -> list[dict[str, Any]]:
    """Rows of the table: one of each kind, in calls and (on CUDA) in graphs.

    flop are the products that a call of ours makes, by kind.
    """
    rows = []
    for what in KINDS:
        for graph in (False, True) if args.device == "cuda" else (False,):
            with torch.set_grad_enabled(what != "inference"):
                timed = functions(what, modules, call, inputs, grads)
                if graph:
                    timed = {name: captured(function) for name, function in timed.items()}
                times = timing.medians(timed, args.rounds, device=args.device)
            progress.update(1)
            best = min(time for name, time in times.items() if name != "lltm_ops")
            rows.append(
                {
                    "threads": torch.get_num_threads(),
                    "what": what + (" in a CUDA graph" if graph else ""),
                    "microseconds": {name: time * 1e6 for name, time in times.items()},
                    "ratio": best / times["lltm_ops"],
                    "flop": flop[what],
                }
            )
    return rows


def measure_roof(empty: Callable[[], Any], weights: Tensor) -> dict[str, float]:
    """The roofs on a CPU: a call that does nothing, reading weights, products."""
    with torch.no_grad():
        call = timing.medians({"": empty})[""]
    return {
        "call_microseconds": call * 1e6,
        "gigabytes_per_second_at_best": roofs.bandwidth(weights.nbytes) * 1e-9,
        "gflop_per_second_at_best": roofs.product_rate(weights.dtype) * 1e-9,
    }


def add_share_of_roof(rows: list[dict[str, Any]]) -> None:
    """What the products, or reading the weights, take at best, of our time beyond that of a call.

    The best rate of products is the best of all that were measured between the rows.
    """
    rate = max(row["gflop_per_second_at_best"] for row in rows)
    for row in rows:
        row["gflop_per_second_at_best"] = rate
        products = row["flop"] / rate
        reading = row["weight_bytes"] / row["gigabytes_per_second_at_best"]
        time = row["microseconds"]["lltm_ops"] - row["call_microseconds"]
        row["share_of_roof"] = max(products, reading) * 1e-3 / time


def print_table(rows: list[dict[str, Any]], shape_names: str) -> None:
    names = list(rows[0]["microseconds"])
    header = [shape_names, "threads", "what", *names, "ratio", "roof"]
    table = [header] + [
        [
            row["shape"],
            str(row["threads"]),
            row["what"],
            *(f"{times[name]:.1f}" if name in times else "" for name in names),
            f"{row['ratio']:.2f}",
            f"{row['share_of_roof']:.0%}" if "share_of_roof" in row else "",
        ]
        for row in rows
        for times in [row["microseconds"]]
    ]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def command_line(description: str, shapes: list[str], shape_names: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shapes", nargs="+", default=shapes, help=f"as {shape_names}")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    return parser.parse_args()


def run(
    args: argparse.Namespace,
    shape_names: str,
    title: str,
    name: str,
    measure_shape: Callable[[tuple[int, ...], argparse.Namespace, tqdm], list[dict[str, Any]]],
) -> None:
    """Measures all shapes with each number of threads; prints, writes and draws the figures."""
    # A minute of compiling: a peer of the cell, and the roofs of a CPU.
    if name == "cell" or args.device == "cpu":
        timing.load_native()
    timing.settle_allocator()
    threads = args.threads if args.device == "cpu" else [1]
    described = timing.describe(args.device, args.dtype) | {"title": title, "rounds": args.rounds}
    file = args.output / f"{name}_{args.device}_{args.dtype}.json"
    print(", ".join(described[key] for key in ("machine", "caches", "pages") if key in described))
    rows: list[dict[str, Any]] = []
    total = len(args.shapes) * len(threads) * len(KINDS) * (2 if args.device == "cuda" else 1)
    with tqdm(total=total, desc="timing", unit="row") as progress:
        for count in threads:
            torch.set_num_threads(count)
            before = len(rows)
            for shape in args.shapes:
                sizes = tuple(map(int, shape.split("x")))
                for row in measure_shape(sizes, args, progress):
                    rows.append({"shape": " x ".join(map(str, sizes))} | row)
                timing.write(described | {"rows": rows}, file)
            if args.device == "cpu":
                add_share_of_roof(rows[before:])
    print_table(rows, shape_names)
    timing.save(described | {"rows": rows}, "plot_contest", file)
