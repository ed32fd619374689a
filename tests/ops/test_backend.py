"""A backend that CONTRIBUTING.md tells how to add, and what holds of it without more."""

import functools
import itertools

import pytest
import torch
from common import (
    CELL,
    LAYOUTS,
    OPERATORS,
    double,
    each_dtype,
    each_shape,
    exact_gradients,
    load_beside_library,
    message,
)
from torch.utils._pytree import tree_map_only

# The tests share what they compile.
pytestmark = pytest.mark.xdist_group("backend")
KEY = torch._C.DispatchKey.PrivateUse1


@pytest.fixture(scope="module", autouse=True)
def backend():
    load_beside_library("lltm_backend", "ops/backend/lltm_kernel_privateuse1.cpp")


def on_backend(op):
    """No tensor is of the backend: its entry of the dispatch table is called by its key."""
    return functools.partial(op.default.redispatch, torch._C.DispatchKeySet(KEY))


def test_its_kernels_take_the_place_of_composite_formulas():
    for operator in OPERATORS:
        for op in (operator.forward, operator.forward_with_gates, operator.backward):
            name = op.default.name()
            of_cell = "sequence" not in name
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY) == of_cell


@each_dtype
@each_shape
def test_values_and_gradients(dtype, shape):
    inputs = CELL.inputs(dtype=dtype, shape=(1, *shape))
    outputs = on_backend(CELL.forward_with_gates)(*inputs)
    exact = CELL.forward_with_gates(*double(inputs))
    CELL.assert_match(outputs, exact, dtype)
    for ours, again in zip(on_backend(CELL.forward)(*inputs), outputs, strict=False):
        assert torch.equal(ours, again)
    inputs = CELL.backward_inputs(dtype=dtype, shape=(1, *shape))
    exact = exact_gradients(CELL, "cpu", dtype, (1, *shape))
    # A gradient of the weights sums over the batch, and its rounding errors with it.
    results = on_backend(CELL.backward)(*inputs, [True] * 5)
    CELL.assert_match(results, exact, dtype, rows=shape[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_and_output_mask(layout):
    inputs = tree_map_only(torch.Tensor, LAYOUTS[layout], CELL.inputs())
    exact = CELL.reference(*double(inputs))
    CELL.assert_match(on_backend(CELL.forward)(*inputs), exact, torch.float32)
    inputs = tree_map_only(torch.Tensor, LAYOUTS[layout], CELL.backward_inputs())
    for mask in itertools.product([False, True], repeat=5):
        results = on_backend(CELL.backward)(*inputs, mask)
        assert tuple(result is not None for result in results) == mask


def test_errors_are_the_same():
    inputs = CELL.inputs()
    inputs[2] = inputs[2][:-1]
    assert message(on_backend(CELL.forward), inputs) == message(CELL.forward, inputs)
