"""In float32 the error is no larger than twice that of plain PyTorch ("eager"), beside float64."""

import pytest
import torch
from common import CELL, PADDED, double, each_device, gradients

import lltm_ops

EPSILON = torch.finfo(torch.float32).eps


# Signed zeros, subnormals, where elu and tanh lose digits, where exp over- and underflows, and what
# is not finite.
SPECIAL_VALUES = [
    0.0, 1e-45, 1e-40, 1e-38, 1e-20, 1e-8, 1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.3466, 0.5, 0.69315, 1.0,
    2.0, 5.0, 9.0, 9.01, 10.0, 17.0, 40.0, 87.0, 87.4, 88.0, 88.8, 89.0, 103.0, 104.0, 1e4, 1e30,
    3e38, float("inf"),
]  # fmt: skip


def pointwise(op, gate: torch.Tensor, old_cell: torch.Tensor, position: int) -> torch.Tensor:
    """(new_h, new_cell) where the pre-activation of one gate is exactly gate; the others are 1."""

    def block(gate, old_cell):
        size = gate.numel()
        bias = gate.new_ones(3, size)
        bias[position] = gate
        return op(
            gate.new_zeros(1, 0),
            gate.new_zeros(3 * size, size),
            bias.flatten(),
            gate.new_zeros(1, size),
            old_cell.view(1, size),
        )

    blocks = zip(gate.split(250), old_cell.split(250), strict=True)
    return torch.cat([torch.cat(block(*pair)) for pair in blocks], dim=1)


@each_device
@pytest.mark.parametrize("position", [0, 1, 2], ids=["input_gate", "output_gate", "candidate"])
@pytest.mark.parametrize("cell", [0.0, 1e-6, -3.0])
def test_accuracy_of_gates(device, position, cell):
    """float32 against float64, over special and random values, each gate and the cell state."""
    special = torch.tensor(SPECIAL_VALUES)
    dense = torch.linspace(-110, 110, 20011)
    near_zero = torch.linspace(-1, 1, 10007)
    gate = torch.cat([special, -special, dense, near_zero, torch.tensor([float("nan")])])
    old_cell = torch.full_like(gate, cell) if position < 2 else gate.flip(0)
    exact = pointwise(lltm_ops.reference, gate.double(), old_cell.double(), position)
    exact = exact.float().double()  # what float32 can hold: overflow is inf
    ours = pointwise(lltm_ops.forward, gate.to(device), old_cell.to(device), position).cpu()
    eager = pointwise(lltm_ops.reference, gate.to(device), old_cell.to(device), position).cpu()
    assert torch.equal(ours.isnan(), exact.isnan())
    finite = exact.isfinite()
    assert torch.equal(ours[~finite].nan_to_num(), exact[~finite].float().nan_to_num())

    def relative_error(actual):
        scale = exact[finite].abs().clamp_min(torch.finfo(torch.float32).smallest_normal)
        return ((actual.double()[finite] - exact[finite]).abs() / scale).max().item()

    assert relative_error(ours) <= 2 * max(relative_error(eager), EPSILON)


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_as_pytorch_rounds(device, dtype):
    """Every value of the old cell, plus a candidate; vectors of each size, where the input gate is
    1 and elu returns its argument."""
    units = 61
    values = torch.arange(2**16 - 2**16 % units).to(torch.int16).view(dtype).view(-1, units)
    values = torch.cat([values, values.flip(0, 1)])
    bias = torch.zeros(3, units, dtype=dtype)
    bias[0] = 100
    bias[2] = torch.linspace(0, 1, units).square()
    weights = torch.zeros(3 * units, units, dtype=dtype)
    inputs = (values[:, :0], weights, bias.flatten(), torch.zeros_like(values), values)
    new_cell = lltm_ops.forward(*(tensor.to(device) for tensor in inputs))[1].cpu()
    expected = (values.float() + bias[2].float()).to(dtype)
    torch.testing.assert_close(new_cell, expected, rtol=0, atol=0, equal_nan=True)


@each_device
@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        pytest.param(CELL, (1, 1, 32, 128), id="one row"),
        pytest.param(CELL, (1, 16, 32, 128), id="rows"),
        pytest.param(CELL, (1, 33, 700, 1000), id="many terms"),
        pytest.param(CELL, (1, 2**17, 4, 8), id="sums over a large batch"),
        pytest.param(PADDED, (1000, 1, 32, 64), id="a thousand steps"),
        pytest.param(PADDED, (10, 3, 340, 340), id="steps of three rows"),
        pytest.param(PADDED, (10, 8, 340, 340), id="steps of eight rows"),
        pytest.param(PADDED, (10, 17, 340, 340), id="steps of many rows"),
    ],
)
def test_accuracy_of_results_and_gradients(device, operator, shape):
    inputs = operator.inputs(device, shape=shape)
    if operator is PADDED:
        # A recurrence that keeps what it computed, and neither forgets nor explodes.
        inputs = [inputs[0] * 0.3, *(tensor * 0.5 for tensor in inputs[1:5]), *inputs[5:]]

    def results(op, inputs):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs[:5]]
        found = [*op(*leaves)[:2], *gradients(op, leaves)]  # h_n is too few numbers
        return [tensor.detach().cpu().double() for tensor in found]

    def size(tensors):
        return torch.stack([tensor.square().mean().sqrt() for tensor in tensors])

    exact = results(operator.reference, double(inputs))
    ours, eager = (
        size([result - e for result, e in zip(results(op, inputs), exact, strict=True)])
        for op in (operator.forward, operator.reference)
    )
    assert torch.all(ours <= 2 * eager + EPSILON * size(exact) / 8)
