import pytest
import torch
from torch.nn.functional import silu

from my_ops import swiglu

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
each_device = pytest.mark.parametrize("device", ["cpu", GPU])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tensors(count, device="cpu", dtype=torch.float64, size=(3, 4), **options):
    return tuple(torch.randn(size, device=device, dtype=dtype, **options) for _ in range(count))


def reference(gate, value):
    return silu(gate) * value


def value_and_gradients(function, inputs):
    result = function(*inputs)
    return result, *torch.autograd.grad(result.sum(), inputs)


@each_device
@each_dtype
@pytest.mark.parametrize("size", [(0,), (), (5, 7), (3, 20_011)], ids=str)
def test_values_and_gradients_are_those_of_float64(device, dtype, size):
    inputs = tensors(2, device, dtype, size, requires_grad=True)
    exact = value_and_gradients(reference, [tensor.double() for tensor in inputs])
    expected = tuple(tensor.to(dtype) for tensor in exact)
    torch.testing.assert_close(value_and_gradients(swiglu, inputs), expected)


@each_device
@pytest.mark.parametrize("view", [torch.t, lambda t: t[:, 1::2], lambda t: t[:1].expand(3, 4)])
def test_any_strides(device, view):
    gate, value = map(view, tensors(2, device))
    result = swiglu(gate, value)
    assert result.is_contiguous()
    torch.testing.assert_close(result, reference(gate, value), check_stride=False)


@each_device
def test_derivatives(device):
    inputs = tensors(2, device, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(swiglu, inputs)


@each_device
def test_compiled_calls_the_kernels(device):
    inputs = tensors(2, device, requires_grad=True)
    with torch.profiler.profile() as profile:
        actual = value_and_gradients(torch.compile(swiglu, fullgraph=True), inputs)
    torch.testing.assert_close(actual, value_and_gradients(reference, inputs))
    names = {event.name for event in profile.events()}
    assert "my_ops::swiglu_backward" in names and "aten::sigmoid" not in names


TRANSFORMS = {
    "jvp": lambda f: lambda *inputs: torch.func.jvp(f, inputs, inputs),
    "jvp of jvp": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    "gradient": lambda f: torch.func.grad(lambda *inputs: f(*inputs).sum(), (0, 1)),
    "hessian": torch.func.hessian,
    "vmap": lambda f: lambda gate, value: torch.vmap(f, (1, None))(gate, value[:, 0]),
}


@each_device
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(device, compiled, transform):
    inputs, transform = tensors(2, device), TRANSFORMS[transform]
    actual, expected = transform(swiglu), transform(reference)
    if compiled:
        actual = torch.compile(actual, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(actual(*inputs), expected(*inputs), check_stride=False)


PATHS = {
    "eager": swiglu,
    "gradient": lambda gate, value: swiglu(gate.requires_grad_(), value),
    "inference": torch.inference_mode()(swiglu),
    "backward": lambda gate, value: torch.ops.my_ops.swiglu_backward(value, gate, gate),
    "vmap": lambda gate, value: torch.vmap(swiglu)(gate[None], value[None]),
    "meta": torch.inference_mode()(lambda gate, value: swiglu(gate.to("meta"), value.to("meta"))),
    "compile": torch.compile(swiglu, fullgraph=True, dynamic=False),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2, 3).int()], ids=["shape", "dtype"])
def test_every_path_refuses_what_does_not_fit(path, value):
    with pytest.raises(Exception, match=r"my_ops::swiglu.*: expected .* to be like"):
        PATHS[path](torch.ones(2, 3), value)
