"""A whole sequence through the layer beside what else PyTorch offers, and the roofs of the machine.

As cell.py: inference, and training (forward, and backward for gradients of the parameters), from a
state of zeros. The roof of reading weights is of those for the state, which each step reads.
"""

from __future__ import annotations

import argparse
from typing import Any

import contest
import torch
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed

import lltm_ops

# time, batch, input, state
SHAPES = ["128x1x128x128", "128x16x128x128", "64x64x256x512", "50x1x1024x1024"]


class CellLoop(lltm_ops.LLTMCell):
    """The cell in a Python loop."""

    def forward(self, input: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        state, outputs = None, []
        for x in input:
            state = super().forward(x, state)
            outputs.append(state[0])
        return torch.stack(outputs), state


class EagerLoop(lltm_ops.LLTMCell):
    """The mathematics in plain PyTorch, in a Python loop."""

    def forward(self, input: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = cell = input.new_zeros(input.shape[1], self.hidden_size)
        outputs = []
        for x in input:
            h, cell = lltm_ops.reference(x, self.weights, self.bias, h, cell)
            outputs.append(h)
        return torch.stack(outputs), (h, cell)


def contenders(input_size: int, hidden_size: int, options: dict[str, Any]) -> dict[str, nn.Module]:
    classes = {
        "lltm_ops": lltm_ops.LLTM,
        "cell in a loop": CellLoop,
        "eager loop": EagerLoop,
        "LSTM": nn.LSTM,
        "GRU": nn.GRU,
    }
    return {name: make(input_size, hidden_size, **options) for name, make in classes.items()}


def measure_shape(
    shape: tuple[int, ...], args: argparse.Namespace, progress: tqdm
) -> list[dict[str, Any]]:
    time, batch, input_size, hidden_size = shape
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    layers = contenders(input_size, hidden_size, options)
    input = torch.randn(time, batch, input_size, **options)
    grads = (torch.randn(time, batch, hidden_size, **options),)
    weights = layers["lltm_ops"].weights_l0.detach()
    roof = {}
    if args.device == "cpu":
        recurrent = weights[:, :hidden_size]
        roof = contest.measure_roof(lambda: layers["lltm_ops"](input[:0]), recurrent)
        roof["weight_bytes"] = time * recurrent.nbytes
    rows = contest.measure(layers, lambda layer: layer(input)[0], grads, args, progress)
    for row in rows:
        row |= {"flop": 2 * time * batch * weights.numel()} | roof
    return rows


def main() -> None:
    names = "time x batch x input x state"
    args = contest.command_line(__doc__.splitlines()[0], SHAPES, names)
    contest.run(args, names, "A whole sequence", "sequence", measure_shape)


if __name__ == "__main__":
    main()
