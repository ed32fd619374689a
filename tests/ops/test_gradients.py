"""The gradients of both operators: right, of any order, and no more of them than needed."""

import functools
import itertools
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from common import (
    ARGUMENTS,
    CELL,
    PADDED,
    SEQUENCE_ARGUMENTS,
    Operator,
    backward_inputs,
    composite,
    double,
    each_device,
    each_dtype,
    each_operator,
    exact_gradients,
    gradients,
    message,
    sample_inputs,
    with_options,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lltm_ops

SMALL = (3, 2, 2, 3)


@each_device
@each_dtype
@pytest.mark.parametrize("operator", [CELL, PADDED, Operator(("packed", True, True))], ids=str)
@pytest.mark.parametrize("zero", range(16))
def test_each_output_mask_for_sizes_of_zero(device, dtype, operator, zero):
    """None, too. Tests poison fresh memory, so what is not written shows."""
    sizes = tuple(0 if zero >> i & 1 else size for i, size in enumerate((2, 70, 3, 5)))
    op, inputs = operator.backward, operator.backward_inputs(device, dtype, sizes)
    everything = op(*inputs, [True] * 5)
    exact = exact_gradients(operator, device, dtype, sizes)
    operator.assert_match(everything, exact, dtype, rows=sizes[1])
    for mask in itertools.product([False, True], repeat=5):
        for ours, whole, wanted in zip(op(*inputs, mask), everything, mask, strict=True):
            assert torch.equal(ours, whole) if wanted else ours is None


@each_device
@each_operator
def test_gradcheck(device, operator):
    inputs = operator.inputs(device, torch.float64, SMALL, requires_grad=True)
    assert torch.autograd.gradcheck(
        with_options(operator.forward, inputs),
        inputs[:5],
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@each_device
@each_operator
def test_gradgradcheck(device, operator):
    inputs = operator.inputs(device, torch.float64, SMALL, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        with_options(operator.forward, inputs),
        inputs[:5],
        check_batched_grad=True,
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
    )


@each_device
@each_operator
def test_what_has_no_derivative_says_so(device, operator):
    """No result is silently a constant."""
    for op, sample in (
        (operator.forward_with_gates, operator.inputs),
        (operator.backward, operator.backward_inputs),
    ):
        inputs = sample(device, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"derivative for lltm::.* is not implemented"):
            op(*inputs)[0].sum().backward()
        mask = [[True] * 5] * ("backward" in op.__name__)
        words = message(composite(op), [*inputs, *mask])
        assert f"Could not run '{op.default.name()}'" in words


def test_third_derivative():
    inputs = sample_inputs("cpu", torch.float64, (1, 1, 1), requires_grad=True)

    def third(op):
        value = sum(output.sum() for output in op(*inputs))
        for _ in range(3):
            grads = torch.autograd.grad(value, inputs, create_graph=True)
            value = sum(grad.sum() for grad in grads)
        return value

    torch.testing.assert_close(third(lltm_ops.forward), third(lltm_ops.reference))


@each_operator
def test_second_derivative_of_elu_at_zero(operator):
    """Padding makes candidates of exactly zero. Autograd and torch.func agree there."""
    op = operator.forward
    inputs = [torch.zeros_like(tensor) for tensor in operator.inputs(dtype=torch.float64)[:5]]
    options = operator.inputs(dtype=torch.float64)[5:]

    def loss(bias):
        return sum(output.sum() for output in op(*inputs[:2], bias, *inputs[3:], *options))

    ours = torch.autograd.functional.hessian(loss, inputs[2])
    torch.testing.assert_close(ours, torch.func.hessian(loss)(inputs[2]))


@each_device
@each_operator
def test_gradient_of_one_output(device, operator):
    """The loss takes every other row or step, so the rest gets zeros."""
    inputs = operator.inputs(device, torch.float64, requires_grad=True)
    exact = double(inputs)
    for ours, output in zip(operator.forward(*inputs), operator.reference(*exact), strict=True):
        actual = torch.autograd.grad(ours[::2].sum(), inputs[:5], retain_graph=True)
        expected = torch.autograd.grad(
            output[::2].sum(), exact[:5], retain_graph=True, materialize_grads=True
        )
        operator.assert_match(actual, expected, torch.float64)


def operators_called(fn) -> list[str]:
    with torch.profiler.profile() as profile:
        fn()
    return [event.name for event in profile.events()]


class CallsOfBackward(TorchDispatchMode):
    """The arguments that operators are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "lltm" in func.name() and "backward" in func.name():
            self.calls.append(args)
        return func(*args, **(kwargs or {}))

    def masks(self) -> list[tuple[bool, ...]]:
        lasts = (args[-1] for args in self.calls)
        return [tuple(last) if isinstance(last, list) else (True,) * 5 for last in lasts]


@each_device
@pytest.mark.parametrize("operator", [CELL, Operator(("padded", False, True))], ids=str)
@pytest.mark.parametrize("required", list(itertools.product([False, True], repeat=5)))
def test_autograd_asks_only_for_gradients_that_somebody_needs(device, operator, required):
    inputs = operator.inputs(device)
    for tensor, flag in zip(inputs, required, strict=False):
        tensor.requires_grad_(flag)
    loss = sum(output.sum() for output in operator.forward(*inputs))
    assert loss.requires_grad == any(required)
    with CallsOfBackward() as recorded:
        if any(required):
            loss.backward()
    assert recorded.masks() == [required] * any(required)
    assert [tensor.grad is not None for tensor in inputs[:5]] == list(required)


@each_device
@each_operator
def test_missing_gradients_are_zeros(device, operator):
    for missing, _ in enumerate(operator.forward(*operator.inputs(device))):
        inputs = operator.backward_inputs(device, torch.float64)
        inputs[missing] = torch.zeros_like(inputs[missing])
        expected = operator.backward(*inputs)
        inputs[missing] = None
        torch.testing.assert_close(operator.backward(*inputs), expected, rtol=0, atol=0)


@each_device
@each_operator
def test_autograd_makes_no_zeros_for_results_that_nobody_used(device, operator):
    first, *others = operator.forward(*operator.inputs(device, requires_grad=True))
    with CallsOfBackward() as recorded:
        first.sum().backward()
    assert recorded.calls[0][1 : 1 + len(others)] == (None,) * len(others)


def memory_allocated(fn) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        fn()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())


@each_dtype
@pytest.mark.parametrize("index", range(5))
def test_gradient_that_nobody_needs_is_not_computed(dtype, index):
    """There is no memory that it could be written to."""
    inputs = backward_inputs(dtype=dtype, shape=(32, 200, 100))
    everything = memory_allocated(lambda: lltm_ops.backward(*inputs))
    mask = [i != index for i in range(5)]
    saved = everything - memory_allocated(lambda: lltm_ops.backward(*inputs, mask))
    assert saved >= lltm_ops.backward(*inputs)[index].nbytes


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("operator", "batches"), [(CELL, range(16, 3000, 8)), (PADDED, range(16, 600, 2))], ids=str
)
def test_batches_of_many_sizes_keep_no_memory(operator, batches):
    """oneDNN keeps a kernel for each size that it is asked for: they have to be few."""

    def run(batch: int) -> None:
        inputs = operator.inputs(shape=(9, batch, 16, 16), requires_grad=True)
        torch.autograd.grad(operator.forward(*inputs)[0].sum(), inputs[:5])

    run(batches.stop)
    before = resident()
    for batch in batches:
        run(batch)
    assert resident() - before < 50e6


def test_a_transform_leaves_nothing_in_the_cache_of_autocast():
    """Weights take 6 MiB in bfloat16, and each call would leave them there."""
    input, weights, *rest = sample_inputs(shape=(2, 512, 1024))

    def loss(weights):
        return lltm_ops.forward(input, weights, *rest)[0].sum()

    with torch.autocast("cpu", torch.bfloat16):
        torch.func.grad(loss)(weights)
        before = resident()
        for _ in range(40):
            torch.func.grad(loss)(weights)
        assert resident() - before < 100e6


def test_inference_calls_no_autograd_and_writes_no_gates():
    inputs = sample_inputs(requires_grad=True)
    with torch.no_grad():
        assert "lltm::_forward_with_gates" not in operators_called(
            lambda: lltm_ops.forward(*inputs)
        )
    with torch.inference_mode():
        assert lltm_ops.forward(*inputs)[0].is_inference()
    assert "lltm::_forward_with_gates" in operators_called(lambda: lltm_ops.forward(*inputs))


@each_operator
def test_saves_the_gates_and_nothing_else_beyond_inputs_and_outputs(operator):
    inputs = operator.inputs(shape=(7, 3, 5, 4), requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = operator.forward(*inputs)
    tensors = [t for t in (*inputs, *outputs) if isinstance(t, torch.Tensor)]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    extra = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in known]
    assert [tuple(tensor.shape) for tensor in extra] == [(*outputs[0].shape[:-1], 3 * 4)]


@pytest.mark.parametrize(
    ("operator", "saved"),
    [
        *itertools.product([CELL], [*ARGUMENTS, "cell state"]),
        *itertools.product([PADDED], [*SEQUENCE_ARGUMENTS[:5], "h", "cell state"]),
    ],
    ids=str,
)
def test_in_place_change_of_a_saved_tensor_is_caught(operator, saved):
    leaves = operator.inputs(requires_grad=True)
    inputs = [leaf * 1 if i < 5 else leaf for i, leaf in enumerate(leaves)]
    outputs = operator.forward(*inputs)
    names = (*operator.arguments, "h", "cell state")
    with torch.no_grad():
        dict(zip(names, (*inputs, *outputs[:2]), strict=True))[saved].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


@each_device
@each_operator
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device, operator, use_reentrant):
    inputs = operator.inputs(device, torch.float64, requires_grad=True)
    copies = [t.detach().clone().requires_grad_() for t in inputs[:5]] + inputs[5:]

    def two_calls(input, *rest):
        h, *_ = operator.forward(input, *rest)
        return operator.forward(input * h.mean(), *rest)

    actual = gradients(
        lambda *args: checkpoint(two_calls, *args, use_reentrant=use_reentrant), inputs
    )
    torch.testing.assert_close(actual, gradients(two_calls, copies))


@each_operator
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_keeps_nothing(operator, use_reentrant):
    """Not even where an exception, raised by a hook on saved tensors, ends the recomputation."""
    computed = []

    class Remember(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            if "_with_gates" in func.__name__:
                computed.extend(map(weakref.ref, results))
            return results

    inputs = operator.inputs(requires_grad=True)
    with Remember():
        checkpoint(operator.forward, *inputs, use_reentrant=use_reentrant)[0].sum().backward()
    assert computed and not any(tensor() is not None for tensor in computed)


@each_operator
def test_selective_checkpointing_saves_the_operator_that_gives_gates(operator):
    """A policy never meets the public operator: below autograd its twin runs in its place."""
    inputs = operator.inputs(requires_grad=True)
    twin = operator.forward_with_gates.default

    def calls_where_a_policy_saves(op):
        contexts = functools.partial(create_selective_checkpoint_contexts, [op])
        with torch.profiler.profile() as profile:
            outputs = checkpoint(
                operator.forward, *inputs, use_reentrant=False, context_fn=contexts
            )
            outputs[0].sum().backward()
        return sum(event.name == twin.name() for event in profile.events())

    assert calls_where_a_policy_saves(twin) < calls_where_a_policy_saves(operator.forward.default)
