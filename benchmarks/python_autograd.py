"""What autograd in Python costs a short call, compared with autograd in C++.

A library on the stable ABI has its autograd in Python. This times the LLTM's cell, 1 row of 32
features and 128 units, with the package's own autograd and with three kinds over operators without
one: microseconds of a call without gradients, of one that records them, and with backward. Writes
autograd.csv.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import figures
import timing
import torch
from contest import HERE, options, show
from torch import Tensor
from torch.utils.cpp_extension import load

import lltm_ops

FEATURES, UNITS = 32, 128
CPP = "autograd in C++"


def save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    input, weights, _, old_h, _ = inputs
    _, new_cell, gates = output
    ctx.save_for_backward(new_cell, gates, input, weights, old_h)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, grad_h: Tensor, grad_cell: Tensor | None, _: None) -> tuple[Tensor, ...]:
    if grad_cell is None:
        grad_cell = torch.zeros_like(grad_h)
    mask = list(ctx.needs_input_grad)
    return torch.ops.lltm_without_autograd.backward(grad_h, grad_cell, *ctx.saved_tensors, mask)


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        output = torch.ops.lltm_without_autograd.forward(*inputs)
        save(ctx, inputs, output)
        return output

    backward = staticmethod(backward)


class WithSetupContext(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.lltm_without_autograd.forward(*inputs)

    setup_context = staticmethod(save)
    backward = staticmethod(backward)


def load_operators() -> None:
    with tempfile.TemporaryDirectory() as directory:
        source = str(HERE / "cell_without_autograd.cpp")
        load("lltm_without_autograd", [source], build_directory=directory, is_python_module=False)


def main() -> None:
    args = options(__doc__.splitlines()[0]).parse_args()
    load_operators()
    torch.set_num_threads(1)
    operator = torch.ops.lltm_without_autograd.forward
    cell = lltm_ops.LLTMCell(FEATURES, UNITS)
    parameters = [cell.weights, cell.bias]
    state = torch.zeros(1, UNITS)
    inputs = (torch.randn(1, FEATURES), *parameters, state, state)
    grad = torch.randn(1, UNITS)

    def measured(calls: dict[str, Callable[..., Any]], function: Callable[..., Any]) -> Any:
        timed = {name: partial(function, call) for name, call in calls.items()}
        return timing.medians(timed, args.rounds)

    def forward(call: Callable[..., Any]) -> Any:
        return call(*inputs)

    def train(call: Callable[..., Any]) -> Any:
        return torch.autograd.grad(call(*inputs)[0], parameters, grad)

    with torch.no_grad():
        alone = measured({CPP: lltm_ops.forward, "no autograd": operator}, forward)
    torch.library.register_autograd("lltm_without_autograd::forward", backward, setup_context=save)
    calls = {
        CPP: lltm_ops.forward,
        "a Function with ctx in forward": WithContext.apply,
        "a Function with setup_context": WithSetupContext.apply,
        "register_autograd": operator,
    }
    for call in calls.values():
        torch.testing.assert_close(train(call), train(lltm_ops.forward))
    rows = [
        {"what": "without gradients", **alone},
        {"what": "forward, recording", **measured(calls, forward)},
        {"what": "forward and backward", **measured(calls, train)},
    ]
    for row in rows:
        show(row)
    figures.write(args.output / "autograd.csv", figures.describe(rounds=args.rounds), rows)


if __name__ == "__main__":
    main()
