"""The recurrence on a GPU beside a GEMM and a kernel a step, and cuDNN's LSTM: microseconds a step.

Each row is written as soon as it is measured, and one that fails is written as its error. Calls are
replays of CUDA graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import contest
import timing
import torch
from torch import nn
from torch.hub import tqdm  # stands in where tqdm is not installed

import lltm_ops

DEVICE = "cuda"
SIZES = [128, 256, 512, 768, 1024]
BATCHES = [1, 16, 64]


def recurrence(on: bool) -> contextlib.AbstractContextManager[Any]:
    """Whether calls take the recurrence; a graph keeps what it was captured with."""
    return mock.patch.dict(os.environ, LLTM_CUDA_RECURRENCE=str(int(on)))


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def launches_of(function: Callable[[], Any]) -> dict[str, int]:
    """How many launches of the recurrence had which outcome. It takes half types of some sizes."""
    before = torch.ops.lltm._recurrence_outcomes()
    with recurrence(True):
        function()
    after = torch.ops.lltm._recurrence_outcomes()
    names = ("ran", "did not fit", "refused")
    return {name: now - then for name, then, now in zip(names, before, after, strict=True)}


def captured(
    context: contextlib.AbstractContextManager[Any], function: Callable[[], Any]
) -> Callable[[], Any]:
    with context:
        return contest.captured(function)


def call_of(layer: nn.Module, input: torch.Tensor, what: str) -> Callable[[], Any]:
    with torch.no_grad():
        grads = (torch.randn_like(layer(input)[0]),)
    return contest.functions(what, {"": layer}, first_output, (input,), grads)[""]


def first_output(layer: nn.Module, input: torch.Tensor) -> Any:
    return layer(input)[0]


def measure(size: int, batch: int, what: str, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds a step, by contender, and launches of the recurrence in a call."""
    options = {"device": DEVICE, "dtype": getattr(torch, args.dtype)}
    input = torch.randn(args.time, batch, size, **options)
    with torch.set_grad_enabled(what == "training"):
        ours = call_of(lltm_ops.LLTM(size, size, **options), input, what)
        lstm = call_of(nn.LSTM(size, size, **options), input, what)
        calls = {"a kernel a step": captured(recurrence(False), ours)}
        calls["nn.LSTM"] = captured(tf32(False), lstm)
        launches = launches_of(ours)
        if launches["ran"]:
            calls["recurrence"] = captured(recurrence(True), ours)
        if args.dtype == "float32":
            calls["nn.LSTM with TF32"] = captured(tf32(True), lstm)
        times = timing.medians(calls, args.rounds, device=DEVICE)
    by_name = {name: time * 1e6 / args.time for name, time in times.items()}
    return {"microseconds_per_step": by_name, "launches_of_the_recurrence": launches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="of input and state")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--time", type=int, default=1024, help="steps")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    run = timing.describe("cuda", args.dtype) | {"time": args.time, "rows": rows}
    file = args.output / f"recurrence_cuda_{args.dtype}.json"
    cases = [
        (size, batch, what)
        for size in args.sizes
        for batch in args.batches
        for what in ("inference", "training")
    ]
    for size, batch, what in tqdm(cases, desc="timing", unit="row"):
        row: dict[str, Any] = {"size": size, "batch": batch, "what": what}
        try:
            row |= measure(size, batch, what, args)
        except RuntimeError as error:
            row["error"] = str(error)
        rows.append(row)
        print(row, flush=True)
        timing.write(run, file)
    timing.save(run, "plot_recurrence", file)


if __name__ == "__main__":
    main()
