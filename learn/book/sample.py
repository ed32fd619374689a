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


def assert_same_gradients(step: Callable, inputs: list[torch.Tensor]) -> None:
    """The gradients of a loss that takes every element of both results are those of reference."""
    ours, expected = (
        torch.autograd.grad(sum(map(torch.norm, forward(*inputs))), inputs)
        for forward in (step, reference)
    )
    torch.testing.assert_close(ours, expected)
