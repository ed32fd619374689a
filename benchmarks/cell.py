"""One step of the cell, and what else PyTorch offers for it.

Everything is measured in one process, the contenders taking turns: the median microseconds of
inference and of training (forward, and backward for gradients of the parameters, or of input and
state, too), through the modules, with the state given. Writes cell.csv.
"""

from __future__ import annotations

from typing import Any

import torch
from contest import Contest, run
from torch import Tensor, nn

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


def contenders(input_size: int, hidden_size: int, options: dict[str, Any]) -> dict[str, nn.Module]:
    torch._dynamo.reset()
    return {
        "lltm_ops": lltm_ops.LLTMCell(input_size, hidden_size, **options),
        "eager": EagerCell(input_size, hidden_size, **options),
        "compile": torch.compile(EagerCell(input_size, hidden_size, **options), dynamic=False),
        "C++": TutorialCell(input_size, hidden_size, **options),
        "LSTMCell": nn.LSTMCell(input_size, hidden_size, **options),
    }


def contest_of(shape: tuple[int, ...], options: dict[str, Any]) -> Contest:
    batch, input_size, hidden_size = shape
    input = torch.randn(batch, input_size, **options)
    state = (torch.randn(batch, hidden_size, **options), torch.randn(batch, hidden_size, **options))
    return Contest(
        contenders(input_size, hidden_size, options),
        lambda cell, input, *state: cell(input, state),
        (input, *state),
        state,
    )


if __name__ == "__main__":
    run(__doc__.splitlines()[0], "cell", SHAPES, "batch x input x state", contest_of)
