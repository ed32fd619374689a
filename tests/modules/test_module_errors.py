"""Bad arguments of a module raise one sentence in the names that its user knows, the same words
eager, compiled and scripted, and with each option."""

import functools
import re
from copy import deepcopy

import pytest
import torch
from common import message, needs_torchscript
from expecttest import assert_expected_inline
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map

import lltm_ops

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")


# A case makes the arguments of a call out of (input, hx) that a module would take.
KIND_CASES = {
    "None": lambda input, hx: (None,),
    "a list": lambda input, hx: (input.tolist(),),
    "hx of both in one tensor": lambda input, hx: (input, torch.stack(hx)),
    "hx of one": lambda input, hx: (input, hx[:1]),
    "hx of three": lambda input, hx: (input, [*hx, hx[0]]),
    "hx of a tensor and None": lambda input, hx: (input, (hx[0], None)),
    "hx of lists": lambda input, hx: (input, tuple(state.tolist() for state in hx)),
}
LAYER_KIND_CASES = KIND_CASES | {
    "resets of a list": lambda input, hx: (input, hx, [True] * 5),
    "batch_sizes of a list": lambda input, hx: (input, hx, None, [3, 3, 3]),
}
SIZE_CASES = {
    "input of rank 0": lambda input, hx: (input.sum(),),
    "input of rank 4": lambda input, hx: (torch.zeros(2, 2, 3, 5),),
    "input too wide": lambda input, hx: (torch.cat([input, input], -1),),
    "input too wide, with a state": lambda input, hx: (torch.cat([input, input], -1), hx),
    "h too narrow": lambda input, hx: (input, (hx[0][..., 1:], hx[1])),
    "c too narrow": lambda input, hx: (input, (hx[0], hx[1][..., 1:])),
    "h of a lower rank": lambda input, hx: (input, (hx[0][0], hx[1])),
    "c of another batch": lambda input, hx: (input, (hx[0], hx[1][..., 1:, :])),
    "h and c of one row": lambda input, hx: (input, tuple(s[..., :1, :] for s in hx)),
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
    "batch_sizes of rank 2": of_packed([3, 3, 3]),
    "batch_sizes beside padded input": lambda input, hx: (input, None, None, torch.tensor([3])),
    "batch_sizes beside a number": lambda input, hx: (input.sum(), None, None, torch.tensor([3])),
    "batch_sizes beyond memory": of_packed(2**40, 3, 3),
    "batch_sizes beyond int64": of_packed(2**62, 2**62, 2**62),
    "negative batch_sizes": of_packed(-3, 3, 3),
    "batch_sizes that increase": of_packed(2, 3, 4),
    "a state beside other batch_sizes": lambda input, hx: (
        input[0], hx, None, torch.tensor([2, 1])
    ),
    "a state without batch beside batch_sizes": lambda input, hx: (
        input[0], (hx[0][0], hx[1]), None, torch.tensor([3])
    ),
    "a state of two batches beside batch_sizes": lambda input, hx: (
        input[0], (hx[0][:, 1:], hx[1]), None, torch.tensor([3])
    ),
    "resets of another time without batch": lambda input, hx: (
        input[:, 0], None, torch.zeros(4, dtype=torch.bool)
    ),
    "resets with a batch that input has not": lambda input, hx: (
        input[:, 0], None, torch.zeros(5, 1, dtype=torch.bool)
    ),
    "resets of other rows": lambda input, hx: (
        input[0], None, torch.zeros(2, dtype=torch.bool), torch.tensor([2, 1])
    ),
    "batch_sizes of fewer rows": of_packed(5, 3),
    "hx of other layers": lambda input, hx: (input, tuple(torch.cat([s, s]) for s in hx)),
    "hx with a batch that input lacks": lambda input, hx: (input[:, 0], hx),
    "resets of another shape": lambda input, hx: (input, hx, torch.zeros(3, 5).bool()),
    "resets of one dimension": lambda input, hx: (input, hx, torch.zeros(15).bool()),
    "resets of floats": lambda input, hx: (input, hx, torch.zeros(5, 3)),
}  # fmt: skip
# TorchScript leaves them to the operator, and torch.compile refuses sparse tensors itself.
PLACE_CASES = {
    "input of double": lambda input, hx: (input.double(), hx),
    "input of integers": lambda input, hx: (input.long(),),
    "input on another device": lambda input, hx: (input.to("meta"),),
    "input sparse": lambda input, hx: (input.to_sparse(),),
    "h of double": lambda input, hx: (input, (hx[0].double(), hx[1])),
    "c of bfloat16": lambda input, hx: (input, (hx[0], hx[1].bfloat16())),
    "h on another device": lambda input, hx: (input, (hx[0].to("meta"), hx[1])),
    "c sparse": lambda input, hx: (input, (hx[0], hx[1].to_sparse())),
}
MODULE_ERRORS = (RuntimeError, TypeError, ValueError, torch.jit.Error)


def arguments_of_case(module, case):
    time = [5] if isinstance(module, (lltm_ops.LLTM, nn.LSTM)) else []
    input, state = torch.zeros(*time, 3, 5), torch.zeros(*[1 for _ in time], 3, 4)
    cases = LAYER_KIND_CASES | LAYER_SIZE_CASES | PLACE_CASES
    return cases[case](input, (state, state))


def module_message(module, case, path=lambda module: module):
    return message(path(module), arguments_of_case(module, case), MODULE_ERRORS)


def test_messages_of_the_cell():
    cell = lltm_ops.LLTMCell(5, 4)
    cases = KIND_CASES | SIZE_CASES | PLACE_CASES
    lines = (f"{case}: {module_message(cell, case)}" for case in cases)
    assert_expected_inline(
        "\n".join(lines),
        """\
None: lltm_ops.LLTMCell: expected input to be a tensor, but got None
a list: lltm_ops.LLTMCell: expected input to be a tensor, but got list
hx of both in one tensor: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got Tensor
hx of one: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got a tuple of 1
hx of three: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got a list of 3
hx of a tensor and None: lltm_ops.LLTMCell: expected c to be a tensor, but got None
hx of lists: lltm_ops.LLTMCell: expected h to be a tensor, but got list
input of rank 0: lltm_ops.LLTMCell: expected input to have 1 dimension [input_size] or 2 with a batch, but got 0
input of rank 4: lltm_ops.LLTMCell: expected input to have 1 dimension [input_size] or 2 with a batch, but got 4
input too wide: lltm_ops.LLTMCell: expected input to have input_size = 5 features, but got 10
input too wide, with a state: lltm_ops.LLTMCell: expected input to have input_size = 5 features, but got 10
h too narrow: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [3, 3] and [3, 4]
c too narrow: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [3, 4] and [3, 3]
h of a lower rank: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [4] and [3, 4]
c of another batch: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [3, 4] and [2, 4]
h and c of one row: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [1, 4] and [1, 4]
c of rank 0: lltm_ops.LLTMCell: expected h and c to have shape [batch, hidden_size] = [3, 4], but got [3, 4] and []
input of double: lltm_ops.LLTMCell: expected input to have the dtype of the parameters, torch.float32, but got torch.float64
input of integers: lltm_ops.LLTMCell: expected input to have the dtype of the parameters, torch.float32, but got torch.int64
input on another device: lltm_ops.LLTMCell: expected input to be on the device of the parameters, cpu, but got meta
input sparse: lltm_ops.LLTMCell: expected input to be a dense tensor, but got layout torch.sparse_coo
h of double: lltm_ops.LLTMCell: expected h to have the dtype of input, torch.float32, but got torch.float64
c of bfloat16: lltm_ops.LLTMCell: expected c to have the dtype of input, torch.float32, but got torch.bfloat16
h on another device: lltm_ops.LLTMCell: expected h to be on the device of input, cpu, but got meta
c sparse: lltm_ops.LLTMCell: expected c to be a dense tensor, but got layout torch.sparse_coo""",
    )


def test_messages_of_the_layer():
    """Those that are not the words of the cell, in the names of the layer."""
    lines = []
    for case in LAYER_KIND_CASES | LAYER_SIZE_CASES | PLACE_CASES:
        words = module_message(lltm_ops.LLTM(5, 4), case)
        if case in KIND_CASES | SIZE_CASES | PLACE_CASES:
            of_cell = module_message(lltm_ops.LLTMCell(5, 4), case)
            if words == re.sub(r"\b([hc])\b", r"\1_0", of_cell).replace("LLTMCell", "LLTM"):
                continue
        lines.append(f"{case}: {words}")
    assert_expected_inline(
        "\n".join(lines),
        """\
None: lltm_ops.LLTM: expected input to be a tensor or a PackedSequence, but got None
a list: lltm_ops.LLTM: expected input to be a tensor or a PackedSequence, but got list
resets of a list: lltm_ops.LLTM: expected resets to be a tensor, but got list
batch_sizes of a list: lltm_ops.LLTM: expected batch_sizes to be a tensor, but got list
input of rank 0: lltm_ops.LLTM: expected input to have 2 dimensions [time, input_size] or 3 with a batch, but got 0
input of rank 4: lltm_ops.LLTM: expected input to have 2 dimensions [time, input_size] or 3 with a batch, but got 4
h too narrow: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [1, 3, 3] and [1, 3, 4]
c too narrow: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [1, 3, 4] and [1, 3, 3]
h of a lower rank: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [3, 4] and [1, 3, 4]
c of another batch: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [1, 3, 4] and [1, 2, 4]
h and c of one row: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [1, 1, 4] and [1, 1, 4]
c of rank 0: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [1, 3, 4] and []
batch_sizes on meta: lltm_ops.LLTM: expected batch_sizes to be on the CPU, but got meta
batch_sizes of int32: lltm::sequence_forward: expected batch_sizes to be dense with dtype Long, but got layout Strided with dtype Int
batch_sizes of rank 2: lltm::sequence_forward: expected batch_sizes to have 1 dimension [time], but got 2
batch_sizes beside padded input: lltm_ops.LLTM: expected input beside batch_sizes to have 2 dimensions [rows, input_size], but got 3
batch_sizes beside a number: lltm_ops.LLTM: expected input beside batch_sizes to have 2 dimensions [rows, input_size], but got 0
batch_sizes beyond memory: lltm::sequence_forward: expected input to have sum(batch_sizes) = 1099511627782 rows, but got 9
batch_sizes beyond int64: lltm::sequence_forward: expected sum(batch_sizes) to be at most 2**63 - 1, but got more
negative batch_sizes: lltm::sequence_forward: expected batch_sizes never to be negative, and never to increase, but got -3 at step 0
batch_sizes that increase: lltm::sequence_forward: expected batch_sizes never to be negative, and never to increase, but got 3 at step 1
a state beside other batch_sizes: lltm::sequence_forward: expected an initial state for each of the 2 packed sequences, but got 3
a state without batch beside batch_sizes: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, batch, 4], but got [3, 4] and [1, 3, 4]
a state of two batches beside batch_sizes: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, batch, 4], but got [1, 2, 4] and [1, 3, 4]
resets of another time without batch: lltm_ops.LLTM: expected resets to have shape [time] = [5], but got [4]
resets with a batch that input has not: lltm_ops.LLTM: expected resets to have shape [time] = [5], but got [5, 1]
resets of other rows: lltm_ops.LLTM: expected resets to have shape [rows] = [3], but got [2]
batch_sizes of fewer rows: lltm::sequence_forward: expected input to have sum(batch_sizes) = 8 rows, but got 9
hx of other layers: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, batch, hidden_size] = [1, 3, 4], but got [2, 3, 4] and [2, 3, 4]
hx with a batch that input lacks: lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, hidden_size] = [1, 4], but got [1, 3, 4] and [1, 3, 4]
resets of another shape: lltm::sequence_forward: expected resets to have shape [time, batch] = [5, 3], but got [3, 5]
resets of one dimension: lltm::sequence_forward: expected resets to have 2 dimensions [time, batch], but got 1
resets of floats: lltm::sequence_forward: expected resets to be dense with dtype Bool, but got layout Strided with dtype Float""",
    )


each_module = pytest.mark.parametrize(
    "module", [lltm_ops.LLTMCell(5, 4), lltm_ops.LLTM(5, 4)], ids=str
)


@each_module
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


MODULE_CASES = (
    (lltm_ops.LLTMCell(5, 4), KIND_CASES, SIZE_CASES),
    (lltm_ops.LLTM(5, 4), LAYER_KIND_CASES, LAYER_SIZE_CASES),
)


@pytest.mark.parametrize("case", LAYER_KIND_CASES | LAYER_SIZE_CASES | PLACE_CASES)
@pytest.mark.parametrize(
    "option", [{"layer_norm": True}, {"zoneout": 0.3}, {"recurrent_dropout": 0.3}], ids=str
)
def test_what_runs_step_by_step_says_the_same_words(option, case):
    expected = module_message(lltm_ops.LLTM(5, 4), case)
    assert module_message(lltm_ops.LLTM(5, 4, **option), case) == expected


@pytest.mark.parametrize(
    ("module", "case"),
    [
        (module, case)
        for module, kinds, sizes in MODULE_CASES
        for case in kinds | sizes | PLACE_CASES
        if "sparse" not in case
    ],
    ids=str,
)
def test_compiled_modules_say_the_same_words(module, case):
    assert module_message(module, case) in module_message(module, case, compiled_module)


# Kinds are left to its parser, which speaks first.
@needs_torchscript
@pytest.mark.parametrize(
    ("module", "case"),
    [(module, case) for module, _, sizes in MODULE_CASES for case in sizes],
    ids=str,
)
def test_scripted_modules_say_the_same_words(module, case):
    assert module_message(module, case) in module_message(module, case, scripted_module)


@each_module
@pytest.mark.parametrize("case", [case for case in PLACE_CASES if "double" in case])
@pytest.mark.parametrize("make", [lambda module: module, compiled_module], ids=["eager", "compile"])
def test_autocast_and_meta_leave_double_and_the_words_as_they_are(make, module, case):
    arguments, expected = arguments_of_case(module, case), module_message(module, case)
    with torch.autocast("cpu", torch.bfloat16):
        assert expected in message(make(module), arguments, MODULE_ERRORS)
    on_meta = deepcopy(module).to("meta")
    arguments = tree_map(lambda tensor: tensor.to("meta"), arguments)
    assert expected in message(make(on_meta), arguments, MODULE_ERRORS)


NAMES_OF_OPERATORS = r"\bh0\b|\bc0\b|old_h|old_cell|state_size|input_features|batch_sizes"


@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("make", [lambda module: module, compiled_module], ids=["eager", "compile"])
def test_errors_of_packed_sequences_speak_of_what_the_user_passed(make, enforce_sorted):
    sequences = [torch.zeros(length, 5) for length in (4, 2, 1)]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    state = torch.zeros(1, 3, 4)
    layer = make(lltm_ops.LLTM(5, 4))
    for hx, resets in (
        ((state[:, 1:], state[:, 1:]), None),
        ((state[0], state[0]), None),
        ((state.double(), state), None),
        ((state, state), torch.zeros(3, dtype=torch.bool)),
    ):
        found = message(layer, (packed, hx, resets), MODULE_ERRORS)
        (sentence,) = re.findall("lltm[^ ]+: expected .*, but got .*", found)[:1]
        assert not re.search(NAMES_OF_OPERATORS, sentence)


@pytest.mark.parametrize("case", [*SIZE_CASES, "input of double", "input of integers"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(lltm_ops.LLTMCell, nn.LSTMCell), (lltm_ops.LLTM, nn.LSTM)]
)
def test_errors_are_of_the_kind_that_torch_nn_raises(ours, theirs, case):
    found = []
    for kind in (ours, theirs):
        with pytest.raises((RuntimeError, ValueError)) as error:
            kind(5, 4)(*arguments_of_case(kind(5, 4), case))
        found.append(error.type)
    assert found[0] is found[1]


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
