import lltm
import pytest
import torch
from sample import reference, sample_inputs

FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "every other column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "with an offset": lambda t: torch.cat([t, t])[len(t) :],
    "expanded": lambda t: t[:1].expand(t.shape),
}


def test_one_pass_over_the_units():
    """No operator of ATen computes gates, so none of their intermediate results is stored."""
    with torch.profiler.profile() as profiler:
        lltm.forward(*sample_inputs())
    names = {event.name for event in profiler.events()}
    assert names.isdisjoint({"aten::sigmoid", "aten::tanh", "aten::elu", "aten::mul"})


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_rounds_only_the_results(dtype):
    """Half types compute in float32: the results are off by no more than their rounding."""
    inputs = sample_inputs(batch=50, state_size=33, dtype=dtype)
    inputs[0].mul_(0), inputs[3].mul_(0)  # the products are those of ATen
    exact = reference(*(tensor.double() for tensor in inputs))
    unit = torch.finfo(dtype).eps
    for ours, expected in zip(lltm.forward(*inputs), exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=4 * unit, atol=4 * unit)


@pytest.mark.parametrize("argument", [0, 1, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, argument):
    inputs = sample_inputs()
    inputs[argument] = LAYOUTS[layout](inputs[argument])
    torch.testing.assert_close(lltm.forward(*inputs), reference(*inputs))


@pytest.mark.parametrize("argument", range(7))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_backward(layout, argument):
    input, weights, _, old_h, new_cell = sample_inputs()
    arguments = [old_h, new_cell, new_cell, old_h.repeat(1, 3), input, weights, old_h]
    arguments[argument] = LAYOUTS[layout](arguments[argument])
    expected = torch.ops.lltm.backward(*map(torch.Tensor.contiguous, arguments))
    torch.testing.assert_close(torch.ops.lltm.backward(*arguments), expected)


@pytest.mark.parametrize("batch", [0, 1, 500])
@pytest.mark.parametrize("state_size", [0, 1, 67])
def test_sizes(batch, state_size):
    inputs = sample_inputs(batch=batch, state_size=state_size)
    torch.testing.assert_close(lltm.forward(*inputs), reference(*inputs))


def test_extreme_pre_activations():
    values = torch.tensor([0.0, 1e-6, -1e-6, 30, -30, 200, -200, torch.inf, -torch.inf, torch.nan])
    rows = len(values)
    bias = torch.cat([torch.ones(2 * rows), values])
    inputs = torch.zeros(1, 1), torch.zeros(3 * rows, rows + 1), bias, *torch.zeros(2, 1, rows)
    expected = reference(*(tensor.double() for tensor in inputs))
    torch.testing.assert_close(
        lltm.forward(*inputs), expected, rtol=1e-6, atol=0, check_dtype=False, equal_nan=True
    )


@pytest.mark.parametrize("argument", range(7))
@pytest.mark.parametrize("change", [lambda t: t[:1], torch.Tensor.float], ids=["sizes", "dtype"])
def test_backward_refuses_what_it_would_read_wrongly(argument, change):
    input, weights, _, old_h, new_cell = sample_inputs()
    arguments = [old_h, old_h, new_cell, old_h.repeat(1, 3), input, weights, old_h]
    arguments[argument] = change(arguments[argument])
    with pytest.raises(RuntimeError, match="lltm::backward: expected "):
        torch.ops.lltm.backward(*arguments)


def test_gradients():
    inputs = sample_inputs(requires_grad=True)
    assert torch.autograd.gradcheck(lltm.forward, inputs)
    assert torch.autograd.gradgradcheck(lltm.forward, inputs)
    torch.library.opcheck(torch.ops.lltm.forward, inputs)
