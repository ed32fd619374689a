"""What autograd in Python costs a short call, compared with autograd in C++.

A library on the stable ABI has its autograd in Python. This times the LLTM's cell as the book has
it: with autograd in C++ in chapter 9, and on the stable ABI in chapter 12, where two other kinds of
autograd are put over the same operators. Prints the table of chapter 12, in microseconds.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from turns import BOOK, microseconds, take_turns

SHAPE = 1, 32, 128  # batch, input_features, state_size
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


def registered() -> Callable[..., Any]:
    torch.library.register_autograd("lltm_stable::forward", backward, setup_context=save)
    return torch.ops.lltm_stable.forward


# The chapter, and what makes the function once `import lltm` has loaded its library.
CONTENDERS: dict[str, tuple[str, Callable[[Any], Callable[..., Any]]]] = {
    "autograd in C++": ("09_kernel", lambda lltm: lltm.forward),
    ALONE: ("12_stable_abi", lambda lltm: lltm.ops.forward),
    "a Function with ctx in forward": ("12_stable_abi", lambda lltm: WithContext.apply),
    "a Function with setup_context": ("12_stable_abi", lambda lltm: lltm.forward),
    "register_autograd": ("12_stable_abi", lambda lltm: registered()),
}


def work(name: str) -> dict[str, float]:
    """Microseconds of one contender."""
    import lltm
    from sample import reference, sample_inputs

    torch.set_num_threads(1)
    call = CONTENDERS[name][1](lltm)
    inputs = sample_inputs(*SHAPE, dtype=torch.float32)
    parameters = [tensor.requires_grad_() for tensor in inputs[1:3]]
    grad = torch.ones_like(inputs[-1])

    def train(step: Callable[..., Any] = call) -> Any:
        return torch.autograd.grad(step(*inputs)[0], parameters, grad)

    with torch.no_grad():
        times = {"without gradients": microseconds(lambda: call(*inputs))}
    if name != ALONE:
        torch.testing.assert_close(train(), train(reference))
        times["forward, recording"] = microseconds(lambda: call(*inputs))
        times["forward and backward"] = microseconds(train)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--work", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work)))
        return
    folders = {name: BOOK / chapter for name, (chapter, _) in CONTENDERS.items()}
    times = take_turns(__file__, folders, options.rounds)
    columns = times["register_autograd"]
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    for name, row in times.items():
        lines.append([name, *(f"{row[what]:.0f}" if what in row else "" for what in columns)])
    for line in lines:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
