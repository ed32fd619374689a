import sys

import pytest
import torch
from test_swiglu import each_device, each_dtype, swiglu, tensors


@each_device
@each_dtype
@pytest.mark.parametrize("op", ["swiglu", "swiglu_backward"])
def test_opcheck(device, dtype, op):
    op = getattr(torch.ops.my_ops, op).default
    count = len(op._schema.arguments)
    torch.library.opcheck(op, tensors(count, device, dtype, requires_grad=True))


@each_device
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="TorchScript ends with Python 3.13")
def test_torchscript(device):
    inputs = tensors(2, device, requires_grad=True)
    scripted = torch.jit.script(swiglu)
    torch.testing.assert_close(scripted(*inputs), swiglu(*inputs))
    assert scripted(*inputs).requires_grad
    with pytest.raises(Exception, match=r"my_ops::swiglu: expected value to be like"):
        scripted(*tensors(1, device), torch.ones(2, device=device))
