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
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lltm_ops

DEVICE = "cuda"
SIZES = [128, 256, 512, 768, 1024]
BATCHES = [1, 16, 64]
STREAMS = "both directions on two streams"
FORMS = ["padded", "packed", "resets", "odd input", "two layers", "both directions", STREAMS]


def recurrence(on: bool) -> contextlib.AbstractContextManager[Any]:
    """Whether calls take the recurrence; a graph keeps what it was captured with."""
    return mock.patch.dict(os.environ, LLTM_CUDA_RECURRENCE=str(int(on)))


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = allowed
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def launches_of(function: Callable[[], Any]) -> dict[str, int]:
    """How many launches of the recurrence had which outcome. It takes half types of some sizes."""
    before = torch.ops.lltm._recurrence_outcomes()
    with recurrence(True):
        function()
    after = torch.ops.lltm._recurrence_outcomes()
    names = ("ran", "did not fit", "not answered", "refused")
    return {name: now - then for name, then, now in zip(names, before, after, strict=True)}


def captured(
    context: contextlib.AbstractContextManager[Any], function: Callable[[], Any]
) -> Callable[[], Any]:
    with context:
        return contest.captured(function)


def first_output(layer: nn.Module, *inputs: Any) -> Tensor:
    output = layer(*inputs)[0]
    return output.data if isinstance(output, PackedSequence) else output


def call_of(layer: nn.Module, inputs: tuple[Any, ...], what: str) -> Callable[[], Any]:
    with torch.no_grad():
        grads = (torch.randn_like(first_output(layer, *inputs)),)
    return contest.functions(what, {"": layer}, first_output, inputs, grads)[""]


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
    form: str, size: int, batch: int, what: str, args: argparse.Namespace
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Calls of our layer and of nn.LSTM."""
    options = {"device": DEVICE, "dtype": getattr(torch, args.dtype)}
    features = size + (form == "odd input")
    sizes = {"num_layers": 1 + (form == "two layers"), "bidirectional": "directions" in form}
    inputs: tuple[Any, ...] = (torch.randn(args.time, batch, features, **options),)
    more: tuple[Any, ...] = ()
    if form == "packed":
        # From all steps down to half of them.
        lengths = args.time - torch.arange(batch) * (args.time // 2) // batch
        inputs = (pack_padded_sequence(*inputs, lengths),)
    elif form == "resets":
        more = (None, torch.rand(args.time, batch, device=DEVICE) < 0.01)
    lstm = call_of(nn.LSTM(features, size, **sizes, **options), inputs, what)
    if form != STREAMS:
        layer = lltm_ops.LLTM(features, size, **sizes, **options)
        return call_of(layer, inputs + more, what), lstm
    layers = [lltm_ops.LLTM(features, size, **options) for _ in range(2)]
    return on_two_streams(*(call_of(layer, inputs, what) for layer in layers)), lstm


def measure(
    size: int, batch: int, what: str, args: argparse.Namespace, form: str = "padded"
) -> dict[str, Any]:
    """Microseconds a step, by contender, and launches of the recurrence in a call."""
    with torch.set_grad_enabled(what == "training"):
        ours, lstm = contenders(form, size, batch, what, args)
        calls = {"a kernel a step": captured(recurrence(False), ours)}
        calls["nn.LSTM"] = captured(tf32(False), lstm)
        launches = launches_of(ours)
        if launches["ran"]:
            calls["recurrence"] = captured(recurrence(True), ours)
        if args.dtype == "float32":
            calls["a kernel a step with TF32"] = captured(tf32(True), ours)
            calls["nn.LSTM with TF32"] = captured(tf32(True), lstm)
        times = timing.medians(calls, args.rounds, device=DEVICE)
    by_name = {name: time * 1e6 / args.time for name, time in times.items()}
    return {"microseconds_per_step": by_name, "launches_of_the_recurrence": launches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="of input and state")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument(
        "--forms", nargs="*", default=FORMS[:1],
        help=f"of {', '.join(FORMS)}; the first unless given, and all others if none is named",
    )  # fmt: skip
    parser.add_argument("--name", default="recurrence", help="of the file with the figures")
    parser.add_argument("--time", type=int, default=1024, help="steps")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    run = timing.describe("cuda", args.dtype) | {"time": args.time, "rows": rows}
    file = args.output / f"{args.name}_cuda_{args.dtype}.json"
    cases = [
        (form, size, batch, what)
        for form in args.forms or FORMS[1:]
        for size in args.sizes
        for batch in args.batches
        for what in ("inference", "training")
    ]
    for form, size, batch, what in tqdm(cases, desc="timing", unit="row"):
        row: dict[str, Any] = {"form": form, "size": size, "batch": batch, "what": what}
        try:
            row |= measure(size, batch, what, args, form)
        except RuntimeError as error:
            row["error"] = str(error)
        rows.append(row)
        print(row, flush=True)
        timing.write(run, file)
    timing.save(run, "plot_recurrence" if args.forms == FORMS[:1] else None, file)


if __name__ == "__main__":
    main()
