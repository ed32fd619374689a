"""lltm::forward computes the cell, whatever the device, dtype, shape, strides and values.

What holds for sequences in the same way is tested here for both.
"""

import itertools

import pytest
import torch
from common import (
    CELL,
    DTYPES,
    LAYOUTS,
    SEQUENCE_CASES,
    SHAPES,
    Operator,
    backward_inputs,
    composite,
    double,
    each_device,
    each_dtype,
    each_operator,
    gradients,
    sample_inputs,
    weighted_loss,
)
from torch.utils._pytree import tree_map_only

import lltm_ops


@each_device
@pytest.mark.parametrize(
    ("dtype", "operator", "shape"),
    [
        *(
            pytest.param(dtype, CELL, (1, *shape), id=f"{dtype}-cell, {reason}")
            for dtype, (reason, shape) in itertools.product(DTYPES, SHAPES.items())
        ),
        *(
            pytest.param(dtype, Operator(kind), shape, id=f"{dtype}-{Operator(kind)}, {shape}")
            for dtype, shape, kind in SEQUENCE_CASES
            # In float16 the gradients of a thousand steps overflow.
            if shape[0] < 1000 or dtype != torch.float16
        ),
    ],
)
def test_values_and_gradients_match_reference(device, dtype, operator, shape):
    inputs = operator.inputs(device, dtype, shape, requires_grad=True)
    exact = double(inputs)
    outputs = operator.forward(*inputs)
    operator.assert_match(outputs, operator.reference(*exact), dtype)
    assert all(output.device.type == device for output in outputs)
    zeros = [torch.zeros_like(tensor) for tensor in exact[:5]]
    expected = gradients(operator.reference, exact)
    expected = [z if e is None else e for e, z in zip(expected, zeros, strict=True)]
    # A gradient of the weights sums over the batch, and its rounding errors with it.
    operator.assert_match(gradients(operator.forward, inputs), expected, dtype, rows=shape[1])


@each_device
@each_operator
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_argument_in_each_layout(device, operator, name, layout):
    contiguous = operator.inputs(device) if name == "forward" else operator.backward_inputs(device)
    for argument, given in enumerate(contiguous):
        # Expanded, batch_sizes would be other sizes.
        if not isinstance(given, torch.Tensor) or (
            layout == "expanded" and given.dtype == torch.long
        ):
            continue
        inputs = [*contiguous]
        inputs[argument] = LAYOUTS[layout](given)
        before = inputs[argument].clone()
        if name == "forward":
            exact = operator.reference(*double(inputs))
        else:
            # test_values_and_gradients_match_reference has the numbers.
            contiguous_copies = tree_map_only(torch.Tensor, LAYOUTS["contiguous"], double(inputs))
            exact = operator.backward(*contiguous_copies)
        operator.assert_match(operator.named(name)(*inputs), exact, torch.float32)
        assert torch.equal(inputs[argument], before)


@each_device
@each_dtype
@pytest.mark.parametrize("batch", [1, 9, 16, 17, 24, 33, 40, 64])
@pytest.mark.parametrize("input_features", [2, 3])
def test_an_infinite_weight_reaches_no_unit_but_its_own(device, dtype, batch, input_features):
    """Terms and rows that a kernel pads with zeros meet no weight: infinity times zero is NaN."""
    for column in range(2 + input_features):
        shape = (batch, input_features, 2)
        input, weights, bias, old_h, old_cell = sample_inputs(device, dtype, shape)
        input, old_h = input.abs() + 0.5, old_h.abs() + 0.5
        weights[0, column] = float("inf")
        inputs = (input, weights, bias, old_h, old_cell)
        exact = lltm_ops.reference(*double(inputs))
        CELL.assert_match(torch.ops.lltm.forward(*inputs), exact, dtype)


def outputs_and_gradients(operator, inputs):
    outputs = operator.forward(*inputs)
    return [*outputs, *torch.autograd.grad(weighted_loss(outputs), inputs[:5])]


# By what the threads divide.
DIVIDED_STEPS = {
    "one row, without input": (1, 1, 0, 33),
    "one row": (1, 1, 300, 200),
    "one row, gradients of bfloat16": (1, 1, 64, 512),
    "two rows, gradients of bfloat16": (1, 2, 64, 64),
    "two rows": (1, 2, 16, 300),
    "dot products": (1, 4, 900, 800),
    "dot products, a block of units and a rest": (1, 6, 500, 130),
    "dot products, few units": (1, 6, 2048, 40),
    "dot products, few terms backward": (1, 5, 7, 130),
    "dot products, blocks of columns backward": (1, 7, 260, 64),
    "rows as they lie": (1, 20, 1400, 300),
    "rows as they lie, weights of whole pages": (1, 20, 1024, 300),
    "rows as they lie, odd sizes": (1, 20, 97, 51),
    "two vectors of rows, few units": (1, 33, 1000, 24),
    "rows beyond two vectors": (1, 37, 25, 130),
    "panels and blocks of units": (1, 300, 80, 640),
    "panels of few units": (1, 300, 9, 7),
    "panels, and a rest of rows and units": (1, 260, 90, 130),
    "panels, and chains of terms": (1, 140, 300, 400),
}
DIVIDED_SEQUENCES = {
    "units of one row": (40, 1, 256, 512),
    "units of two rows": (40, 2, 64, 1100),
    "rows": (30, 40, 64, 130),
    "steps that are not packed for": (6, 3, 100, 400),
    "few steps of few terms": (3, 24, 1, 300),
    "weights that are not packed": (10, 2, 64, 520),
}


@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        pytest.param(operator, shape, id=f"{operator}, {reason}")
        for operator, shapes in (
            (CELL, DIVIDED_STEPS),
            (Operator(("padded", False, True)), DIVIDED_SEQUENCES),
            (Operator(("packed", False, True)), DIVIDED_SEQUENCES),
        )
        for reason, shape in shapes.items()
    ],
)
@each_dtype
def test_results_do_not_depend_on_the_number_of_threads(dtype, operator, shape):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7, 40):
            torch.set_num_threads(count)
            inputs = operator.inputs(shape=shape, dtype=dtype, requires_grad=True)
            results.append(outputs_and_gradients(operator, inputs))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@each_dtype
@each_operator
def test_a_device_without_kernels_takes_the_composite_formulas(dtype, operator):
    inputs = operator.inputs(dtype=dtype)
    outputs = composite(operator.forward)(*inputs)
    operator.assert_match(outputs, operator.reference(*double(inputs)), dtype)


def test_gradients_that_are_too_small_for_float16_add_up():
    like = backward_inputs(dtype=torch.float16, shape=(4096, 2, 4))
    inputs = [torch.full_like(tensor, 0.1) for tensor in like[:7]] + like[7:]
    inputs[0].fill_(0)
    inputs[1].fill_(3e-7)
    backward = torch.ops.lltm.backward
    mask = [False, True, True, False, False]
    results = backward(*inputs, mask)
    expected = backward(*double(inputs), mask)
    for ours, exact in zip(results[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-2, atol=6e-8)
