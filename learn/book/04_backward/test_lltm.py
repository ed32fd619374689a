import lltm
import pytest
import torch
from sample import assert_same_gradients, sample_inputs


@pytest.mark.filterwarnings("error")
def test_gradcheck():
    """Compares backward with finite differences of forward, in float64."""
    assert torch.autograd.gradcheck(lltm.forward, sample_inputs(requires_grad=True))


def test_saves_the_gates_and_little_else():
    inputs = sample_inputs(batch=7, state_size=5, requires_grad=True)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.update({tensor.data_ptr(): tensor.numel()}) or tensor, lambda x: x
    ):
        results = lltm.forward(*inputs)
    for tensor in [*inputs, *results]:  # they are in memory anyway
        saved.pop(tensor.data_ptr(), None)
    assert sum(saved.values()) == 7 * 3 * 5


def test_gradients_are_those_of_the_formulas():
    inputs = sample_inputs(requires_grad=True)
    assert_same_gradients(lltm.forward, inputs)


def test_gradient_where_the_branches_of_the_elu_meet():
    input, weights, bias, *state = sample_inputs()
    inputs = [input, weights.zero_(), bias.zero_(), *state]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    assert_same_gradients(lltm.forward, inputs)


@torch.library.custom_op("book::wrong", mutates_args=())
def wrong(
    input: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor,
    old_h: torch.Tensor,
    old_cell: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ops.lltm._forward_with_gates(input, weights, bias, old_h, old_cell)


def forgets_a_gradient(ctx, grad_h, grad_cell, grad_gates):
    return lltm.autograd["backward"](ctx, grad_h, torch.zeros_like(grad_cell), grad_gates)


def test_opcheck_passes_a_wrong_backward_that_gradcheck_refuses():
    wrong.register_autograd(forgets_a_gradient, setup_context=lltm.autograd["setup_context"])
    inputs = sample_inputs(requires_grad=True)
    torch.library.opcheck(wrong, inputs, test_utils=("test_schema", "test_autograd_registration"))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(wrong, inputs)
