"""What the benchmarks of the cell and of the layer share: how contenders are measured and shown."""

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

Modules = dict[str, nn.Module]
# Calls a module, and returns what backward begins with.
Call = Callable[[nn.Module], Any]


def inference(module: nn.Module, call: Call) -> Callable[[], Any]:
    return lambda: call(module)


def training(module: nn.Module, call: Call, grads: tuple[Tensor, ...]) -> Callable[[], Any]:
    """Forward, and backward for gradients of the parameters."""
    parameters = list(module.parameters())
    return lambda: torch.autograd.grad(call(module), parameters, grads)


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
    grads: tuple[Tensor, ...],
    args: argparse.Namespace,
    progress: tqdm,
) -> list[dict[str, Any]]:
    """Rows of the table: for inference and training, in calls and (on CUDA) in graphs."""
    rows = []
    for what in ("inference", "training"):
        for graph in (False, True) if args.device == "cuda" else (False,):
            with torch.set_grad_enabled(what == "training"):
                functions = {
                    name: inference(module, call)
                    if what == "inference"
                    else training(module, call, grads)
                    for name, module in modules.items()
                    if what == "inference" or list(module.parameters())
                }
                if graph:
                    functions = {name: captured(function) for name, function in functions.items()}
                times = timing.medians(functions, args.rounds, device=args.device)
            progress.update(1)
            best = min(time for name, time in times.items() if name != "lltm_ops")
            rows.append(
                {
                    "threads": torch.get_num_threads(),
                    "what": what + (" in a CUDA graph" if graph else ""),
                    "microseconds": {name: time * 1e6 for name, time in times.items()},
                    "ratio": best / times["lltm_ops"],
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

    Only for inference, whose products ``flop`` counts: training writes gradients too. The best rate
    of products is the best of all that were measured between the rows.
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
    print(", ".join(described[key] for key in ("machine", "caches") if key in described))
    rows: list[dict[str, Any]] = []
    total = len(args.shapes) * len(threads) * (4 if args.device == "cuda" else 2)
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
