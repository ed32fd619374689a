"""What every test shares: devices, dtypes, sample inputs, layouts, tolerances, the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lltm_ops

ARGUMENTS = ("input", "weights", "bias", "old_h", "old_cell")
BACKWARD_ARGUMENTS = (
    "grad_h", "grad_cell", "new_cell", "gates", "input", "weights", "old_h",
)  # fmt: skip

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
each_device = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# (batch, input_features, state_size): ordinary, one of each, empty, odd, wider than a vector or a
# block of threads; then what takes the CPU's products through each of their paths: few rows of the
# batch and many, pairs of bfloat16 or not, more than one block of every dimension, and its rest.
SHAPES = [
    (3, 5, 4),
    (1, 1, 1),
    (0, 5, 4),
    (3, 0, 4),
    (2, 3, 17),
    (5, 33, 259),
    (16, 6, 10),
    (17, 7, 10),
    (47, 300, 70),
    (300, 8, 64),
    (70, 334, 202),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)

# The only tolerances, for results of size about 1, relative to the float64 reference on the same
# values. Low precision rounds the gates to 8 (bfloat16) or 11 (float16) bits.
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}


def sample_inputs(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (3, 5, 4),
    requires_grad: bool = False,
) -> list[Tensor]:
    """Arguments of lltm::forward, the same values for each device and (rounded) dtype."""
    batch, input_features, state_size = shape
    generator = torch.Generator().manual_seed(0)
    scale = 1 / max(1, state_size + input_features) ** 0.5

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*size, generator=generator, dtype=torch.float64) * scale
        return values.to(device, dtype).requires_grad_(requires_grad)

    return [
        normal(batch, input_features),
        normal(3 * state_size, state_size + input_features, scale=scale),
        normal(3 * state_size),
        normal(batch, state_size),
        normal(batch, state_size),
    ]


def backward_inputs(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (3, 5, 4),
    requires_grad: bool = False,
) -> list[Tensor]:
    """Arguments of lltm::backward that belong together."""
    inputs = sample_inputs(device, dtype, shape)
    new_h, new_cell, gates = torch.ops.lltm._forward_with_gates(*inputs)
    input, weights, _, old_h, _ = inputs
    tensors = [new_h * 0.5 + 0.3, new_cell * 0.3 - 0.2, new_cell, gates, input, weights, old_h]
    return [tensor.detach().requires_grad_(requires_grad) for tensor in tensors]


def expand_rows(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor


LAYOUTS = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "transposed": lambda t: t.t().clone(memory_format=torch.contiguous_format).t(),
    "offset": lambda t: (
        torch.cat([t.flatten(), t.flatten()[:1]]).roll(1)[1:].view(t.shape) if t.numel() else t
    ),
    "strided": lambda t: torch.stack([t, t + 1], dim=-1)[..., 0],
    "expanded": expand_rows,
}


def double(tensors: list[Tensor]) -> list[Tensor]:
    """The same values in float64 on the CPU, requiring grad like the originals."""
    return [t.detach().to("cpu", torch.float64).requires_grad_(t.requires_grad) for t in tensors]


def reference_gradients(inputs: list[Tensor]) -> list[Tensor | None]:
    return gradients(lltm_ops.reference, inputs)


def gradients(op, inputs: list[Tensor]) -> list[Tensor | None]:
    """Gradients of a loss that weighs every output element differently; None where not required."""
    new_h, new_cell = op(*inputs)

    def weighted(output: Tensor, start: float) -> Tensor:
        weight = torch.linspace(start, 1, output.numel(), dtype=torch.float64)
        return (output * weight.view(output.shape).to(output.device, output.dtype)).sum()

    loss = weighted(new_h, -1.0) + weighted(new_cell, 0.5)
    loss.backward()
    return [t.grad for t in inputs]


def assert_matches_float64(actual: Tensor, expected: Tensor, **tolerance: float) -> None:
    """actual, of any dtype and device, against a float64 reference."""
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    tolerance = tolerance or TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.detach().to("cpu", torch.float64), expected, **tolerance)
