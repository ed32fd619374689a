"""Bad arguments of a module raise one sentence in the names that its user knows, the same words
eager, compiled and scripted, and with each option."""

import functools

import pytest
import torch
from common import HAS_TORCHSCRIPT, message, needs_torchscript
from expecttest import assert_expected_inline

import lltm_ops

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")


# A case makes the arguments of a call out of (input, hx) that a module would take.
KIND_CASES = {
    "None": lambda input, hx: (None,),
    "a list": lambda input, hx: (input.tolist(),),
    "a string": lambda input, hx: ("input",),
    "a number": lambda input, hx: (1.0,),
    "hx of one tensor": lambda input, hx: (input, hx[0]),
    "hx of both in one tensor": lambda input, hx: (input, torch.stack(hx)),
    "hx of a string": lambda input, hx: (input, "hc"),
    "hx of nothing": lambda input, hx: (input, ()),
    "hx of one": lambda input, hx: (input, hx[:1]),
    "hx of three": lambda input, hx: (input, [*hx, hx[0]]),
    "hx of None": lambda input, hx: (input, (None, None)),
    "hx of a tensor and None": lambda input, hx: (input, (hx[0], None)),
    "hx of lists": lambda input, hx: (input, tuple(state.tolist() for state in hx)),
}
LAYER_KIND_CASES = KIND_CASES | {
    "resets of a list": lambda input, hx: (input, hx, [True] * 5),
    "batch_sizes of a list": lambda input, hx: (input, hx, None, [3, 3, 3]),
    "batch_sizes of a number": lambda input, hx: (input, hx, None, 3),
}
SIZE_CASES = {
    "input of rank 0": lambda input, hx: (input.sum(),),
    "input of rank 4": lambda input, hx: (torch.zeros(2, 2, 3, 5),),
    "input too wide": lambda input, hx: (torch.cat([input, input], -1),),
    "input too wide, with a state": lambda input, hx: (torch.cat([input, input], -1), hx),
    "h too narrow": lambda input, hx: (input, (hx[0][..., 1:], hx[1])),
    "c too narrow": lambda input, hx: (input, (hx[0], hx[1][..., 1:])),
    "h of a lower rank": lambda input, hx: (input, (hx[0][0], hx[1])),
    "c of rank 0": lambda input, hx: (input, (hx[0], hx[1].sum())),
}


def of_packed(*batch_sizes, **options):
    return lambda input, hx: (
        torch.zeros(9, 5), None, None, torch.tensor(batch_sizes, **options)
    )  # fmt: skip


# Some are values: a compiled call says it when it computes.
LAYER_SIZE_CASES = SIZE_CASES | {
    "batch_sizes on meta": of_packed(3, 3, 3, device="meta"),
    "batch_sizes of int32": of_packed(3, 3, 3, dtype=torch.int32),
    "batch_sizes of NaN": of_packed(torch.nan),
    "batch_sizes of rank 2": of_packed([3, 3, 3]),
    "batch_sizes beside padded input": lambda input, hx: (input, None, None, torch.tensor([3])),
    "batch_sizes beside a number": lambda input, hx: (input.sum(), None, None, torch.tensor([3])),
    "batch_sizes that increase": of_packed(4, 5),
    "batch_sizes of fewer rows": of_packed(5, 3),
    "batch_sizes beside a state of another batch": lambda input, hx: (
        torch.zeros(9, 5), hx, None, torch.tensor([5, 4])
    ),
    "batch_sizes beyond memory": of_packed(2**40, 3, 3),
    "batch_sizes beyond int64": of_packed(2**62, 2**62, 2**62),
    "negative batch_sizes": of_packed(-3, 3, 3),
    "input of integers": lambda input, hx: (input.long(),),
    "hx of other layers": lambda input, hx: (input, tuple(torch.cat([s, s]) for s in hx)),
    "hx of another batch": lambda input, hx: (input, tuple(s[:, 1:] for s in hx)),
    "hx with a batch that input lacks": lambda input, hx: (input[:, 0], hx),
    "resets of another shape": lambda input, hx: (input, hx, torch.zeros(3, 5).bool()),
    "resets of one dimension": lambda input, hx: (input, hx, torch.zeros(15).bool()),
    "resets with a batch that input lacks": lambda input, hx: (
        input[:, 0], None, torch.zeros(5, 1).bool()
    ),
    "resets of floats": lambda input, hx: (input, hx, torch.zeros(5, 3)),
}  # fmt: skip
MODULE_ERRORS = (RuntimeError, TypeError, ValueError, torch.jit.Error)


def module_message(module, case, path=lambda module: module):
    time = [5] if isinstance(module, lltm_ops.LLTM) else []
    input, state = torch.zeros(*time, 3, 5), torch.zeros(*[1 for _ in time], 3, 4)
    arguments = (LAYER_KIND_CASES | LAYER_SIZE_CASES)[case](input, (state, state))
    return message(path(module), arguments, MODULE_ERRORS)


def test_messages_of_the_cell():
    cell = lltm_ops.LLTMCell(5, 4)
    lines = (f"{case}: {module_message(cell, case)}" for case in KIND_CASES | SIZE_CASES)
    assert_expected_inline(
        "\n".join(lines),
        """\
None: lltm_ops.LLTMCell: expected input to be a tensor, but got None
a list: lltm_ops.LLTMCell: expected input to be a tensor, but got list
a string: lltm_ops.LLTMCell: expected input to be a tensor, but got str
a number: lltm_ops.LLTMCell: expected input to be a tensor, but got float
hx of one tensor: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got Tensor
hx of both in one tensor: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got Tensor
hx of a string: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got str
hx of nothing: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got a tuple of 0
hx of one: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got a tuple of 1
hx of three: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got a list of 3
hx of None: lltm_ops.LLTMCell: expected h to be a tensor, but got None
hx of a tensor and None: lltm_ops.LLTMCell: expected c to be a tensor, but got None
hx of lists: lltm_ops.LLTMCell: expected h to be a tensor, but got list
input of rank 0: lltm_ops.LLTMCell: expected input to have 1 dimension [input_size] or 2 with a batch, but got 0
input of rank 4: lltm_ops.LLTMCell: expected input to have 1 dimension [input_size] or 2 with a batch, but got 4
input too wide: lltm_ops.LLTMCell: expected input to have input_size = 5 features, but got 10
input too wide, with a state: lltm_ops.LLTMCell: expected input to have input_size = 5 features, but got 10
h too narrow: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [3, 3] and [3, 4]
c too narrow: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [3, 4] and [3, 3]
h of a lower rank: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [4] and [3, 4]
c of rank 0: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [3, 4] and []""",
    )


def test_messages_of_the_layer():
    layer = lltm_ops.LLTM(5, 4)
    cases = LAYER_KIND_CASES | LAYER_SIZE_CASES
    lines = (f"{case}: {module_message(layer, case)}" for case in cases)
    assert_expected_inline(
        "\n".join(lines),
        """\
None: lltm_ops.LLTM: expected input to be a tensor or a PackedSequence, but got None
a list: lltm_ops.LLTM: expected input to be a tensor or a PackedSequence, but got list
a string: lltm_ops.LLTM: expected input to be a tensor or a PackedSequence, but got str
a number: lltm_ops.LLTM: expected input to be a tensor or a PackedSequence, but got float
hx of one tensor: lltm_ops.LLTM: expected hx to be a tuple (h_0, c_0) of two tensors, but got Tensor
hx of both in one tensor: lltm_ops.LLTM: expected hx to be a tuple (h_0, c_0) of two tensors, but got Tensor
hx of a string: lltm_ops.LLTM: expected hx to be a tuple (h_0, c_0) of two tensors, but got str
hx of nothing: lltm_ops.LLTM: expected hx to be a tuple (h_0, c_0) of two tensors, but got a tuple of 0
hx of one: lltm_ops.LLTM: expected hx to be a tuple (h_0, c_0) of two tensors, but got a tuple of 1
hx of three: lltm_ops.LLTM: expected hx to be a tuple (h_0, c_0) of two tensors, but got a list of 3
hx of None: lltm_ops.LLTM: expected h_0 to be a tensor, but got None
hx of a tensor and None: lltm_ops.LLTM: expected c_0 to be a tensor, but got None
hx of lists: lltm_ops.LLTM: expected h_0 to be a tensor, but got list
resets of a list: lltm_ops.LLTM: expected resets to be a tensor, but got list
batch_sizes of a list: lltm_ops.LLTM: expected batch_sizes to be a tensor, but got list
batch_sizes of a number: lltm_ops.LLTM: expected batch_sizes to be a tensor, but got int
input of rank 0: lltm_ops.LLTM: expected input to have 2 dimensions [time, input_size] or 3 with a batch, but got 0
input of rank 4: lltm_ops.LLTM: expected input to have 2 dimensions [time, input_size] or 3 with a batch, but got 4
input too wide: lltm_ops.LLTM: expected input to have input_size = 5 features, but got 10
input too wide, with a state: lltm_ops.LLTM: expected input to have input_size = 5 features, but got 10
h too narrow: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [1, 3, 3] and [1, 3, 4]
c too narrow: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [1, 3, 4] and [1, 3, 3]
h of a lower rank: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [3, 4] and [1, 3, 4]
c of rank 0: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [1, 3, 4] and []
batch_sizes on meta: lltm_ops.LLTM: expected batch_sizes to be on the CPU, but got meta
batch_sizes of int32: lltm::sequence_forward: expected batch_sizes to be dense with dtype Long, but got layout Strided with dtype Int
batch_sizes of NaN: lltm::sequence_forward: expected batch_sizes to be dense with dtype Long, but got layout Strided with dtype Float
batch_sizes of rank 2: lltm::sequence_forward: expected batch_sizes to have 1 dimension [time], but got 2
batch_sizes beside padded input: lltm::sequence_forward: expected input to have 2 dimensions [sum(batch_sizes), input_features], but got 3
batch_sizes beside a number: lltm::sequence_forward: expected input to have 2 dimensions [sum(batch_sizes), input_features], but got 0
batch_sizes that increase: lltm::sequence_forward: expected batch_sizes to begin with the batch of h0, 4, and never to increase, but got 5 at step 1
batch_sizes of fewer rows: lltm::sequence_forward: expected input to have sum(batch_sizes) = 8 rows, but got 9
batch_sizes beside a state of another batch: lltm::sequence_forward: expected batch_sizes to begin with the batch of h0, 3, and never to increase, but got 5 at step 0
batch_sizes beyond memory: lltm::sequence_forward: expected batch_sizes to begin with the batch of h0, 9, and never to increase, but got 1099511627776 at step 0
batch_sizes beyond int64: lltm::sequence_forward: expected batch_sizes to begin with the batch of h0, 9, and never to increase, but got 4611686018427387904 at step 0
negative batch_sizes: lltm::sequence_forward: expected batch_sizes to begin with the batch of h0, 0, and never to increase, but got -3 at step 0
input of integers: lltm::sequence_forward: expected input to have dtype Double, Float, BFloat16 or Half, but got Long
hx of other layers: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [2, 3, 4] and [2, 3, 4]
hx of another batch: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [1, 2, 4] and [1, 2, 4]
hx with a batch that input lacks: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, hidden_size] = [1, 4], but got [1, 3, 4] and [1, 3, 4]
resets of another shape: lltm::sequence_forward: expected resets to have shape [time, batch] = [5, 3], but got [3, 5]
resets of one dimension: lltm::sequence_forward: expected resets to have 2 dimensions [time, batch], but got 1
resets with a batch that input lacks: lltm_ops.LLTM: expected resets to have 1 dimension [time] for input without batch, but got 2
resets of floats: lltm::sequence_forward: expected resets to be dense with dtype Bool, but got layout Strided with dtype Float""",
    )


@pytest.mark.parametrize("module", [lltm_ops.LLTMCell(5, 4), lltm_ops.LLTM(5, 4)], ids=str)
def test_what_is_no_tensor_is_a_type_error(module):
    with pytest.raises(TypeError, match="expected input to be a tensor"):
        module(None)
    with pytest.raises(TypeError, match="expected hx to be a tuple"):
        module(torch.zeros(3, 5), torch.zeros(3, 4))


def compiled_module(module):
    torch._dynamo.reset()
    return torch.compile(module, backend="eager", fullgraph=True)


@functools.cache
def scripted_module(module):
    return torch.jit.script(module)


MODULE_PAIRS = [
    (module, case)
    for module, cases in (
        (lltm_ops.LLTMCell(5, 4), KIND_CASES | SIZE_CASES),
        (lltm_ops.LLTM(5, 4), LAYER_KIND_CASES | LAYER_SIZE_CASES),
    )
    for case in cases
]


# Of an input that has no last dimension, its slice speaks first.
@pytest.mark.parametrize(
    "case", sorted((LAYER_KIND_CASES | LAYER_SIZE_CASES).keys() - {"batch_sizes beside a number"})
)
@pytest.mark.parametrize(
    "option", [{"layer_norm": True}, {"zoneout": 0.3}, {"recurrent_dropout": 0.3}], ids=str
)
def test_what_runs_step_by_step_says_the_same_words(option, case):
    expected = module_message(lltm_ops.LLTM(5, 4), case)
    assert module_message(lltm_ops.LLTM(5, 4, **option), case) == expected


@pytest.mark.parametrize(("module", "case"), MODULE_PAIRS, ids=str)
def test_compiled_modules_say_the_same_words(module, case):
    assert module_message(module, case) in module_message(module, case, compiled_module)


# Kinds are left to its parser, which speaks first.
@needs_torchscript
@pytest.mark.parametrize(
    ("module", "case"), [pair for pair in MODULE_PAIRS if pair[1] not in LAYER_KIND_CASES], ids=str
)
def test_scripted_modules_say_the_same_words(module, case):
    assert module_message(module, case) in module_message(module, case, scripted_module)


@pytest.mark.parametrize("sizes", [[2, 3], [3, 2], [1, 1]], ids=str)
def test_the_cell_names_a_state_of_another_batch(sizes):
    cell = lltm_ops.LLTMCell(5, 4)
    arguments = torch.zeros(3, 5), tuple(torch.zeros(size, 4) for size in sizes)
    words = "lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but "
    assert words in message(cell, arguments)
    if HAS_TORCHSCRIPT:
        assert words in message(scripted_module(cell), arguments, MODULE_ERRORS)
    # A compiler may not know the batch, and leaves it to the operator.
    assert "expected old_" in message(compiled_module(cell), arguments)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda module: module, id="eager"),
        pytest.param(scripted_module, id="script", marks=needs_torchscript),
    ],
)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("kind", [lltm_ops.LLTMCell, lltm_ops.LLTM])
def test_modules_refuse_nested_tensors(kind, layout, make):
    dense, nested = (
        torch.zeros(3, 5),
        torch.nested.nested_tensor([torch.zeros(2, 5), torch.zeros(3, 5)], layout=layout),
    )
    module = make(kind(5, 4))
    for name, arguments in {
        "input": (nested,),
        "h": (dense, (nested, dense)),
        "c": (dense, (dense, nested)),
    }.items():
        found = message(module, arguments, MODULE_ERRORS)
        suffix = "" if name == "input" or kind is lltm_ops.LLTMCell else "_0"
        assert f"expected {name}{suffix} to be a dense tensor, but got a nested tensor" in found


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_anomaly_mode_names_the_operator_of_the_first_nan():
    layer, input = lltm_ops.LLTM(5, 4), torch.zeros(3, 1, 5)
    input[1] = torch.inf
    words = "LLTMSequenceFunction>' returned nan values"
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match=words):
        layer(input)[0].sum().backward()
