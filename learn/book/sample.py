"""What the tests of all chapters share: inputs, and the formulas of chapter 1 to compare with."""

import runpy
from collections.abc import Callable
from pathlib import Path

import torch

BOOK = Path(__file__).parent
reference = runpy.run_path(str(BOOK / "01_python" / "lltm.py"))["forward"]


def sample_inputs(
    batch: int = 4,
    input_features: int = 3,
    state_size: int = 5,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
) -> list[torch.Tensor]:
    """Input, weights, bias, old_h and old_cell of one step, the same numbers at every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (batch, input_features),
        (3 * state_size, state_size + input_features),
        (3 * state_size,),
        (batch, state_size),
        (batch, state_size),
    ]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_(requires_grad) for tensor in tensors]


def loss(step: Callable) -> Callable:
    """Takes every element of both results."""
    return lambda *inputs: sum(map(torch.norm, step(*inputs)))


def assert_same_gradients(step: Callable, inputs: list[torch.Tensor]) -> None:
    ours, expected = (
        torch.autograd.grad(loss(forward)(*inputs), inputs) for forward in (step, reference)
    )
    torch.testing.assert_close(ours, expected)


def assert_same_mapped(step: Callable, mapped: int) -> None:
    """Under vmap over one argument, along a dimension that is not its first."""
    inputs = sample_inputs()
    inputs[mapped] = torch.stack([inputs[mapped], inputs[mapped].sin()], dim=1)
    dims = tuple(1 if k == mapped else None for k in range(5))
    ours, expected = (torch.vmap(forward, dims)(*inputs) for forward in (step, reference))
    torch.testing.assert_close(ours, expected)
