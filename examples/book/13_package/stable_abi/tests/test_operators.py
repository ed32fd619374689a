import pytest
import torch
from test_swiglu import arguments, each_device, each_dtype, swiglu, value_and_gradients

ops = torch.ops.my_ops


@each_device
@each_dtype
@pytest.mark.parametrize("op", [ops.swiglu_forward, ops.swiglu_backward])
# The operators alone have no gradients: PyTorch warns whoever asks for them.
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
def test_opcheck(device, dtype, op):
    inputs = arguments(device, dtype)
    grad = [torch.randn_like(inputs[0], requires_grad=True)] * (op is ops.swiglu_backward)
    torch.library.opcheck(op.default, (*grad, *inputs))


@each_device
@pytest.mark.parametrize("op", [ops.swiglu_forward, ops.swiglu_backward])
def test_vmap_of_the_operators_alone_is_no_loop(device, op):
    inputs = [torch.randn(3, 4, device=device) for _ in op.default._schema.arguments]
    with torch.profiler.profile() as profile:
        actual = torch.vmap(op, in_dims=1)(*inputs)
    torch.testing.assert_close(actual, op(*(tensor.t() for tensor in inputs)))
    # The call to vmap's rule, and the rule's call to the kernel. A loop makes four of the latter.
    assert sum(event.name == op.default.name() for event in profile.events()) == 2


@each_device
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(device, compiled):
    def in_region(*inputs):
        with torch.autocast(device, torch.bfloat16):
            return swiglu(*inputs)

    function = torch.compile(in_region, fullgraph=True) if compiled else in_region
    # The loss and its gradients are outside of the region, as in a training loop.
    inputs = arguments(device, torch.float32)
    actual = value_and_gradients(function, inputs)
    halves = [tensor.bfloat16() if tensor.requires_grad else tensor for tensor in inputs]
    expected = value_and_gradients(swiglu, halves)
    torch.testing.assert_close(actual, expected, check_dtype=False)
    assert (actual[0].dtype, actual[1].dtype) == (torch.bfloat16, torch.float32)
