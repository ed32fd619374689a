"""Random shapes, strides, dtypes and values, against the float64 reference."""

import torch
from common import (
    ARGUMENTS,
    DTYPES,
    LAYOUTS,
    SEQUENCE_KINDS,
    TOLERANCES,
    assert_matches_float64,
    double,
    each_device,
    gradients,
    reference_gradients,
    sample_inputs,
    sequence_inputs,
    sequence_reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import lltm_ops


@each_device
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(0, 40), st.integers(0, 70), st.integers(1, 70)),
    layouts=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 5),
    scale=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_forward_and_gradients(device, dtype, shape, layouts, scale):
    inputs = sample_inputs(device, dtype, shape)
    for position, (name, layout) in enumerate(zip(ARGUMENTS, layouts, strict=True)):
        if name == "bias" and layout == "transposed":
            layout = "strided"
        inputs[position] = LAYOUTS[layout](inputs[position] * scale).requires_grad_()
    exact_inputs = double(inputs)
    for ours, exact in zip(
        lltm_ops.forward(*inputs), lltm_ops.reference(*exact_inputs), strict=True
    ):
        assert_matches_float64(ours, exact)
    growth = max(1, shape[0]) ** 0.5
    tolerance = {name: value * growth for name, value in TOLERANCES[dtype].items()}
    for ours, exact in zip(
        gradients(lltm_ops.forward, inputs), reference_gradients(exact_inputs), strict=True
    ):
        torch.testing.assert_close(ours.cpu().double(), exact, **tolerance)


@each_device
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(0, 20), st.integers(0, 40), st.integers(0, 70), st.integers(1, 70)),
    kind=st.sampled_from(SEQUENCE_KINDS),
    layouts=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 5),
    scale=st.sampled_from([0.0, 0.1, 1.0]),
    threads=st.integers(1, 5),
)
def test_sequence_forward_and_gradients(device, dtype, shape, kind, layouts, scale, threads):
    inputs = sequence_inputs(device, dtype, shape, kind)
    for position, layout in enumerate(layouts):
        inputs[position] = LAYOUTS[layout](inputs[position] * scale).requires_grad_()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        outputs = torch.ops.lltm.sequence_forward(*inputs)
        actual = gradients(torch.ops.lltm.sequence_forward, inputs)
    finally:
        torch.set_num_threads(before)
    exact_inputs = double(inputs)
    expected = gradients(sequence_reference, exact_inputs)
    exact_outputs = sequence_reference(*exact_inputs)
    for ours, exact in zip((*outputs, *actual), (*exact_outputs, *expected), strict=True):
        if exact is None or exact.numel() == 0:
            assert not ours.any()
            continue
        # Rounding grows from step to step, and in gradients adds up over rows.
        tolerance = TOLERANCES[dtype]["atol"] * 10 * max(1.0, exact.abs().max().item())
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=0, atol=tolerance)
