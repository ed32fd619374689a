"""Memory of a training step: MiB that PyTorch allocates, less what it frees, at the most.

It does not depend on the processor. Writes memory.csv.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import figures
import torch
from contest import options, show
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import lltm_ops

SHAPE = (1000, 16, 64, 128)  # time, batch, input, state
CHUNK = 100


def train(layer: nn.Module, input: Tensor) -> None:
    layer(input)[0].square().mean().backward()


def truncated(layer: nn.Module, input: Tensor) -> None:
    state = None
    for chunk in input.split(CHUNK):
        output, state = layer(chunk, state)
        output.square().mean().backward()
        state = tuple(tensor.detach() for tensor in state)


def checkpointed(layer: nn.Module, input: Tensor) -> None:
    state, loss = None, 0
    for chunk in input.split(CHUNK):
        output, state = checkpoint(layer, chunk, state, use_reentrant=False)
        loss = loss + output.square().mean()
    loss.backward()


CONTENDERS = {
    "lltm_ops": (lltm_ops.LLTM, train),
    f"lltm_ops, truncated to chunks of {CHUNK} steps": (lltm_ops.LLTM, truncated),
    f"lltm_ops, checkpoints of {CHUNK} steps": (lltm_ops.LLTM, checkpointed),
    "GRU": (nn.GRU, train),
    "LSTM": (nn.LSTM, train),
}


def peak(function: Callable[[], Any]) -> float:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = profiled.profiler.kineto_results.events()
    allocated = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in allocated)) / 2**20


def main() -> None:
    args = options(__doc__.splitlines()[0]).parse_args()
    time, batch, input_size, hidden_size = SHAPE
    input = torch.randn(time, batch, input_size)
    row = {}
    for name, (make, step) in CONTENDERS.items():
        layer = make(input_size, hidden_size)
        step(layer, input)  # so that the gradients of parameters are there
        row[name] = peak(lambda layer=layer, step=step: step(layer, input))
    show(row)
    about = figures.describe(shape=SHAPE)
    figures.write(args.output / "memory.csv", about, [row])


if __name__ == "__main__":
    main()
