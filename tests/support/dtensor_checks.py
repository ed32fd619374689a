"""What each process of a group asserts about the operators on DTensors."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from common import (
    ARGUMENTS,
    BACKWARD_ARGUMENTS,
    SEQUENCE_ARGUMENTS,
    backward_inputs,
    gradients,
    sample_inputs,
    sequence_inputs,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm_ops

# The batch of each argument, where it has one.
BATCH = {"input": 0, "old_h": 0, "old_cell": 0}
SEQUENCE_BATCH = {"input": 1, "h0": 0, "c0": 0, "resets": 1}
GATES = {"forward": "_forward_with_gates", "sequence_forward": "_sequence_forward_with_gates"}


def mesh(*shape):
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def distributed(arguments, names, placement_of, on):
    """A copy of the arguments in which each tensor is a DTensor."""
    return [
        distribute_tensor(value.detach(), on, placement_of(name)).requires_grad_(
            value.requires_grad
        )
        if isinstance(value, torch.Tensor)
        else value
        for name, value in zip(names, arguments, strict=True)
    ]


def arguments_of(name, kind, batch=6):
    """Arguments of an operator in float64, their names, and where their batch is."""
    if name == "forward":
        inputs = sample_inputs(dtype=torch.float64, shape=(batch, 5, 4), requires_grad=True)
        return inputs, ARGUMENTS, BATCH
    shape = (7, batch, 5, 4)
    inputs = sequence_inputs(dtype=torch.float64, shape=shape, kind=kind, requires_grad=True)
    return inputs, SEQUENCE_ARGUMENTS, SEQUENCE_BATCH


def sharded_batch(name, kind):
    """Results and gradients are those of plain tensors, and lie where their batch lies."""
    plain, names, batch_of = arguments_of(name, kind)
    on = mesh()

    def placement_of(argument):
        return [Shard(batch_of[argument]) if argument in batch_of else Replicate()]

    ours = distributed(plain, names, placement_of, on)
    op = getattr(torch.ops.lltm, name)
    for with_gates in (op, getattr(torch.ops.lltm, GATES[name])):
        with torch.no_grad():
            expected, actual = with_gates(*plain), with_gates(*ours)
        for result, whole in zip(actual, expected, strict=True):
            assert result.placements == (Shard(batch_of["input"]),)
            torch.testing.assert_close(result.full_tensor(), whole)
    expected, actual = gradients(op, plain), gradients(op_of_replicated_loss(op), ours)
    floating = [name for name, value in zip(names, plain, strict=True) if is_differentiable(value)]
    for argument, gradient, whole in zip(floating, actual, expected, strict=True):
        summed = argument in ("weights", "bias")
        assert gradient.placements == ((Partial(),) if summed else tuple(placement_of(argument)))
        torch.testing.assert_close(gradient.full_tensor(), whole)


def op_of_replicated_loss(op):
    """Gathers the results: the loss of the tests weighs each element of the whole."""
    return lambda *inputs: tuple(result.full_tensor() for result in op(*inputs))


def is_differentiable(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def any_placement(name, kind, batch, placements):
    """Whatever the placements, values and gradients are those of plain tensors."""
    plain, names, _ = arguments_of(name, kind, batch)
    on = mesh()
    ours = distributed(plain, names, lambda name: [placements.get(name, Replicate())], on)
    op = getattr(torch.ops.lltm, name)
    for actual, expected in zip(op(*ours), op(*plain), strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected)
    expected, actual = gradients(op, plain), gradients(op_of_replicated_loss(op), ours)
    for gradient, whole in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient.full_tensor(), whole)


def parts_of_a_sum():
    """An input that is Partial is summed first: the operators are not linear."""
    plain, _, _ = arguments_of("forward", None)
    on = mesh()
    ours = [distribute_tensor(value.detach(), on, [Replicate()]) for value in plain]
    part = plain[0].detach() * (dist.get_rank() + 1)
    ours[0] = DTensor.from_local(part, on, [Partial()])
    total = sum(range(1, dist.get_world_size() + 1))
    expected = torch.ops.lltm.forward(plain[0] * total, *plain[1:])
    for actual, whole in zip(torch.ops.lltm.forward(*ours), expected, strict=True):
        torch.testing.assert_close(actual.full_tensor(), whole)


def packed_is_replicated(with_gradients):
    plain, names, _ = arguments_of("sequence_forward", ("packed", False, True))
    ours = distributed(plain, names, lambda name: [Shard(0)], mesh())
    if not with_gradients:
        plain, ours = (
            [v.detach() if is_differentiable(v) else v for v in a] for a in (plain, ours)
        )
    for actual, expected in zip(
        lltm_ops.sequence_forward(*ours), lltm_ops.sequence_forward(*plain), strict=True
    ):
        assert actual.placements == (Replicate(),)
        torch.testing.assert_close(actual.full_tensor(), expected)


def plain_batch_sizes_are_refused():
    plain, names, _ = arguments_of("sequence_forward", ("packed", False, False))
    ours = distributed(plain, names, lambda name: [Replicate()], mesh())
    ours[names.index("batch_sizes")] = plain[names.index("batch_sizes")]
    with pytest.raises(RuntimeError, match=r"sequence_forward.*mixed torch.Tensor and DTensor"):
        lltm_ops.sequence_forward(*ours)


def every_output_mask():
    """In turn: DTensor remembers what it found for these tensors, which differs by mask."""
    tensors = backward_inputs(dtype=torch.float64, shape=(6, 5, 4))
    on = mesh()
    ours = [
        distribute_tensor(tensor, on, [Replicate() if name == "weights" else Shard(0)])
        for name, tensor in zip(BACKWARD_ARGUMENTS, tensors, strict=True)
    ]
    for mask in itertools.product((True, False), repeat=5):
        expected, actual = lltm_ops.backward(*tensors, mask), lltm_ops.backward(*ours, mask)
        for gradient, whole, wanted in zip(actual, expected, mask, strict=True):
            assert (gradient is not None) == wanted
            if wanted:
                torch.testing.assert_close(gradient.full_tensor(), whole)


def unused_output():
    """Only the cell state is used: the gradient of the other is a DTensor of zeros."""
    plain, names, _ = arguments_of("forward", None)
    ours = distributed(plain, names, lambda name: [Shard(0)], mesh())
    for arguments in (plain, ours):
        torch.ops.lltm.forward(*arguments)[1].sum().backward()
    for actual, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), expected.grad)


def second_derivative():
    plain, names, _ = arguments_of("forward", None)
    ours = distributed(plain, names, lambda name: [Shard(0)], mesh())
    found = []
    for arguments in (plain, ours):
        new_h, _ = torch.ops.lltm.forward(*arguments)
        first = torch.autograd.grad(new_h.sum(), arguments[0], create_graph=True)[0]
        found.append(torch.autograd.grad(first.square().sum(), arguments[1])[0])
    torch.testing.assert_close(found[1].full_tensor(), found[0])


def layer(options):
    """LLTM with replicated parameters, on an input whose batch is sharded."""
    torch.manual_seed(0)
    plain = lltm_ops.LLTM(5, 6, **options, dtype=torch.float64)
    ours = distribute_module(copy.deepcopy(plain), mesh())
    input = torch.randn(7, 4, 5, dtype=torch.float64)
    expected, (h_n, c_n) = plain(input)
    actual, state = ours(distribute_tensor(input, mesh(), [Shard(1)]))
    assert actual.placements == (Shard(1),)
    for result, whole in zip((actual, *state), (expected, h_n, c_n), strict=True):
        torch.testing.assert_close(result.full_tensor(), whole)
    expected.sum().backward()
    actual.sum().backward()
    for parameter, whole in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad)


def layer_of_packed(options):
    """Rows of packed sequences may lie anywhere; their results are replicated."""
    torch.manual_seed(0)
    plain = lltm_ops.LLTM(5, 6, **options, dtype=torch.float64)
    ours = distribute_module(copy.deepcopy(plain), mesh())
    packed = pack_sequence([torch.randn(n, 5, dtype=torch.float64) for n in (7, 4, 4, 1)])
    resets = torch.rand(16) < 0.3
    data, resets_of_data = (distribute_tensor(t, mesh(), [Shard(0)]) for t in (packed.data, resets))
    batch_sizes = distribute_tensor(packed.batch_sizes, mesh(), [Replicate()])
    expected, last = plain(packed, None, resets)
    actual, state = ours(PackedSequence(data, batch_sizes), None, resets_of_data)
    for result, whole in zip((actual.data, *state), (expected.data, *last), strict=True):
        torch.testing.assert_close(result.full_tensor(), whole)
    (expected.data.sum() + last[0].sum()).backward()
    (actual.data.sum() + state[0].sum()).backward()
    for parameter, whole in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad)


def mesh_of_two_dimensions():
    """Batch on the first; weights lie sharded on the second, and are gathered."""
    plain, names, batch_of = arguments_of("sequence_forward", ("padded", True, True))

    def placement_of(name):
        if name in batch_of:
            return [Shard(batch_of[name]), Replicate()]
        return [Replicate(), Shard(0)]

    on = mesh(dist.get_world_size() // 2, 2)
    ours = distributed(plain, names, placement_of, on)
    op = torch.ops.lltm.sequence_forward
    expected, actual = gradients(op, plain), gradients(op_of_replicated_loss(op), ours)
    for gradient, whole in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient.full_tensor(), whole)
