"""Bad arguments of an operator raise one sentence with operator, argument, expectation and finding,
the same words on every path."""

import re

import pytest
import torch
from common import (
    SEQUENCE_ARGUMENTS,
    backward_inputs,
    cell_inputs,
    composite,
    message,
    names_of,
    needs_torchscript,
    sequence_backward_inputs,
    sequence_inputs,
)
from expecttest import assert_expected_inline

import lltm_ops

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")


def replace(name, change):
    def bad(arguments):
        arguments[name] = change(arguments[name])

    return bad


def retype(name, dtype):
    return replace(name, lambda t: t.to(dtype))


def reshape(name, *size):
    return replace(name, lambda t: t.new_zeros(size))


def nested(tensor):
    return torch.nested.as_nested_tensor(list(tensor), layout=torch.strided)


# batch 3, input_features 5, state_size 4.
FORWARD_CASES = {
    "input of rank 1": reshape("input", 5),
    "input too wide": reshape("input", 3, 6),
    "weights with rows not in three": reshape("weights", 11, 9),
    "weights transposed": replace("weights", lambda t: t.t()),
    "bias of one": reshape("bias", 1),
    "old_h of batch one": reshape("old_h", 1, 4),
    "all of integers": lambda a: a.update({k: v.long() for k, v in a.items()}),
    "all of float8": lambda a: a.update({k: v.to(torch.float8_e4m3fn) for k, v in a.items()}),
    "weights of double": retype("weights", torch.float64),
}
# They trouble the dispatcher, not the checks of shapes; not every path can express them.
SPECIAL_CASES = {
    "input None": replace("input", lambda t: None),
    "weights on another device": replace("weights", lambda t: t.to("meta")),
    "input sparse": replace("input", lambda t: t.to_sparse()),
    "input nested": replace("input", nested),
}


# time 5, batch 3, input_features 5, state_size 4; packed: 12 rows.
def packed(change=lambda a: None):
    def bad(arguments):
        inputs = sequence_inputs(kind=("packed", False, False))
        arguments.update(zip(SEQUENCE_ARGUMENTS, inputs, strict=True))
        change(arguments)

    return bad


def sizes(*values):
    return packed(replace("batch_sizes", lambda t: torch.tensor(values)))


def resets(*size, dtype=torch.bool):
    return lambda arguments: arguments.update(resets=torch.zeros(size, dtype=dtype))


def whose_sum_is_no_int64(arguments):
    """With a state_size of 1, for no tensor may have more elements than that."""
    state = torch.zeros(1, 1).expand(2**62, 1)
    arguments.update(
        input=torch.zeros(0, 5), weights=torch.zeros(3, 6), bias=torch.zeros(3),
        h0=state, c0=state, batch_sizes=torch.tensor([2**62, 2**62]),
    )  # fmt: skip


SEQUENCE_CASES = {
    "input of rank 2": reshape("input", 3, 5),
    "packed input of rank 3": packed(reshape("input", 4, 3, 5)),
    "h0 of another batch": reshape("h0", 2, 4),
    "batch_sizes of rank 2": packed(reshape("batch_sizes", 5, 1)),
    "batch_sizes of int32": packed(retype("batch_sizes", torch.int32)),
    "resets of one step": resets(3),
    "resets of another batch": resets(5, 2),
    "resets of integers": resets(5, 3, dtype=torch.int64),
}
# Faults in the values, which only kernels that compute can see.
SEQUENCE_VALUE_CASES = {
    "batch_sizes that begin with another batch": sizes(4, 3, 2, 1, 1),
    "batch_sizes that increase": sizes(3, 2, 3, 2, 2),
    "negative batch_sizes": sizes(3, 3, 3, 3, -1),
    "batch_sizes of more rows": sizes(3, 3, 3, 3, 3),
    "batch_sizes whose sum is no int64": whose_sum_is_no_int64,
    "more steps than a list holds": lambda a: a.update(
        input=torch.zeros(1, 1, 5).expand(2**60, 1, 5)[:, :0],
        h0=torch.zeros(0, 4),
        c0=torch.zeros(0, 4),
    ),
    "more batch_sizes than a list holds": packed(
        replace("batch_sizes", lambda t: t[:1].expand(2**40))
    ),
}
SEQUENCE_SPECIAL_CASES = {
    "batch_sizes on another device": packed(replace("batch_sizes", lambda t: t.to("meta"))),
    "resets on another device": lambda a: a.update(
        resets=torch.zeros(5, 3, dtype=torch.bool, device="meta")
    ),
    "resets nested": lambda a: a.update(resets=nested(torch.zeros(5, 3, dtype=torch.bool))),
}


CASES = {
    "forward": FORWARD_CASES | SPECIAL_CASES,
    "sequence_forward": SEQUENCE_CASES | SEQUENCE_VALUE_CASES | SEQUENCE_SPECIAL_CASES,
}
SAMPLES = {
    "forward": cell_inputs,
    "backward": backward_inputs,
    "sequence_forward": sequence_inputs,
    "sequence_backward": sequence_backward_inputs,
}


def arguments_of(name, case):
    """Those of an operator, with one fault."""
    arguments = dict(zip(names_of(name), SAMPLES[name](), strict=True))
    CASES[name][case](arguments)
    return list(arguments.values())


def catalogue(name) -> str:
    op = getattr(torch.ops.lltm, name)
    return "\n".join(f"{case}: {message(op, arguments_of(name, case))}" for case in CASES[name])


def test_messages_of_forward():
    assert_expected_inline(
        catalogue("forward"),
        """\
input of rank 1: lltm::forward: expected input to have shape [batch, input_features], but got [5]
input too wide: lltm::forward: expected weights to have shape [3 * state_size, state_size + input_features] = [12, 10], but got [12, 9]
weights with rows not in three: lltm::forward: expected weights to have shape [3 * state_size, state_size + input_features] = [9, 8], but got [11, 9]
weights transposed: lltm::forward: expected weights to have shape [3 * state_size, state_size + input_features] = [9, 8], but got [9, 12]
bias of one: lltm::forward: expected bias to have shape [3 * state_size] = [12], but got [1]
old_h of batch one: lltm::forward: expected old_h to have shape [batch, state_size] = [3, 4], but got [1, 4]
all of integers: lltm::forward: expected input to have dtype Double, Float, BFloat16 or Half, but got Long
all of float8: lltm::forward: expected input to have dtype Double, Float, BFloat16 or Half, but got Float8_e4m3fn
weights of double: lltm::forward: expected weights to have the dtype of input, Float, but got Double
input None: lltm::forward: expected input to be a tensor, but got an undefined tensor or None
weights on another device: lltm::forward: expected weights to be on the device of input, cpu, but got meta
input sparse: lltm::forward: expected input to be a dense tensor, but got layout Sparse
input nested: lltm::forward: expected input to be a dense tensor, but got a nested tensor""",
    )


def test_messages_of_sequence_forward():
    assert_expected_inline(
        catalogue("sequence_forward"),
        """\
input of rank 2: lltm::sequence_forward: expected input to have shape [time, batch, input_features], but got [3, 5]
packed input of rank 3: lltm::sequence_forward: expected input to have shape [sum(batch_sizes), input_features], but got [4, 3, 5]
h0 of another batch: lltm::sequence_forward: expected h0 to have shape [batch, state_size] = [3, 4], but got [2, 4]
batch_sizes of rank 2: lltm::sequence_forward: expected batch_sizes to have shape [time], but got [5, 1]
batch_sizes of int32: lltm::sequence_forward: expected batch_sizes to have dtype Long, but got Int
resets of one step: lltm::sequence_forward: expected resets to have shape [time, batch], but got [3]
resets of another batch: lltm::sequence_forward: expected resets to have shape [time, batch] = [5, 3], but got [5, 2]
resets of integers: lltm::sequence_forward: expected resets to have dtype Bool, but got Long
batch_sizes that begin with another batch: lltm::sequence_forward: expected an initial state for each of the 4 packed sequences, but got 3
batch_sizes that increase: lltm::sequence_forward: expected batch_sizes never to be negative, and never to increase, but got 3 at step 2
negative batch_sizes: lltm::sequence_forward: expected batch_sizes never to be negative, and never to increase, but got -1 at step 4
batch_sizes of more rows: lltm::sequence_forward: expected input to have sum(batch_sizes) = 15 rows, but got 11
batch_sizes whose sum is no int64: lltm::sequence_forward: expected sum(batch_sizes) to be at most 2**63 - 1, but got more
more steps than a list holds: lltm::sequence_forward: expected at most 2147483647 steps, but got 1152921504606846976
more batch_sizes than a list holds: lltm::sequence_forward: expected at most 2147483647 steps, but got 1099511627776
batch_sizes on another device: lltm::sequence_forward: expected batch_sizes to be on the CPU, but got meta
resets on another device: lltm::sequence_forward: expected resets to be on the device of input, cpu, but got meta
resets nested: lltm::sequence_forward: expected resets to be a dense tensor, but got a nested tensor""",
    )


def with_gates(name):
    return getattr(torch.ops.lltm, f"_{name}_with_gates")


def on_tensors(name, change):
    """Calls the operator with its tensors changed."""

    def call(*arguments):
        tensors = (change(a) if isinstance(a, torch.Tensor) else a for a in arguments)
        return getattr(torch.ops.lltm, name)(*tensors)

    return call


def with_grad(name):
    return on_tensors(name, lambda t: t.requires_grad_() if t.is_floating_point() else t)


def on_meta(name):
    return on_tensors(name, lambda t: t.to("meta"))


def composite_formulas(name):
    return composite(getattr(torch.ops.lltm, name))


def compiled(name):
    torch._dynamo.reset()
    return torch.compile(getattr(torch.ops.lltm, name), backend="eager", fullgraph=True)


def scripted(name):
    return torch.jit.script(getattr(lltm_ops, name))


def mapped(name):
    op = getattr(torch.ops.lltm, name)
    return lambda *arguments: torch.func.vmap(op, (0, *[None] * (len(arguments) - 1)))(
        arguments[0].unsqueeze(0), *arguments[1:]
    )


def dual(name):
    op = getattr(torch.ops.lltm, name)
    return lambda *arguments: torch.func.jvp(
        lambda h: op(*arguments[:3], h, *arguments[4:]), (arguments[3],), (arguments[3],)
    )


# Compiled, tensors are fake.
EVERY = [with_gates, with_grad, on_meta, composite_formulas, compiled, mapped]
# The paths of each operator that can express the cases.
PATHS = [
    ("forward", FORWARD_CASES, [*EVERY, scripted, dual]),
    ("forward", SPECIAL_CASES, [scripted, compiled]),
    ("sequence_forward", SEQUENCE_CASES, EVERY),
    # They have no values on meta, nor in a graph.
    ("sequence_forward", SEQUENCE_VALUE_CASES, [with_grad, composite_formulas, mapped]),
]
# There are no tangents of integers, and torch.compile itself rejects sparse and nested tensors.
INEXPRESSIBLE = {
    dual: [case for case in FORWARD_CASES if "all of" in case],
    compiled: [case for case in SPECIAL_CASES if "sparse" in case or "nested" in case],
}


@pytest.mark.parametrize(
    ("name", "case", "path"),
    [
        pytest.param(
            name,
            case,
            path,
            id=f"{name}-{case}-{path.__name__}",
            marks=[needs_torchscript] * (path is scripted),
        )
        for name, cases, paths in PATHS
        for case in cases
        for path in paths
        if case not in INEXPRESSIBLE.get(path, [])
    ],
)
def test_every_path_says_the_same_words(name, case, path):
    arguments = arguments_of(name, case)
    expected = message(getattr(torch.ops.lltm, name), arguments)
    assert expected in message(path(name), arguments)


def wrongly(tensor):
    """The tensor in each way in which it does not fit the others; whether it is plain."""
    for size in (
        [n + (i == dim) for i, n in enumerate(tensor.shape)] for dim in range(tensor.dim())
    ):
        yield tensor.new_zeros(size), True
    yield from ((tensor[None], True), (tensor.double(), True), (tensor.long(), True), (None, False))
    yield from ((tensor.to("meta"), False), (tensor.to_sparse(), False))
    yield torch.nested.as_nested_tensor([tensor, tensor]), False


def sample_of(name):
    """By argument. Resets of a sequence, so that something has to fit its time."""
    kind = {"kind": ("padded", False, True)} if "sequence" in name else {}
    return dict(zip(names_of(name), SAMPLES[name](**kind), strict=True))


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name in SAMPLES
        for argument, value in sample_of(name).items()
        if isinstance(value, torch.Tensor) and argument != "resets"
    ],
)
def test_every_argument_is_checked_in_every_way(name, argument):
    arguments = sample_of(name)
    for wrong, plain in wrongly(arguments[argument]):
        if wrong is None and argument.startswith("grad_"):
            continue  # which is right
        arguments[argument] = wrong
        words = message(getattr(torch.ops.lltm, name), arguments.values())
        if "backward" in name and wrong is not None and (wrong.is_sparse or wrong.is_nested):
            assert f"Could not run 'lltm::{name}' with arguments from the '" in words  # PyTorch's
            continue
        (blamed,) = re.findall(rf"^lltm::{name}: expected (\w+) to .*, but got .*$", words)
        assert argument in (blamed, "input")  # which the others have to fit
        paths = [on_meta, *[composite_formulas] * name.endswith("forward")]
        for path in paths if plain else ():
            assert words in message(path(name), arguments.values())


@pytest.mark.parametrize(
    ("name", "case"),
    [("forward", case) for case in FORWARD_CASES]
    + [("sequence_forward", case) for case in SEQUENCE_CASES | SEQUENCE_VALUE_CASES],
)
def test_a_call_that_fails_changes_nothing(name, case):
    arguments = arguments_of(name, case)
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.numel() < 1000]  # one is beyond memory
    before = [(tensor.clone(), tensor._version) for tensor in tensors]
    message(getattr(torch.ops.lltm, name), arguments)
    for tensor, (copy, version) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, copy)
