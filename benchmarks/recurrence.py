"""The recurrence on a GPU compared with a kernel a step and nn.LSTM: microseconds a step.

Each row is written as soon as it is measured, and one that fails is written as its error. Calls are
replays of CUDA graphs. Writes recurrence.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import figures
import timing
import torch
from contest import show
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.profiler import ProfilerActivity, profile

import lltm_ops

DEVICE = "cuda"
STREAMS = "both_directions_on_two_streams"
FORMS = ["padded", "packed", "resets", "odd_input", "two_layers", "both_directions", STREAMS]
DTYPES = ["bfloat16", "float16", "float32"]


def recurrence(on: bool) -> contextlib.AbstractContextManager[Any]:
    """Whether calls take the recurrence; a graph keeps what it was captured with."""
    return mock.patch.dict(os.environ, LLTM_CUDA_RECURRENCE=str(int(on)))


def launches_of(function: Callable[[], Any]) -> dict[str, int]:
    """How many launches of the recurrence did not run, and did: it takes some half types."""
    before = torch.ops.lltm._recurrence_launches()
    with recurrence(True):
        function()
    after = torch.ops.lltm._recurrence_launches()
    names = ("did not run", "ran")
    return {name: now - then for name, then, now in zip(names, before, after, strict=True)}


def kernels_of(function: Callable[[], Any]) -> int:
    """A few if cuDNN has a kernel for all steps; some for each step otherwise."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
    return sum(event.count for event in profiled.key_averages())


def first_output(layer: nn.Module, *inputs: Any) -> Tensor:
    output = layer(*inputs)[0]
    return output.data if isinstance(output, PackedSequence) else output


def call_of(layer: nn.Module, inputs: tuple[Any, ...], what: str) -> Callable[[], Any]:
    with torch.no_grad():
        grads = (torch.randn_like(first_output(layer, *inputs)),)
    return timing.calls(what, {"": layer}, first_output, inputs, grads)[""]


def on_two_streams(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], Any]:
    def both() -> tuple[Any, Any]:
        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(current)
        result = first()
        with torch.cuda.stream(other):
            results = result, second()
        current.wait_stream(other)
        return results

    return both


def contenders(
    form: str, time: int, size: int, batch: int, what: str, dtype: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Calls of our layer and of nn.LSTM."""
    options = {"device": DEVICE, "dtype": getattr(torch, dtype)}
    features = size + (form == "odd_input")
    sizes = {"num_layers": 1 + (form == "two_layers"), "bidirectional": "directions" in form}
    inputs: tuple[Any, ...] = (torch.randn(time, batch, features, **options),)
    more: tuple[Any, ...] = ()
    if form == "packed":
        # From all steps down to half of them.
        lengths = time - torch.arange(batch) * (time // 2) // batch
        inputs = (pack_padded_sequence(*inputs, lengths),)
    elif form == "resets":
        more = (None, torch.rand(time, batch, device=DEVICE) < 0.01)
    lstm = call_of(nn.LSTM(features, size, **sizes, **options), inputs, what)
    if form != STREAMS:
        layer = lltm_ops.LLTM(features, size, **sizes, **options)
        return call_of(layer, inputs + more, what), lstm
    layers = [lltm_ops.LLTM(features, size, **options) for _ in range(2)]
    return on_two_streams(*(call_of(layer, inputs, what) for layer in layers)), lstm


def measure(case: dict[str, Any], rounds: int) -> dict[str, Any]:
    with torch.set_grad_enabled(case["what"] == "training"):
        ours, lstm = contenders(**case)
        launches = launches_of(ours)
        calls = {"nn.LSTM": timing.captured(lstm)}
        for name, on in (("recurrence", True), ("a kernel a step", False)):
            if launches["ran"] or not on:
                with recurrence(on):
                    calls[name] = timing.captured(ours)
        times = timing.medians(calls, rounds)
        per_step = {name: time / case["time"] for name, time in times.items()}
        return per_step | launches | {"kernels of nn.LSTM": kernels_of(lstm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--forms", nargs="+", default=FORMS[:1], choices=FORMS)
    parser.add_argument("--times", nargs="+", type=int, default=[1024], help="steps")
    parser.add_argument("--sizes", nargs="+", type=int, default=[128, 256, 512, 768, 1024])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--tf32", action="store_true", help="lets float32 be multiplied in TF32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=figures.OUTPUT, help="a folder")
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = args.tf32
    about = figures.describe("cuda", rounds=args.rounds, tf32=args.tf32)
    names = ("dtype", "form", "time", "size", "batch", "what")
    kinds = timing.KINDS[:2]
    values = (args.dtypes, args.forms, args.times, args.sizes, args.batches, kinds)
    rows = []
    for case in itertools.product(*values):
        row = dict(zip(names, case, strict=True))
        try:
            row |= measure(row, args.rounds)
        except RuntimeError as error:
            row["error"] = str(error)
        rows.append(row)
        show(row)
        figures.write(args.output / "recurrence.csv", about, rows)


if __name__ == "__main__":
    main()
