"""What autograd in Python costs a short call, compared with autograd in C++.

A library on the stable ABI has its autograd in Python. This times the LLTM's cell, 1 row of 32
features and 128 units, as the book has it: with autograd in C++ in chapter 9, and on the stable ABI
in chapter 12, where two other kinds of autograd are put over the same operators. Microseconds of a
call without gradients, of one that records them, and with backward. Writes autograd.csv.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import timing
import torch
from book import BOOK, ROOT, load
from torch import Tensor

ROWS, FEATURES, UNITS = 1, 32, 128
ALONE = "no autograd"


def save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    input, weights, _, old_h, _ = inputs
    _, new_cell, gates = output
    ctx.mark_non_differentiable(gates)
    ctx.save_for_backward(new_cell, gates, input, weights, old_h)


def backward(ctx: Any, grad_h: Tensor, grad_cell: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.lltm_stable.backward(grad_h, grad_cell, *ctx.saved_tensors)


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        output = torch.ops.lltm_stable.forward(*inputs)
        save(ctx, inputs, output)
        return output

    backward = staticmethod(backward)


def in_cpp() -> Callable[..., Any]:
    return load(BOOK / "09_kernel" / "lltm.py").forward


def stable() -> Callable[..., Any]:
    return load(BOOK / "12_stable_abi" / "lltm.py").forward


def operator() -> Callable[..., Any]:
    stable()
    return torch.ops.lltm_stable.forward


def with_context() -> Callable[..., Any]:
    stable()
    return WithContext.apply


def registered() -> Callable[..., Any]:
    stable()
    torch.library.register_autograd("lltm_stable::forward", backward, setup_context=save)
    return torch.ops.lltm_stable.forward


# Each in a process of its own: what is registered would be in the way of the others.
CONTENDERS = {
    "autograd in C++": in_cpp,
    ALONE: operator,
    "a Function with ctx in forward": with_context,
    "a Function with setup_context": stable,
    "register_autograd": registered,
}


def work(name: str) -> dict[str, float]:
    """Microseconds of one contender."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(BOOK))
    from sample import reference

    call = CONTENDERS[name]()
    shapes = [(ROWS, FEATURES), (3 * UNITS, UNITS + FEATURES), (3 * UNITS,), *[(ROWS, UNITS)] * 2]
    inputs = [torch.randn(shape) / 10 for shape in shapes]
    parameters = [tensor.requires_grad_() for tensor in inputs[1:3]]
    grad = torch.randn(ROWS, UNITS)

    def forward(step: Callable[..., Any] = call) -> Any:
        return step(*inputs)

    def train(step: Callable[..., Any] = call) -> Any:
        return torch.autograd.grad(step(*inputs)[0], parameters, grad)

    with torch.no_grad():
        times = timing.medians({"without gradients": forward}, 1)
    if name != ALONE:
        torch.testing.assert_close(train(), train(reference))
        for what, function in ("forward, recording", forward), ("forward and backward", train):
            times |= timing.medians({what: function}, 1)
    return times


def main() -> None:
    # They load the package, whose operators have the names of chapter 9's.
    import figures
    from contest import options, show

    args = options(__doc__.splitlines()[0]).parse_args()
    env = os.environ | {"TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "book" / "autograd")}
    turns = [
        {name: timing.in_a_process(__file__, name, env=env) for name in CONTENDERS}
        for _ in range(args.rounds)
    ]
    rows = []
    for what in turns[0]["register_autograd"]:
        row: dict[str, Any] = {"what": what}
        for name in CONTENDERS:
            times = [turn[name][what] for turn in turns if what in turn[name]]
            row[name] = statistics.median(times) if times else ""
        show(row)
        rows.append(row)
    figures.write(args.output / "autograd.csv", figures.describe(rounds=args.rounds), rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        print(json.dumps(work(sys.argv[2])))
    else:
        main()
