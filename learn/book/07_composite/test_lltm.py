import lltm
import pytest
import torch
from sample import assert_same_mapped, loss, reference, sample_inputs
from torch.autograd import forward_ad


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian],
    ids=lambda transform: transform.__name__,
)
def test_transforms(transform):
    ours, expected = (transform(loss(step))(*sample_inputs()) for step in (lltm.forward, reference))
    torch.testing.assert_close(ours, expected)


def test_forward_mode():
    """A tangent by its value: a lost one would be None or zeros, without an error."""
    inputs = sample_inputs()
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(tensor, tensor.cos()) for tensor in inputs]
        ours, expected = (
            [forward_ad.unpack_dual(result).tangent for result in step(*duals)]
            for step in (lltm.forward, reference)
        )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("mapped", range(5))
def test_vmap(mapped):
    assert_same_mapped(lltm.forward, mapped)


def test_gradients_of_each_row():
    input, *rest = sample_inputs()
    ours, expected = (
        torch.vmap(torch.func.grad(loss(step)), (0, None, None, 0, 0))(
            input[:, None], *rest[:2], *(tensor[:, None] for tensor in rest[2:])
        )
        for step in (lltm.forward, reference)
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("step", [lltm.forward, torch.compile(lltm.forward, fullgraph=True)])
def test_training_takes_the_kernels(step):
    """The formula is for transforms only."""
    inputs = sample_inputs(requires_grad=True)
    step(*inputs)
    with torch.profiler.profile() as profiler:
        torch.autograd.grad(loss(step)(*inputs), inputs)
    names = {event.name for event in profiler.events()}
    assert {"lltm::_forward_with_gates", "lltm::backward"} <= names
