import sys

import pytest
import torch
from test_swiglu import arguments, each_device, each_dtype, swiglu


@each_device
@each_dtype
@pytest.mark.parametrize("op", ["swiglu", "swiglu_backward"])
def test_opcheck(device, dtype, op):
    inputs = arguments(device, dtype)
    grad = [torch.randn_like(inputs[0], requires_grad=True)] * (op == "swiglu_backward")
    torch.library.opcheck(getattr(torch.ops.my_ops, op).default, (*grad, *inputs))


@each_device
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="TorchScript ends with Python 3.13")
def test_torchscript(device):
    inputs = arguments(device)
    scripted = torch.jit.script(swiglu)
    torch.testing.assert_close(scripted(*inputs), swiglu(*inputs))
    assert scripted(*inputs).requires_grad
    with pytest.raises(Exception, match=r"my_ops::swiglu: expected value to be like"):
        scripted(inputs[0], torch.ones(2, device=device))
