"""torch.func and forward-mode AD: every number, against the plain-PyTorch cell."""

import itertools

import pytest
import torch
from common import (
    CELL,
    OPERATORS,
    PADDED,
    SEQUENCE_ARGUMENTS,
    TOLERANCES,
    double,
    each_device,
    each_operator,
    sample_inputs,
    sequence_inputs,
    sequence_reference,
    with_options,
)
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_leaves

import lltm_ops

SMALL = (3, 2, 2, 3)  # of the cell, without the time
assert_close = torch.testing.assert_close


def loss_of(op):
    def loss(*args):
        h, *others = op(*args)
        return (h * h).sum() + sum(other.sin().sum() for other in others)

    return loss


ALL = tuple(range(5))


TRANSFORMS = pytest.mark.parametrize(
    "transform",
    [
        lambda op: grad(loss_of(op), argnums=ALL),
        lambda op: jacrev(op, argnums=ALL),
        lambda op: jacfwd(op, argnums=ALL),
        lambda op: hessian(loss_of(op), argnums=(0, 2, 4)),
        lambda op: jacfwd(jacrev(loss_of(op), argnums=1), argnums=1),
        lambda op: jacrev(jacrev(loss_of(op), argnums=3), argnums=1),
        lambda op: grad(lambda *a: grad(loss_of(op), argnums=1)(*a).square().sum(), argnums=ALL),
        lambda op: lambda *args: vjp(op, *args)[1](op(*args)),
        lambda op: lambda *args: jvp(op, args, tuple(a.cos() for a in args)),
        lambda op: lambda *args: jvp(grad(loss_of(op)), args, tuple(a.cos() for a in args)),
        lambda op: vmap_of_grad(op),
    ],
    ids=[
        "grad", "jacrev", "jacfwd", "hessian", "jacfwd of jacrev", "jacrev of jacrev",
        "grad of grad", "vjp", "jvp", "jvp of grad", "vmap of grad",
    ],
)  # fmt: skip


@each_device
@each_operator
@TRANSFORMS
def test_transform(device, operator, transform):
    inputs = operator.inputs(device, torch.float64, SMALL)
    assert_close(
        transform(with_options(operator.forward, inputs))(*inputs[:5]),
        transform(with_options(operator.reference, inputs))(*inputs[:5]),
    )


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@each_operator
def test_linearize(operator):
    """The linear map of a gradient is a product with the Hessian."""
    inputs = operator.inputs(dtype=torch.float64, shape=SMALL)
    arguments = tuple(inputs[:5])
    op = with_options(operator.forward, inputs)
    for function in (op, grad(loss_of(op), argnums=ALL)):
        tangents = tuple(a.cos() for a in arguments)
        results, linear = linearize(function, *arguments)
        assert_close((results, linear(*tangents)), jvp(function, arguments, tangents))


@pytest.mark.parametrize("operator", [CELL, PADDED], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [False, True], ids=["around the transform", "inside of it"])
@TRANSFORMS
def test_transform_under_autocast(operator, dtype, inside, transform):
    """Autocast rounds arguments and results, so the tolerance is that of some roundings."""
    inputs = operator.inputs(shape=SMALL)
    in_float64 = double(inputs)
    forward = with_options(operator.forward, inputs)
    autocast = torch.autocast("cpu", dtype)
    if inside:
        actual = transform(autocast(forward))(*inputs[:5])
    else:
        with autocast:
            actual = transform(forward)(*inputs[:5])
    exact = transform(with_options(operator.reference, in_float64))(*in_float64[:5])
    for ours, expected in zip(tree_leaves(actual), tree_leaves(exact), strict=True):
        assert ours.dtype in (dtype, torch.float32)
        error = (ours.double() - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert error < 4 * TOLERANCES[dtype]["rtol"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forward_mode_ad_under_autocast(dtype):
    """Nothing but the results is rounded to dtype."""
    inputs = tuple(tensor.to(dtype).float() for tensor in sample_inputs(shape=(4, 16, 24)))
    tangents = tuple(torch.ones_like(tensor) for tensor in inputs)
    with torch.autocast("cpu", dtype):
        results = jvp(lltm_ops.forward, inputs, tangents)
    exact = jvp(lltm_ops.reference, tuple(double(inputs)), tuple(double(tangents)))
    eps = torch.finfo(dtype).eps
    for ours, expected in zip(tree_leaves(results), tree_leaves(exact), strict=True):
        assert_close(ours, expected.to(dtype), rtol=eps, atol=1e-3 * eps)


def vmap_of_grad(op):
    """Over copies of all arguments, each scaled by another factor."""
    factors = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)

    def of_scaled(factor, *args):
        return grad(loss_of(op), argnums=ALL)(*(arg * factor for arg in args))

    return lambda *args: vmap(of_scaled, (0,) + (None,) * 5)(factors.to(args[0].device), *args)


DIMS = {
    CELL: [
        *itertools.product([None, 0], repeat=5),
        (1, None, None, 0, 2),
        (2, 1, None, 1, 0),
        (-1, 2, 1, -1, 0),
    ][1:],
    PADDED: [
        (0, None, None, None, None),
        (2, None, None, 1, None),
        (None, None, None, 0, 0),
        (1, None, None, 0, 2),
        (0, 0, None, None, None),
        (None, None, 1, None, None),
        (0, 0, 0, 0, 0),
    ],
}


@each_device
@pytest.mark.parametrize(
    ("operator", "in_dims"),
    [(operator, dims) for operator in OPERATORS for dims in DIMS.get(operator, DIMS[PADDED])],
    ids=str,
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_vmap_over_any_dimension(device, operator, in_dims, requires_grad):
    options = operator.inputs(device, torch.float64, SMALL)
    if options[0].dim() == 2 and operator is not CELL and in_dims[0] == 2:
        in_dims = (1, *in_dims[1:])
    inputs = mapped_inputs(options[:5], in_dims, 4)
    inputs = [tensor.detach().requires_grad_(requires_grad) for tensor in inputs]
    actual = vmap(with_options(operator.forward, options), in_dims, out_dims=1)(*inputs)
    expected = loop(with_options(operator.reference, options), inputs, in_dims, 4)
    assert_close(actual, [result.movedim(0, 1) for result in expected])
    if requires_grad:
        assert_close(
            torch.autograd.grad(sum(a.sin().sum() for a in actual), inputs),
            torch.autograd.grad(sum(e.sin().sum() for e in expected), inputs),
        )


@pytest.mark.parametrize("mapped", ["padded", "packed"])
def test_vmap_over_resets(mapped):
    inputs = sequence_inputs("cpu", torch.float64, kind=(mapped, False, True))
    at = SEQUENCE_ARGUMENTS.index("resets")
    before, resets, after = inputs[:at], inputs[at], inputs[at + 1 :]
    resets = torch.stack([resets, ~resets, resets.roll(1, 0)])
    actual = vmap(lambda r: PADDED.forward(*before, r, *after))(resets)
    for index in range(3):
        expected = sequence_reference(*before, resets[index], *after)
        assert_close([a[index] for a in actual], expected)


def test_vmap_over_batch_sizes_is_refused():
    inputs = sequence_inputs(kind=("packed", False, False))
    inputs[5] = torch.stack([inputs[5]] * 2)
    dims = tuple(0 if name == "batch_sizes" else None for name in SEQUENCE_ARGUMENTS)
    with pytest.raises(RuntimeError, match="lltm::sequence_forward: expected batch_sizes to be"):
        vmap(PADDED.forward, dims)(*inputs)


@pytest.mark.parametrize("operator", [CELL, PADDED], ids=str)
def test_vmap_calls_one_operator_where_the_weights_are_shared(operator):
    in_dims = (0, None, None, 0, 0)
    inputs = mapped_inputs(operator.inputs()[:5], in_dims, 4)
    with torch.profiler.profile() as profile:
        vmap(operator.forward, in_dims)(*inputs)
    names = [event.name for event in profile.events()]
    assert names.count(operator.forward.default.name()) >= 1
    assert "aten::sigmoid" not in names


def mapped_inputs(inputs, in_dims, size):
    """inputs with a new dimension of that size where in_dims says, each slice different."""
    factors = torch.linspace(0.5, 1.5, size, dtype=torch.float64)

    def add(tensor, dim):
        if dim is None:
            return tensor
        return torch.stack([tensor * factor for factor in factors.to(tensor.device)], dim)

    return [add(tensor, dim) for tensor, dim in zip(inputs, in_dims, strict=True)]


def loop(op, inputs, in_dims, size):
    """What vmap means."""
    results = []
    for index in range(size):
        slices = (
            tensor if dim is None else tensor.select(dim, index)
            for tensor, dim in zip(inputs, in_dims, strict=True)
        )
        results.append(op(*slices))
    return tuple(torch.stack(column) for column in zip(*results, strict=True))


@pytest.mark.parametrize("inner", [(0, None, None, 0, 0), (None, 0, None, None, None)])
@pytest.mark.parametrize("outer", [(0, None, None, 0, 0), (None, 0, 0, None, None)])
def test_vmap_of_vmap(inner, outer):
    base = sample_inputs("cpu", torch.float64, SMALL[1:])
    inputs = mapped_inputs(mapped_inputs(base, inner, 2), outer, 3)
    nested = vmap(vmap(lltm_ops.forward, inner), outer)(*inputs)
    expected = loop(lambda *a: loop(lltm_ops.reference, a, inner, 2), inputs, outer, 3)
    assert_close(nested, expected)


def test_per_sample_gradients_of_a_module():
    cell = lltm_ops.LLTMCell(3, 4, dtype=torch.float64)
    parameters = dict(cell.named_parameters())
    inputs = torch.randn(6, 3, dtype=torch.float64)

    def loss(parameters, input):
        new_h, new_cell = functional_call(cell, parameters, (input.unsqueeze(0),))
        return new_h.sum() + new_cell.square().sum()

    per_sample = vmap(grad(loss), (None, 0))(parameters, inputs)
    for index in range(6):
        expected = torch.autograd.grad(loss(parameters, inputs[index]), list(cell.parameters()))
        assert_close([value[index] for value in per_sample.values()], expected)


@pytest.mark.parametrize("kind", [lltm_ops.LLTMCell, lltm_ops.LLTM])
def test_ensemble_of_modules(kind):
    modules = [kind(3, 4, dtype=torch.float64) for _ in range(5)]
    parameters, buffers = torch.func.stack_module_state(modules)
    input = torch.randn(2, 3, dtype=torch.float64)
    outputs, _ = vmap(lambda p, b: functional_call(modules[0], (p, b), (input,)))(
        parameters, buffers
    )
    for module, output in zip(modules, outputs, strict=True):
        assert_close(output, module(input)[0])


@pytest.mark.parametrize("op", [lltm_ops.forward, lltm_ops.sequence_forward])
@pytest.mark.parametrize(
    "in_dims", [(0, 0, None, None, None), (None, 0, None, None, None), (0,) * 5]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vmap_under_autocast(dtype, in_dims, op):
    inputs = sample_inputs(shape=(4, 16, 24))
    if op is lltm_ops.sequence_forward:
        inputs = (inputs[0].expand(1, 4, 16), *inputs[1:])
    inputs = mapped_inputs(inputs, in_dims, 3)
    inputs[0] = inputs[0].to(dtype)  # as a layer before it returned it
    with torch.autocast("cpu", dtype):
        mapped = vmap(op, in_dims)(*inputs)
        expected = loop(op, inputs, in_dims, 3)
    assert all(result.dtype == dtype for result in mapped)
    assert_close(mapped, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("out_dim", [0, 1])
@pytest.mark.parametrize("mapped", [0, 1, 3], ids=["input", "weights", "h"])
@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize(
    ("operator", "shape"),
    [(PADDED, (0, 3, 5, 4)), (PADDED, (2, 0, 5, 4)), (CELL, (1, 0, 5, 4)), (CELL, (1, 3, 0, 4))],
    ids=str,
)
def test_vmap_of_sizes_of_zero(operator, shape, size, mapped, out_dim):
    inputs = operator.inputs(shape=shape)[:5]
    once = operator.forward(*inputs)
    inputs[mapped] = inputs[mapped].expand(size, *inputs[mapped].shape)
    in_dims = tuple(0 if i == mapped else None for i in range(5))
    results = vmap(operator.forward, in_dims, out_dims=out_dim)(*inputs)
    for result, one in zip(results, once, strict=True):
        assert result.shape == one.unsqueeze(out_dim).expand_as(result).shape
        assert result.shape[out_dim] == size
