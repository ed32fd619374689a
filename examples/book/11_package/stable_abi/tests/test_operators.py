import pytest
import torch
from test_swiglu import each_device, each_dtype, tensors


@each_device
@each_dtype
@pytest.mark.parametrize("op", ["swiglu_forward", "swiglu_backward"])
def test_opcheck(device, dtype, op):
    op = getattr(torch.ops.my_ops, op).default
    torch.library.opcheck(op, tensors(len(op._schema.arguments), device, dtype))
