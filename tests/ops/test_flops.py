"""FlopCounterMode counts the products of the operators as it counts those of plain PyTorch."""

import itertools

import pytest
import torch
from common import CELL, each_operator, gradients
from torch.utils.flop_counter import FlopCounterMode

import lltm_ops


def flops(function, *arguments):
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


@each_operator
@pytest.mark.parametrize("requires_grad", [False, True])
def test_flops_are_those_of_the_reference(operator, requires_grad):
    inputs = operator.inputs(requires_grad=requires_grad)
    with torch.set_grad_enabled(requires_grad):
        run = gradients if requires_grad else lambda function, inputs: function(*inputs)
        expected = flops(run, operator.reference, inputs)
        assert flops(run, operator.forward, inputs) == expected > 0
        assert flops(operator.forward_with_gates, *operator.inputs()) > 0


@each_operator
def test_flops_of_gradients_that_are_asked_for(operator):
    inputs = operator.backward_inputs()
    given = dict(zip(operator.backward_arguments, inputs, strict=True))
    weights, d_preactivations = given["weights"], given["gates"].flatten(0, -2)
    old_h, x = torch.zeros(len(d_preactivations), 4), given["input"].flatten(0, -2)

    def products(mask):
        """The steps of a sequence always need the gradient of their h."""
        if mask[0]:
            d_preactivations @ weights[:, 4:]
        if mask[1]:
            d_preactivations.T @ torch.cat([old_h, x], 1)
        if mask[3] or operator is not CELL:
            d_preactivations @ weights[:, :4]

    for mask in itertools.product([False, True], repeat=5):
        expected = flops(products, mask)
        assert flops(operator.backward, *inputs, mask) == expected, mask


def test_the_profiler_counts_none():
    """It has a list of PyTorch's own operators, in C++."""
    with torch.profiler.profile(with_flops=True) as profile:
        lltm_ops.LLTM(5, 4)(torch.randn(7, 3, 5))
    events = [event for event in profile.key_averages() if event.key.startswith("lltm::")]
    assert events and not any(event.flops for event in events)
