import sys

import lltm
import pytest
import torch
from sample import assert_same_gradients, reference, sample_inputs


def test_gradgradcheck():
    """Compares the second derivative with finite differences of the first."""
    inputs = sample_inputs(requires_grad=True)
    assert torch.autograd.gradgradcheck(lltm.forward, inputs)


@pytest.mark.parametrize("needed", range(5))
def test_second_derivative_by_one_argument_alone(needed):
    inputs = sample_inputs()
    inputs[needed].requires_grad_()
    assert torch.autograd.gradgradcheck(lltm.forward, inputs)


def test_gradients():
    inputs = sample_inputs(requires_grad=True)
    assert torch.autograd.gradcheck(lltm.forward, inputs)
    torch.library.opcheck(torch.ops.lltm.forward, inputs)


def test_one_output_alone():
    """The gradient of the output that the loss leaves out is zero."""
    for used in (0, 1):
        inputs = sample_inputs(requires_grad=True)
        ours, expected = (
            torch.autograd.grad(step(*inputs)[used].norm(), inputs, allow_unused=True)
            for step in (lltm.forward, reference)
        )
        for actual, gradient in zip(ours, expected, strict=True):
            zeros = torch.zeros_like(actual)
            torch.testing.assert_close(actual, zeros if gradient is None else gradient)


def test_compiles_for_training():
    inputs = sample_inputs(requires_grad=True)
    assert_same_gradients(torch.compile(lltm.forward, fullgraph=True), inputs)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit.script ends with Python 3.13")
def test_a_scripted_model_learns_after_loading(tmp_path):
    @torch.jit.script
    def step(input, weights, bias, old_h, old_cell):
        return torch.ops.lltm.forward(input, weights, bias, old_h, old_cell)

    step.save(str(tmp_path / "step.pt"))
    inputs = sample_inputs(requires_grad=True)
    assert_same_gradients(torch.jit.load(tmp_path / "step.pt"), inputs)


def test_the_operator_of_backward_has_no_derivative_and_says_so():
    grads = sample_inputs(requires_grad=True)[3:]
    input, weights, _, old_h, new_cell = sample_inputs()
    gates = torch.rand(4, 15, dtype=torch.float64)
    d_input, *_ = torch.ops.lltm.backward(*grads, new_cell, gates, input, weights, old_h)
    with pytest.raises(RuntimeError, match="derivative for lltm::backward is not implemented"):
        d_input.sum().backward()
