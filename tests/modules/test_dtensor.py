"""Many processes compute what one computes: the operators and the layer on DTensor, by gloo."""

import copy
import functools
import inspect
import itertools
import sys

import pytest
import torch
import torch.distributed as dist
from common import (
    CELL,
    SEQUENCE_KINDS,
    Operator,
    environment,
    gradients,
    printed,
)
from ranks import Ranks
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
import lltm_ops.dtensor

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_results_that_are_none = pytest.mark.skipif(
    TORCH < (2, 13), reason="DTensor refuses operators of which a result is None"
)
# The batch of each argument, where it has one.
BATCH = {"input": 0, "old_h": 0, "old_cell": 0}
SEQUENCE_BATCH = {"input": 1, "h0": 0, "c0": 0, "resets": 1}


# Those of so many processes run one after the other, and so these begin once.
NUMBERS = [
    pytest.param(number, marks=pytest.mark.xdist_group(f"{number} processes")) for number in (2, 4)
]


@pytest.fixture(scope="module", params=NUMBERS, ids="{} processes".format)
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.kill()


def on_each_rank(check):
    """A test that each process of a group runs, with the same arguments."""

    @functools.wraps(check)
    def test(ranks, **arguments):
        ranks.run(__file__, check.__name__, arguments)

    signature = inspect.signature(check)
    of_group = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = signature.replace(parameters=[of_group, *signature.parameters.values()])
    return test


def mesh(*shape):
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def everywhere(placement):
    return lambda name: [placement]


def plain_and_distributed(operator, placements_of, on=None, batch=6):
    """Arguments in float64, and copies in which each tensor is a DTensor."""
    plain = operator.inputs("cpu", torch.float64, (7, batch, 5, 4), requires_grad=True)
    ours = [
        distribute_tensor(value.detach(), on or mesh(), placements_of(name)).requires_grad_(
            value.requires_grad
        )
        if isinstance(value, torch.Tensor)
        else value
        for name, value in zip(operator.arguments, plain, strict=True)
    ]
    return plain, ours


def assert_whole(actual, expected):
    for ours, whole in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), whole)


def check(operator, placements_of, **options):
    """Values and gradients are those of plain tensors. Returns the gradients."""
    plain, ours = plain_and_distributed(operator, placements_of, **options)
    for op in (operator.forward, operator.forward_with_gates):
        with torch.no_grad():
            assert_whole(op(*ours), op(*plain))

    def gathered(*inputs):
        """The loss of the tests weighs each element of the whole."""
        return tuple(result.full_tensor() for result in operator.forward(*inputs))

    found = gradients(gathered, ours)
    assert_whole(found, gradients(operator.forward, plain))
    return found


@on_each_rank
@pytest.mark.parametrize(
    "operator",
    [CELL, *(Operator(kind) for kind in SEQUENCE_KINDS if kind[0] == "padded")],
    ids=str,
)
def test_sharded_batch(operator):
    """Results and gradients lie where their batch lies."""
    batch_of = BATCH if operator == CELL else SEQUENCE_BATCH

    def placements_of(name):
        return [Shard(batch_of[name]) if name in batch_of else Replicate()]

    _, ours = plain_and_distributed(operator, placements_of)
    with torch.no_grad():
        for result in (*operator.forward(*ours), *operator.forward_with_gates(*ours)):
            assert result.placements == (Shard(result.dim() - 2),)
    found = check(operator, placements_of)
    for name, gradient in zip(operator.arguments, found, strict=False):
        summed = name in ("weights", "bias")
        assert gradient.placements == ((Partial(),) if summed else tuple(placements_of(name)))


@on_each_rank
@pytest.mark.parametrize(
    ("operator", "placements"),
    [
        (CELL, {}),
        (CELL, {"input": Shard(0)}),
        (CELL, {"input": Shard(1), "weights": Shard(0)}),
        (CELL, {"weights": Shard(1), "bias": Shard(0), "old_h": Shard(1), "old_cell": Shard(0)}),
        *itertools.product(
            map(Operator, SEQUENCE_KINDS),
            (
                {"input": Shard(0), "h0": Shard(0)},
                {"input": Shard(1), "weights": Shard(0), "c0": Shard(1)},
            ),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [6, 1])
def test_any_placement(operator, placements, batch):
    check(operator, lambda name: [placements.get(name, Replicate())], batch=batch)


@on_each_rank
@pytest.mark.parametrize("with_gradients", [False, True])
def test_packed_sequence_is_replicated(with_gradients):
    operator = Operator(("packed", False, True))
    _, ours = plain_and_distributed(operator, everywhere(Shard(0)))
    with torch.set_grad_enabled(with_gradients):
        results = lltm_ops.sequence_forward(*ours)
    assert all(result.placements == (Replicate(),) for result in results)
    check(operator, everywhere(Shard(0)))


@on_each_rank
def test_steps_are_not_divided():
    _, ours = plain_and_distributed(Operator(("padded", False, False)), everywhere(Replicate()))
    ours[0] = ours[0].redistribute(placements=[Shard(0)])
    assert ours[0].placements == (Shard(0),) != lltm_ops.sequence_forward(*ours)[0].placements


@on_each_rank
def test_plain_batch_sizes_are_refused():
    operator = Operator(("packed", False, False))
    plain, ours = plain_and_distributed(operator, everywhere(Replicate()))
    at = operator.arguments.index("batch_sizes")
    ours[at] = plain[at]
    with pytest.raises(RuntimeError, match=r"sequence_forward.*mixed torch.Tensor and DTensor"):
        lltm_ops.sequence_forward(*ours)


@on_each_rank
def test_partial_input_is_summed_first():
    """The operators are not linear."""
    plain, ours = plain_and_distributed(CELL, everywhere(Replicate()))
    part = plain[0].detach() * (dist.get_rank() + 1)
    ours[0] = DTensor.from_local(part, mesh(), [Partial()])
    total = sum(range(1, dist.get_world_size() + 1))
    assert_whole(lltm_ops.forward(*ours), lltm_ops.forward(plain[0] * total, *plain[1:]))


@on_each_rank
@needs_results_that_are_none
def test_every_output_mask():
    """In turn: DTensor remembers what it found for these tensors, which differs by mask."""
    tensors = CELL.backward_inputs("cpu", torch.float64, (1, 6, 5, 4))
    on = mesh()
    ours = [
        distribute_tensor(tensor, on, [Replicate() if name == "weights" else Shard(0)])
        for name, tensor in zip(CELL.backward_arguments, tensors[:7], strict=False)
    ]
    ours += tensors[7:]
    for mask in itertools.product((True, False), repeat=5):
        expected, actual = lltm_ops.backward(*tensors, mask), lltm_ops.backward(*ours, mask)
        assert [gradient is not None for gradient in actual] == list(mask)
        assert_whole(*([g for g in all_five if g is not None] for all_five in (actual, expected)))


@on_each_rank
def test_output_that_nobody_uses():
    """Only the cell state is used: the gradient of the other is a DTensor of zeros."""
    plain, ours = plain_and_distributed(CELL, everywhere(Shard(0)))
    for arguments in (plain, ours):
        torch.ops.lltm.forward(*arguments)[1].sum().backward()
    assert_whole([t.grad for t in ours[:5]], [t.grad for t in plain[:5]])


@on_each_rank
@needs_results_that_are_none
@pytest.mark.parametrize(
    ("operator", "placement"), [(CELL, Shard(0)), (Operator(("packed", True, True)), Replicate())]
)
def test_second_derivative(operator, placement):
    found = []
    for arguments in plain_and_distributed(operator, everywhere(placement)):
        new_h, *_ = operator.forward(*arguments)
        first = torch.autograd.grad(new_h.sum(), arguments[0], create_graph=True)[0]
        found.append(torch.autograd.grad(first.square().sum(), arguments[1]))
    assert_whole(found[1], found[0])


def check_layer(options, calls_of):
    """LLTM with replicated parameters. calls_of gives arguments, plain and distributed."""
    torch.manual_seed(0)
    plain = lltm_ops.LLTM(5, 6, **options, dtype=torch.float64)
    ours = distribute_module(copy.deepcopy(plain), mesh())
    results = []
    for layer, arguments in zip((plain, ours), calls_of(), strict=True):
        output, state = layer(*arguments)
        output = output.data if isinstance(output, PackedSequence) else output
        (output.sum() + state[0].sum()).backward()
        results.append((output, *state))
    assert_whole(results[1], results[0])
    assert_whole([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
    return results[1][0]


@on_each_rank
@needs_results_that_are_none
@pytest.mark.parametrize(
    "options", [{"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str
)
def test_layer(options):
    def calls():
        input = torch.randn(7, 4, 5, dtype=torch.float64)
        return (input,), (distribute_tensor(input, mesh(), [Shard(1)]),)

    assert check_layer(options, calls).placements == (Shard(1),)


@on_each_rank
@needs_results_that_are_none
@pytest.mark.parametrize(
    "options",
    [{"bidirectional": True, "bias": False}, {"num_layers": 2, "variational_dropout": True}],
    ids=str,
)
def test_layer_of_packed_sequences(options):
    """Their rows may lie anywhere."""

    def calls():
        packed = pack_sequence([torch.randn(n, 5, dtype=torch.float64) for n in (7, 4, 4, 1)])
        resets = torch.rand(16) < 0.3
        data, ours = (distribute_tensor(t, mesh(), [Shard(0)]) for t in (packed.data, resets))
        batch_sizes = distribute_tensor(packed.batch_sizes, mesh(), [Replicate()])
        return (packed, None, resets), (PackedSequence(data, batch_sizes), None, ours)

    check_layer(options, calls)


@on_each_rank
def test_mesh_of_two_dimensions():
    """Batch on the first; weights lie sharded on the second, and are gathered."""

    def placements_of(name):
        if name in SEQUENCE_BATCH:
            return [Shard(SEQUENCE_BATCH[name]), Replicate()]
        return [Replicate(), Shard(0)]

    operator = Operator(("padded", True, True))
    check(operator, placements_of, on=mesh(dist.get_world_size() // 2, 2))


def test_dtensor_may_be_imported_again():
    code = """
import importlib, sys, lltm_ops.dtensor
importlib.reload(lltm_ops.dtensor)
for name in [name for name in sys.modules if name.startswith("lltm_ops")]:
    del sys.modules[name]
import lltm_ops.dtensor"""
    printed(sys.executable, "-c", code, env=environment(), timeout=300)
