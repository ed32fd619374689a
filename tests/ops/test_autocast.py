"""Autocast runs the whole cell in the autocast dtype, as it does lstm_cell."""

import pytest
import torch
from common import (
    CELL,
    PADDED,
    TOLERANCES,
    composite,
    double,
    each_device,
    each_operator,
    gradients,
    needs_torchscript,
    sample_inputs,
    sequence_inputs,
)
from torch._subclasses import FakeTensorMode

import lltm_ops

each_low_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_way = pytest.mark.parametrize("way", ["eager", "compiled"])


def step_of(way):
    torch._dynamo.reset()
    if way == "eager":
        return lltm_ops.forward
    return torch.compile(lltm_ops.forward, backend="aot_eager", fullgraph=True)


@each_device
@each_low_dtype
@each_way
def test_forward_and_backward(device, dtype, way):
    inputs = sample_inputs(device, requires_grad=True)
    step = step_of(way)
    with torch.autocast(device, dtype):
        outputs = step(*inputs)
        assert all(output.dtype == dtype for output in outputs)
        actual = gradients(step, inputs)
    for ours, exact in zip(actual, gradients(lltm_ops.reference, double(inputs)), strict=True):
        assert ours.dtype == torch.float32  # the dtype of the parameter
        torch.testing.assert_close(ours.cpu().double(), exact, **TOLERANCES[torch.bfloat16])


@each_device
@each_low_dtype
@each_operator
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_same_numbers_as_casting_by_hand(device, dtype, operator, requires_grad):
    inputs = operator.inputs(device, requires_grad=requires_grad)
    by_hand = operator.forward(*(t.to(dtype) for t in inputs[:5]), *inputs[5:])
    with torch.autocast(device, dtype):
        outputs = operator.forward(*inputs)
    for ours, expected in zip(outputs, by_hand, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, expected)
    if requires_grad:
        with torch.autocast(device, dtype):
            actual = gradients(operator.forward, inputs)
        assert all(gradient.dtype == torch.float32 for gradient in actual)


@each_device
@each_low_dtype
@pytest.mark.parametrize("operator", [CELL, PADDED], ids=str)
def test_backward_keeps_its_dtypes(device, dtype, operator):
    for own in (torch.float32, dtype):
        inputs = operator.backward_inputs(device, own)
        expected = operator.backward(*inputs)
        with torch.autocast(device, dtype):
            actual = operator.backward(*inputs)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mixed_dtypes_are_unified_and_float64_stays(device, dtype):
    inputs = sample_inputs(device, dtype)
    if dtype == torch.float32:
        inputs[0] = inputs[0].bfloat16()
        inputs[3] = inputs[3].half()
    with torch.autocast(device, torch.bfloat16):
        expected = torch.float64 if dtype == torch.float64 else torch.bfloat16
        assert lltm_ops.forward(*inputs)[0].dtype == expected


def test_composite_formulas_keep_their_dtypes():
    """A device whose autocast we do not register gets the dtypes of its arguments, all alike."""
    with torch.autocast("cpu", torch.bfloat16):
        outputs = composite(torch.ops.lltm.forward)(*sample_inputs())
    assert {output.dtype for output in outputs} == {torch.float32}


@each_device
@each_low_dtype
def test_a_second_derivative_is_as_exact_as_that_of_plain_pytorch(device, dtype):
    def second_derivative(op, inputs, **autocast):
        with torch.autocast(device, dtype, **autocast):
            outputs = op(*inputs)
        loss = sum(output.double().square().sum() for output in outputs)
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(grad.double().square().sum() for grad in grads), inputs)

    inputs = sample_inputs(device, requires_grad=True)
    exact = second_derivative(lltm_ops.reference, double(inputs), enabled=False)

    def error(op):
        actual = second_derivative(op, inputs)
        pairs = zip(actual, exact, strict=True)
        return max((ours.cpu() - x).abs().max() / x.abs().max() for ours, x in pairs)

    assert error(lltm_ops.forward) < 1.5 * error(lltm_ops.reference) < 0.05


@each_device
def test_the_cast_of_the_weights_is_cached(device):
    cell = lltm_ops.LLTMCell(5, 4, device=device)
    input = torch.randn(3, 5, device=device)
    with torch.autocast(device, torch.bfloat16), torch.profiler.profile() as profile:
        state = cell(input)
        for _ in range(4):
            state = cell(input, state)
    copies = [event for event in profile.events() if event.name == "aten::_to_copy"]
    # weights and bias once, input in each of five steps, the two zero states once each.
    assert len(copies) == 2 + 5 + 2


@needs_torchscript
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("module", [lltm_ops.LLTMCell(5, 4), lltm_ops.LLTM(5, 4)], ids=str)
def test_traced_under_autocast_with_weights_for_parameters(module):
    """torch.jit.trace refuses weights that it finds cast already, as constants."""
    input = torch.randn(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(input)
        traced = torch.jit.trace(module, (input,))
        torch.testing.assert_close(traced(input), expected)
        assert torch.is_autocast_cache_enabled()


def test_autocast_of_the_cpu_is_not_that_of_another_device():
    """Packed sequences have batch_sizes on the CPU wherever their data are."""
    inputs = sequence_inputs(kind=("packed", False, True))
    input, *rest, batch_sizes, reverse, resets = inputs[:8]
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(t.shape, device="cuda") for t in (input, *rest)]
        there = torch.empty(resets.shape, dtype=torch.bool, device="cuda")
        with torch.autocast("cpu", torch.bfloat16):
            outputs = lltm_ops.sequence_forward(*tensors, batch_sizes, reverse, there)
    assert all(output.dtype == torch.float32 for output in outputs)
