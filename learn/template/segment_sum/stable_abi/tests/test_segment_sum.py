import pytest
import torch

from my_ops import segment_sum

ops = torch.ops.my_ops
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
DECAY = 0.5  # not its default, and half types hold it exactly
LENGTHS = torch.tensor([[1, 0, 5], [2, 3, 1]])


def arguments(dtype=torch.float64, lengths=LENGTHS, columns=4):
    rows = int(lengths.sum(-1).max())
    return torch.randn(*lengths.shape[:-1], rows, columns, dtype=dtype, requires_grad=True), lengths


def reference(values, lengths, decay=DECAY):
    """A product with the weights of all rows, which are 0 outside of a segment."""
    ends, row = lengths.cumsum(-1)[..., None], torch.arange(values.shape[-2])
    inside = (ends - lengths[..., None] <= row) & (row < ends)
    powers = decay ** (ends - 1 - row).clamp(min=0).to(values.dtype)
    return torch.where(inside, powers, 0) @ values


def decayed(values, lengths):
    return segment_sum(values, lengths, DECAY)


def loss(result):
    """Small integers, which half types hold exactly, as weights."""
    return (result * (torch.arange(result.numel()) % 4 + 1).view(result.shape)).sum()


def with_gradient(function, values, lengths):
    result = function(values, lengths)
    return result, *torch.autograd.grad(loss(result), values)


def random_lengths(segments, rows):
    return torch.bincount(torch.randint(segments, (rows,)), minlength=segments)


SIZES = [(torch.zeros(0).long(), 3), (torch.zeros(2, 3).long(), 4), (LENGTHS, 0), (LENGTHS, 7)]
SIZES += [(random_lengths(segments, 900), 33) for segments in (1, 200)]


@each_dtype
@pytest.mark.parametrize(("lengths", "columns"), SIZES)
def test_values_and_gradients_are_those_of_float64(dtype, lengths, columns):
    values, lengths = arguments(dtype, lengths, columns)
    exact = with_gradient(reference, values.double(), lengths)
    expected = tuple(tensor.to(dtype) for tensor in exact)
    torch.testing.assert_close(with_gradient(decayed, values, lengths), expected)


def test_any_strides():
    values, lengths = arguments(lengths=LENGTHS.repeat_interleave(2, 1))
    for inputs in ((values.mT.contiguous().mT, lengths), (values[..., ::2], lengths)):
        torch.testing.assert_close(decayed(*inputs), reference(*inputs))
    strided = lengths.T.contiguous().T
    torch.testing.assert_close(decayed(values, strided), reference(values, lengths))


def test_derivatives():
    values, lengths = arguments()
    assert torch.autograd.gradcheck(decayed, (values, lengths), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(decayed, (values, lengths))


def test_compiled_once_it_calls_the_kernels():
    compiled = torch.compile(decayed, fullgraph=True, dynamic=True)
    with_gradient(compiled, *arguments())  # compiles, which calls more
    inputs = arguments(lengths=torch.tensor([[3, 4, 0, 2, 1]] * 3), columns=7)
    with torch.compiler.set_stance("fail_on_recompile"), torch.profiler.profile() as profile:
        actual = with_gradient(compiled, *inputs)
    torch.testing.assert_close(actual, with_gradient(reference, *inputs))
    kernels = {event.name for event in profile.events() if event.name.startswith("my_ops::")}
    assert kernels == {"my_ops::segment_sum_forward", "my_ops::segment_sum_backward"}


def gradient(function):
    return torch.func.grad(lambda *inputs: loss(function(*inputs)))


TRANSFORMS = {
    "gradient": gradient,
    "jvp": torch.func.jacfwd,
    "jvp of gradient": lambda f: torch.func.jacfwd(gradient(lambda *x: f(*x) ** 2)),
    "jvp of jvp": lambda f: torch.func.jacfwd(torch.func.jacfwd(lambda x, n: f(x**3, n))),
    "vmap of values": lambda f: lambda x, lengths: torch.vmap(f, (0, None))(x, lengths[0]),
    "vmap of lengths": lambda f: lambda x, lengths: torch.vmap(f, (None, 0))(x[0], lengths),
    "vmap of columns": lambda f: torch.vmap(lambda x, lengths: f(x[..., None], lengths), (2, None)),
    "vmap of gradient": lambda f: torch.vmap(gradient(f)),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(compiled, transform):
    inputs, transform = [tensor.detach() for tensor in arguments()], TRANSFORMS[transform]
    actual = transform(decayed)
    if compiled:
        actual = torch.compile(actual, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(actual(*inputs), transform(reference)(*inputs), check_stride=False)


def backward(values, lengths):
    """Calls it with a grad that fits if values and lengths do."""
    rows = lengths.shape[-1:] if values.dim() > 1 else ()
    grad = values.new_ones(*values.shape[:-2], *rows, *values.shape[-1:])
    return ops.segment_sum_backward(grad, lengths, DECAY, values.shape[0])


PATHS = {
    "eager": decayed,
    "gradient": lambda x, lengths: decayed(x.requires_grad_(x.is_floating_point()), lengths),
    "inference": torch.inference_mode()(decayed),
    "backward": backward,
    "vmap": lambda values, lengths: torch.vmap(decayed)(values[None], lengths[None]),
    "compile": torch.compile(decayed, fullgraph=True, dynamic=False),
    "meta": lambda values, lengths: decayed(values.to("meta"), lengths.to("meta")),
}
FAULTS = {
    "integers": (torch.ones(4, 2).int(), torch.tensor([1, 3]), "(values|grad) to be float"),
    "dtype": (torch.ones(4, 2), torch.tensor([1, 3]).int(), "lengths to be int64"),
    "dimensions": (torch.ones(4, 2), torch.tensor([[1, 3]]), "lengths to be int64 and like"),
    "vector": (torch.ones(4), torch.tensor([1, 3]), "(values|grad) of at least two dimensions"),
    # What depends on values; without data nobody can know it.
    "sum": (torch.ones(4, 2), torch.tensor([1, 2]), "lengths with a sum of 4, but got 3"),
    "none": (torch.ones(4, 2), torch.zeros(0).long(), "lengths with a sum of 4, but got 0"),
    "negative": (torch.ones(4, 2), torch.tensor([-1, 5]), "lengths from 0 to 4, but got -1"),
    "overflow": (torch.ones(4, 2), torch.tensor([2**63 - 1, 5]), "lengths from 0 to 4, but got 9"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_path_refuses_what_does_not_fit(path, fault):
    if path == "meta" and fault in ("sum", "none", "negative", "overflow"):
        return
    values, lengths, expected = FAULTS[fault]
    with pytest.raises(Exception, match=rf"my_ops::segment_sum.*: expected {expected}") as raised:
        PATHS[path](values.clone(), lengths)
    assert "csrc" not in str(raised.value)  # a path of whoever compiled it


@pytest.mark.parametrize("function", [decayed, torch.vmap(decayed), gradient(decayed)])
def test_each_example_is_checked(function):
    """The first has a row too many and the second too few, so the sum of both is right."""
    with pytest.raises(RuntimeError, match="lengths with a sum of 4, but got 5"):
        function(torch.randn(2, 4, 3), torch.tensor([[1, 4], [2, 1]]))


def test_lengths_must_have_a_row_of_grad_each():
    with pytest.raises(RuntimeError, match="grad to have a row for each segment, but got 3"):
        ops.segment_sum_backward(torch.ones(3, 2), torch.tensor([1, 3]), DECAY, 4)


def calls(dtype=torch.float64):
    values, lengths = arguments(dtype)
    grad = torch.randn(2, 3, 4, dtype=dtype, requires_grad=True)
    return {
        ops.segment_sum_forward.default: (values, lengths, DECAY),
        ops.segment_sum_backward.default: (grad, lengths, DECAY, 6),
    }


each_op = pytest.mark.parametrize("op", calls(), ids=str)


@each_dtype
@each_op
# The operators alone have no gradients: PyTorch warns whoever asks for them.
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
def test_opcheck(dtype, op):
    torch.library.opcheck(op, calls(dtype)[op])


@each_op
def test_vmap_of_the_operators_alone_is_no_loop(op):
    tensor, lengths, *numbers = calls()[op]
    with torch.profiler.profile() as profile:
        actual = torch.vmap(lambda *tensors: op(*tensors, *numbers))(tensor.detach(), lengths)
    torch.testing.assert_close(actual, op(tensor, lengths, *numbers))
    # The call to vmap's rule, and the rule's call to the kernel. A loop makes two of the latter.
    assert sum(event.name == op.name() for event in profile.events()) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled):
    def in_region(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return decayed(*inputs)

    function = torch.compile(in_region, fullgraph=True) if compiled else in_region
    values, lengths = arguments(torch.float32)
    # The loss and its gradient are outside of the region, as in a training loop.
    actual = with_gradient(function, values, lengths)
    expected = with_gradient(decayed, values.bfloat16(), lengths)
    torch.testing.assert_close(actual, expected, check_dtype=False)
    assert (actual[0].dtype, actual[1].dtype) == (torch.bfloat16, torch.float32)
