"""The operators as the dispatcher knows them: schemas, keys, and what opcheck asks of them."""

import os

import pytest
import torch
from common import LAYOUTS, backward_inputs, each_device, each_dtype, needs_cuda, sample_inputs
from expecttest import assert_expected_inline
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import lltm_ops

OPERATORS = {
    "forward": sample_inputs,
    "_forward_with_gates": sample_inputs,
    "backward": backward_inputs,
}
each_operator = pytest.mark.parametrize("name", OPERATORS)


def operator(name):
    return getattr(torch.ops.lltm, name).default


def test_schemas():
    assert_expected_inline(
        "\n".join(str(operator(name)._schema) for name in OPERATORS),
        """\
lltm::forward(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell) -> (Tensor new_h, Tensor new_cell)
lltm::_forward_with_gates(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell) -> (Tensor new_h, Tensor new_cell, Tensor gates)
lltm::backward(Tensor grad_h, Tensor grad_cell, Tensor new_cell, Tensor gates, Tensor input, Tensor weights, Tensor old_h, bool[5] output_mask=[True, True, True, True, True]) -> (Tensor d_input, Tensor d_weights, Tensor d_bias, Tensor d_old_h, Tensor d_old_cell)""",
    )


@each_operator
@pytest.mark.parametrize(
    "key", ["CPU", "CompositeExplicitAutograd", "Meta", "Autograd", "FuncTorchBatched"]
)
def test_kernel_stands_at(name, key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lltm::{name}", key)


@each_operator
@pytest.mark.parametrize("key", ["AutocastCPU", "AutocastCUDA"])
def test_backward_follows_the_dtypes_of_forward(name, key):
    registered = torch._C._dispatch_has_kernel_for_dispatch_key(f"lltm::{name}", key)
    assert registered == (name != "backward")


@each_operator
@pytest.mark.skipif(
    lltm_ops.build_info()["cuda"] == "not built" and os.environ.get("FORCE_CUDA") != "1",
    reason="built without CUDA",
)
def test_cuda_kernels_are_built(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lltm::{name}", "CUDA")


@needs_cuda
def test_cuda_is_built_where_there_is_a_gpu():
    assert lltm_ops.build_info()["cuda"] != "not built"


@each_device
@each_dtype
@each_operator
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(device, dtype, name, requires_grad):
    opcheck(operator(name), OPERATORS[name](device, dtype, requires_grad=requires_grad))


@each_operator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 5, 4), (0, 5, 4), (3, 0, 4), (1, 1, 1)], ids=str)
def test_opcheck_of_layouts_and_shapes(name, layout, shape):
    """The strides of the arguments change nothing about the results, real or fake."""
    inputs = [
        LAYOUTS[layout](tensor) if tensor.dim() == 2 else tensor
        for tensor in OPERATORS[name](shape=shape)
    ]
    opcheck(operator(name), [tensor.detach().requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("mask", [[True, False] * 2 + [True], [False] * 5, [False] * 4 + [True]])
def test_opcheck_of_output_mask(mask):
    opcheck(operator("backward"), (*backward_inputs(requires_grad=True), mask))


@each_device
@each_operator
def test_results_alias_nothing(device, name):
    inputs = OPERATORS[name](device)
    outputs = operator(name)(*inputs)
    pointers = [tensor.untyped_storage().data_ptr() for tensor in (*inputs, *outputs)]
    assert len(set(pointers)) == len(pointers)


@each_operator
@each_dtype
def test_meta_gives_the_shapes_of_the_kernels(name, dtype):
    inputs = [LAYOUTS["strided"](tensor) for tensor in OPERATORS[name](dtype=dtype)]
    outputs = operator(name)(*inputs)
    for meta, real in zip(operator(name)(*(t.to("meta") for t in inputs)), outputs, strict=True):
        assert meta.is_meta
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


@each_operator
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_know_the_device(name, device):
    """Also that of a device which is not there: what deployment tools trace with."""
    inputs = OPERATORS[name]()
    with FakeTensorMode() as mode:
        fake = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in inputs]
        outputs = operator(name)(*fake)
    assert all(mode.is_our_fake(output) and output.device.type == device for output in outputs)
