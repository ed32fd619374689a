"""What the CPU kernels do with the last rows, units and terms of their products.

A product is computed in tiles of a few rows and vectors of columns, in panels of these, and in
chains of terms (csrc/cpu/primitives): what is left beyond whole ones takes a path of its own. Here
all factors are small integers and the gates are open, so every sum is exact in any order, and a
row, unit or term that is lost, taken twice or put elsewhere shows to the bit.
"""

import pytest
import torch
from common import each_dtype

# Tiles have up to 12 rows, and registers up to 16 lanes, of which half or less is multiplied by dot
# products. The list also has the neighbours of 32 and 48 rows, and those of panels of 64. The
# gradient of weights adds up 512 rows at a time.
ROWS = [*range(1, 27), 31, 33, 47, 48, 49, 63, 64, 65, 130, 513]
# A vector has up to 16 units. The list has each part of a vector, the neighbours of two to six
# vectors, and those of blocks of 48 and 128 units.
UNITS = [*range(1, 18), 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129]
# bfloat16 multiplies pairs of terms, so the list has even and odd numbers. It also has parts of the
# squares that are transposed, and the neighbours of chains of 512 and 2,048 terms.
TERMS = [*range(6, 23), 63, 64, 65, 66, 383, 385, 511, 512, 513, 530, 2047, 2048, 2049]
# The number of rows decides how many chains there are, and whether weights are copied.
FEW_AND_MANY_ROWS = [1, 2, 5, 25, 70]


class Numbers:
    """Zeros and ones, so few that sums over the terms are exact in half types, too."""

    def __init__(self, rows, features, units, dtype, *time):
        share = min(0.5, 90 / (units + features))
        self.units = units

        def draw(*sizes):
            return (torch.rand(sizes) < share).to(dtype)

        self.input, self.old_h = draw(*time, rows, features), draw(rows, units)
        self.grad = draw(*time, rows, units)
        self.large = torch.full((rows, units), 32, dtype=dtype)  # its tanh is 1
        self.candidate = draw(units, units + features)
        self.weights = torch.cat([draw(2 * units, units + features) * 0, self.candidate])
        self.bias = torch.tensor([100.0, 100, 0]).repeat_interleave(units).to(dtype)

    def sums(self, input, h):
        return torch.cat([h, input], -1).double() @ self.candidate.double().T

    def of_weights(self, d_pre_g, input, h):
        """The gradients of weights and bias: those of the other gates are zero."""
        d_pre_g = torch.cat([torch.zeros(len(d_pre_g), 2 * self.units), d_pre_g], -1)
        return d_pre_g.T @ torch.cat([h, input], -1).double(), d_pre_g.sum(0)


def assert_same(actual, expected):
    for ours, exact in zip(actual, expected, strict=True):
        assert torch.equal(ours, exact.to(ours.dtype))


def step_forward(*sizes):
    n = Numbers(*sizes)
    _, cell = torch.ops.lltm.forward(n.input, n.weights, n.bias, n.old_h, n.large)
    assert_same([cell], [n.large + n.sums(n.input, n.old_h)])


def step_backward(*sizes):
    n = Numbers(*sizes)
    gates = n.large.new_ones(len(n.grad), 3 * n.units)
    arguments = n.large * 0, n.grad, n.large, gates, n.input, n.weights, n.old_h
    d_cell = n.grad.double()
    d_h, d_input = (d_cell @ n.candidate.double()).split([n.units, n.input.shape[-1]], -1)
    d_weights, d_bias = n.of_weights(d_cell, n.input, n.old_h)
    expected = d_input, d_weights, d_bias, d_h, d_cell
    assert_same(torch.ops.lltm.backward(*arguments), expected)


def sequence_forward(*sizes, time=9):
    n = Numbers(*sizes, time)
    arguments = n.input, n.weights, n.bias, n.old_h, n.large
    output, cells, h_n, c_n = torch.ops.lltm.sequence_forward(*arguments)
    # After a step the cell state is large, so h is 1.
    h = torch.cat([n.old_h.unsqueeze(0), torch.ones_like(n.grad[1:])])
    assert_same([output, cells], [torch.ones_like(output), n.large + n.sums(n.input, h).cumsum(0)])
    assert_same([h_n, c_n], [output[-1], cells[-1]])


def sequence_backward(*sizes, time=9):
    n = Numbers(*sizes, time)
    output = torch.ones_like(n.grad)
    cells, gates = output * 32, output.repeat(1, 1, 3)
    grads = output * 0, n.grad, None, None
    arguments = *grads, output, cells, gates, n.input, n.weights, n.old_h
    d_cells = n.grad.double().flip(0).cumsum(0).flip(0)
    d_input = d_cells @ n.candidate[:, n.units :].double()
    d_h0 = d_cells[0] @ n.candidate[:, : n.units].double()
    h = torch.cat([n.old_h.unsqueeze(0), output[1:]])
    d_weights, d_bias = n.of_weights(*(t.flatten(0, 1) for t in (d_cells, n.input, h)))
    expected = d_input, d_weights, d_bias, d_h0, d_cells[0]
    assert_same(torch.ops.lltm.sequence_backward(*arguments), expected)


each_product = pytest.mark.parametrize(
    "product", [step_forward, step_backward, sequence_forward, sequence_backward]
)


@each_dtype
@each_product
@pytest.mark.parametrize("terms", [12, 130], ids="of {} terms".format)
def test_last_rows(product, dtype, terms):
    for rows in ROWS:
        product(rows, terms - 5, 5, dtype)


@each_dtype
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_large_weights_that_few_rows_read_as_they_lie(dtype, rows):
    sequence_forward(rows, 64, 520, dtype)


@each_dtype
@each_product
@pytest.mark.parametrize("rows", FEW_AND_MANY_ROWS, ids="of {} rows".format)
def test_last_units_and_terms(product, dtype, rows):
    for units in UNITS:
        product(rows, 7, units, dtype)
    for terms in TERMS:
        product(rows, terms - 5, 5, dtype)
