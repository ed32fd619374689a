import pytest
import torch
from torch.nn.functional import silu

from my_ops import swiglu

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
each_device = pytest.mark.parametrize("device", ["cpu", GPU])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arguments(device="cpu", dtype=torch.float64, size=(3, 4)):
    """Those of swiglu. The tests look for gradients of those that require them: of a mask, none."""
    gate = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
    value = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
    return gate, value


def reference(gate, value):
    return silu(gate) * value


def differentiable(inputs):
    return [tensor for tensor in inputs if tensor.requires_grad]


def loss(result):
    """Weighted: an operator may keep the sum, as softmax does, whose gradient is zero then."""
    # Small integers, which half types hold exactly.
    weights = torch.arange(result.numel(), device=result.device) % 4 + 1
    return (result * weights.view(result.shape)).sum()


def value_and_gradients(function, inputs):
    result = function(*inputs)
    return result, *torch.autograd.grad(loss(result), differentiable(inputs))


def of_differentiable(function, inputs):
    """The function of those arguments alone."""

    def call(*chosen):
        left = iter(chosen)
        return function(*(next(left) if tensor.requires_grad else tensor for tensor in inputs))

    return call


@each_device
@each_dtype
@pytest.mark.parametrize("size", [(0,), (), (5, 7), (3, 20_011)], ids=str)
def test_values_and_gradients_are_those_of_float64(device, dtype, size):
    inputs = arguments(device, dtype, size)
    doubles = [t.double() if t.is_floating_point() else t for t in inputs]
    exact = value_and_gradients(reference, doubles)
    expected = tuple(tensor.to(dtype) for tensor in exact)
    torch.testing.assert_close(value_and_gradients(swiglu, inputs), expected)


@each_device
@pytest.mark.parametrize("view", [torch.t, lambda t: t[:, 1::2], lambda t: t[:1].expand(3, 4)])
def test_any_strides(device, view):
    inputs = [view(tensor) for tensor in arguments(device)]
    result = swiglu(*inputs)
    assert result.is_contiguous()
    torch.testing.assert_close(result, reference(*inputs), check_stride=False)


@each_device
def test_derivatives(device):
    inputs = arguments(device)
    assert torch.autograd.gradcheck(swiglu, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(swiglu, inputs)


@each_device
def test_compiled_calls_the_kernels(device):
    inputs, compiled = arguments(device), torch.compile(swiglu, fullgraph=True)
    value_and_gradients(compiled, inputs)  # compiles, which calls more
    with torch.profiler.profile() as profile:
        actual = value_and_gradients(compiled, inputs)
    torch.testing.assert_close(actual, value_and_gradients(reference, inputs))
    kernels = {event.name for event in profile.events() if event.name.startswith("my_ops::")}
    assert "my_ops::swiglu_backward" in kernels and len(kernels) == 2


TRANSFORMS = {
    "jvp": lambda f: lambda *inputs: torch.func.jvp(f, inputs, inputs),
    "jvp of jvp": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    "gradient": lambda f: lambda *inputs: torch.func.grad(lambda every: loss(f(*every)))(inputs),
    "hessian": torch.func.hessian,
    "vmap": lambda f: lambda gate, value: torch.vmap(f, (1, None))(gate, value[:, 0]),
}


@each_device
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(device, compiled, transform):
    inputs, transform = arguments(device), TRANSFORMS[transform]
    actual, expected = (transform(of_differentiable(f, inputs)) for f in (swiglu, reference))
    if compiled:
        actual = torch.compile(actual, fullgraph=True, backend="aot_eager")
    chosen = differentiable(inputs)
    torch.testing.assert_close(actual(*chosen), expected(*chosen), check_stride=False)


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
    with pytest.raises(Exception, match=r"my_ops::swiglu.*: expected .* to be like") as raised:
        PATHS[path](torch.ones(2, 3), value)
    assert "kernel.h" not in str(raised.value)  # a path of whoever compiled it
