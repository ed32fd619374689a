import pytest
import torch

from my_ops import masked_softmax

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
each_device = pytest.mark.parametrize("device", ["cpu", GPU])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arguments(device="cpu", dtype=torch.float64, size=(3, 4)):
    """Those of masked_softmax. The tests look for gradients of those that require them."""
    scores = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
    mask = torch.rand(size, device=device) < 0.7
    if len(size) > 1:
        mask[-1] = False  # a row in which no score counts
    return scores, mask


def reference(scores, mask):
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return weights.masked_fill(~mask, 0)


# Which of the arguments have gradients.
ARGNUMS = tuple(i for i, a in enumerate(arguments()) if getattr(a, "requires_grad", False))


def loss(result):
    """Weighted: an operator may keep the sum, as softmax does, whose gradient is zero then."""
    # Small integers, which half types hold exactly.
    weights = torch.arange(result.numel(), device=result.device) % 4 + 1
    return (result * weights.view(result.shape)).sum()


def with_gradients(function, inputs):
    result = function(*inputs)
    return result, *torch.autograd.grad(loss(result), [inputs[i] for i in ARGNUMS])


@each_device
@each_dtype
@pytest.mark.parametrize("size", [(0,), (2, 0), (5, 7), (40, 1031)], ids=str)
def test_values_and_gradients_are_those_of_float64(device, dtype, size):
    inputs = arguments(device, dtype, size)
    doubles = [t.double() if t.is_floating_point() else t for t in inputs]
    exact = with_gradients(reference, doubles)
    expected = tuple(tensor.to(dtype) for tensor in exact)
    torch.testing.assert_close(with_gradients(masked_softmax, inputs), expected)


@each_device
@pytest.mark.parametrize("view", [torch.t, lambda t: t[:, 1::2], lambda t: t[:1].expand(3, 4)])
def test_any_strides(device, view):
    inputs = [view(tensor) for tensor in arguments(device)]
    result = masked_softmax(*inputs)
    assert result.is_contiguous()
    torch.testing.assert_close(result, reference(*inputs), check_stride=False)


@each_device
def test_derivatives(device):
    inputs = arguments(device)
    assert torch.autograd.gradcheck(masked_softmax, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(masked_softmax, inputs)


@each_device
def test_compiled_once_it_calls_the_kernels(device):
    compiled = torch.compile(masked_softmax, fullgraph=True, dynamic=True)
    with_gradients(compiled, arguments(device))  # compiles, which calls more
    inputs = arguments(device, size=(7, 5))
    with torch.compiler.set_stance("fail_on_recompile"), torch.profiler.profile() as profile:
        actual = with_gradients(compiled, inputs)
    torch.testing.assert_close(actual, with_gradients(reference, inputs))
    kernels = {event.name for event in profile.events() if event.name.startswith("my_ops::")}
    assert "my_ops::masked_softmax_backward" in kernels and len(kernels) == 2


def gradient(function):
    return torch.func.grad(lambda *inputs: loss(function(*inputs)), ARGNUMS)


def jacobians(function):
    """One at a time: torch 2.11 does not compile jacfwd of several arguments."""
    return lambda *inputs: [torch.func.jacfwd(function, i)(*inputs) for i in ARGNUMS]


TRANSFORMS = {
    "gradient": gradient,
    "jvp": jacobians,
    "jvp of jvp": lambda f: jacobians(jacobians(lambda scores, mask: f(scores**3, mask))),
    "hessian": lambda f: jacobians(torch.func.jacrev(f, ARGNUMS)),
    "vmap of scores": lambda f: lambda scores, mask: torch.vmap(f, (1, None))(scores, mask[:, 0]),
    "vmap of mask": lambda f: lambda scores, mask: torch.vmap(f, (None, 1))(scores[:, 0], mask),
    "vmap of gradient": lambda f: torch.vmap(gradient(f), 1),
}


@each_device
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(device, compiled, transform):
    inputs, transform = arguments(device), TRANSFORMS[transform]
    actual = transform(masked_softmax)
    if compiled:
        actual = torch.compile(actual, fullgraph=True, backend="aot_eager")
    expected = transform(reference)(*inputs)
    torch.testing.assert_close(actual(*inputs), expected, check_stride=False)


ops = torch.ops.my_ops
PATHS = {
    "eager": masked_softmax,
    "gradient": lambda x, mask: masked_softmax(x.requires_grad_(x.is_floating_point()), mask),
    "inference": torch.inference_mode()(masked_softmax),
    "backward, grad": lambda scores, mask: ops.masked_softmax_backward(mask, scores, scores > 0),
    "backward, mask": lambda scores, mask: ops.masked_softmax_backward(scores, scores, mask),
    "vmap": lambda scores, mask: torch.vmap(masked_softmax)(scores[None], mask[None]),
    "meta": torch.inference_mode()(lambda *inputs: masked_softmax(*(t.to("meta") for t in inputs))),
    "compile": torch.compile(masked_softmax, fullgraph=True, dynamic=False),
}
FAULTS = {
    "shape": (torch.ones(2, 3), torch.ones(3).bool(), "(mask|grad) to be"),
    "dtype": (torch.ones(2, 3), torch.ones(2, 3).int(), "(mask|grad) to be"),
    "integers": (torch.ones(2, 3).int(), torch.ones(2, 3).bool(), "scores to be float"),
    "scalar": (torch.ones(()), torch.ones(()).bool(), "at least one dimension"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_path_refuses_what_does_not_fit(path, fault):
    scores, mask, expected = FAULTS[fault]
    sentence = rf"my_ops::masked_softmax.*: expected {expected}"
    with pytest.raises(Exception, match=sentence) as raised:
        PATHS[path](scores, mask)
    assert "csrc" not in str(raised.value)  # a path of whoever compiled it
