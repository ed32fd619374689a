"""What a module says of bad arguments: its own words where no operator can know, else those of
the operator; the same eager, compiled and scripted, and with each option."""

import functools
import re

import pytest
import torch
from common import message, needs_torchscript
from expecttest import assert_expected_inline
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import lltm_ops

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")

CELL, LAYER = lltm_ops.LLTMCell(5, 4), lltm_ops.LLTM(5, 4)
X, H = torch.zeros(3, 5), torch.zeros(3, 4)
TIMES, STATE = torch.zeros(5, 3, 5), torch.zeros(1, 3, 4)
# TorchScript's parser speaks before the module about these.
KINDS = {
    "None": (CELL, (None,)),
    "hx of both in one tensor": (CELL, (X, torch.stack([H, H]))),
    "hx of three": (CELL, (X, [H, H, H])),
    "hx of a tensor and None": (CELL, (X, (H, None))),
    "a list": (LAYER, ([[0.0]],)),
    "hx of one": (LAYER, (TIMES, (STATE,))),
    "resets of a list": (LAYER, (TIMES, None, [True] * 5)),
    "batch_sizes of a list": (LAYER, (TIMES, None, None, [3, 3, 3])),
    "batch_sizes beside a PackedSequence": (LAYER, (pack_sequence([X]), None, None, X)),
}
SIZES = {
    "input of rank 0": (CELL, (X.sum(),)),
    "h without a batch": (CELL, (X, (H[0], H))),
    "h with a batch that input lacks": (CELL, (X[0], (H, H))),
    "input of rank 4": (LAYER, (torch.zeros(2, 2, 3, 5),)),
    "input of the layer too wide": (LAYER, (torch.zeros(5, 3, 10),)),
    "hx of other layers": (LAYER, (TIMES, (torch.cat([STATE, STATE]), STATE))),
    "c_0 of another batch": (LAYER, (TIMES, (STATE, STATE[:, 1:]))),
    "c_0 too narrow": (LAYER, (TIMES, (STATE, STATE[..., 1:]))),
    "c_0 without layers": (LAYER, (TIMES, (STATE, STATE[0]))),
    "hx with a batch that input lacks": (LAYER, (TIMES[:, 0], (STATE, STATE))),
    "resets of another shape": (LAYER, (TIMES, None, torch.zeros(3, 5).bool())),
    "resets of one dimension": (LAYER, (TIMES, None, torch.zeros(15).bool())),
    "resets with a batch that input lacks": (LAYER, (X, None, torch.zeros(3, 1).bool())),
    "batch_sizes beside padded input": (LAYER, (TIMES, None, None, torch.tensor([3]))),
    "batch_sizes of fewer rows": (LAYER, (X, None, None, torch.tensor([2]))),
    "batch_sizes of rank 2": (LAYER, (X, None, None, torch.tensor([[3]]))),
    "negative batch_sizes": (LAYER, (X, None, None, torch.tensor([-3]))),
    "batch_sizes on meta": (LAYER, (X, None, None, torch.tensor([3], device="meta"))),
    "a state beside other batch_sizes": (LAYER, (X, (STATE, STATE), None, torch.tensor([2, 1]))),
}
CASES = KINDS | SIZES
ERRORS = (RuntimeError, TypeError, ValueError, torch.jit.Error)


def words(case, path=lambda module: module):
    module, arguments = CASES[case]
    return message(path(module), arguments, ERRORS)


def test_messages():
    assert_expected_inline(
        "\n".join(f"{case}: {words(case)}" for case in CASES),
        """\
None: lltm_ops.LLTMCell: expected input to be a tensor, but got None
hx of both in one tensor: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got Tensor
hx of three: lltm_ops.LLTMCell: expected hx to be a tuple (h, c) of two tensors, but got a list of 3
hx of a tensor and None: lltm_ops.LLTMCell: expected c to be a tensor, but got None
a list: lltm_ops.LLTM: expected input to be a tensor or a PackedSequence, but got list
hx of one: lltm_ops.LLTM: expected hx to be a tuple (h_0, c_0) of two tensors, but got a tuple of 1
resets of a list: lltm_ops.LLTM: expected resets to be a tensor, but got list
batch_sizes of a list: lltm_ops.LLTM: expected batch_sizes to be a tensor, but got list
batch_sizes beside a PackedSequence: lltm_ops.LLTM: expected no batch_sizes beside a PackedSequence, which has its own, but got a tensor of shape [3, 5]
input of rank 0: lltm_ops.LLTMCell: expected input to have 1 dimension [input_size] or 2 with a batch, but got 0
h without a batch: lltm_ops.LLTMCell: expected h and c to have 2 dimensions for this input, but got 1 and 2
h with a batch that input lacks: lltm_ops.LLTMCell: expected h and c to have 1 dimensions for this input, but got 2 and 2
input of rank 4: lltm_ops.LLTM: expected input to have 2 dimensions [time, input_size] or 3 with a batch, but got 4
input of the layer too wide: lltm::sequence_forward: expected weights to have shape [3 * state_size, state_size + input_features] = [12, 14], but got [12, 9]
hx of other layers: lltm_ops.LLTM: expected h_0 and c_0 to begin with a dimension of num_layers * directions = 1, but got 2 and 1
c_0 of another batch: lltm::sequence_forward: expected c0 to have shape [batch, state_size] = [3, 4], but got [2, 4]
c_0 too narrow: lltm::sequence_forward: expected c0 to have shape [batch, state_size] = [3, 4], but got [3, 3]
c_0 without layers: lltm_ops.LLTM: expected h_0 and c_0 to have 3 dimensions for this input, but got 3 and 2
hx with a batch that input lacks: lltm_ops.LLTM: expected h_0 and c_0 to have 2 dimensions for this input, but got 3 and 3
resets of another shape: lltm::sequence_forward: expected resets to have shape [time, batch] = [5, 3], but got [3, 5]
resets of one dimension: lltm_ops.LLTM: expected resets to have all dimensions of input but the last, 2, but got 1
resets with a batch that input lacks: lltm_ops.LLTM: expected resets to have all dimensions of input but the last, 1, but got 2
batch_sizes beside padded input: lltm::sequence_forward: expected input to have shape [sum(batch_sizes), input_features], but got [5, 3, 5]
batch_sizes of fewer rows: lltm::sequence_forward: expected input to have sum(batch_sizes) = 2 rows, but got 3
batch_sizes of rank 2: lltm::sequence_forward: expected batch_sizes to have shape [time], but got [1, 1]
negative batch_sizes: lltm::sequence_forward: expected batch_sizes never to be negative, and never to increase, but got -3 at step 0
batch_sizes on meta: lltm_ops.LLTM: expected batch_sizes to be on the CPU, but got meta
a state beside other batch_sizes: lltm::sequence_forward: expected an initial state for each of the 2 packed sequences, but got 3""",
    )


def compiled(module):
    torch._dynamo.reset()
    return torch.compile(module, backend="eager", fullgraph=True)


@pytest.mark.parametrize("case", CASES)
def test_compiled_modules_say_the_same_words(case):
    assert words(case) in words(case, compiled)


scripted = functools.cache(torch.jit.script)


@needs_torchscript
@pytest.mark.parametrize("case", SIZES)
def test_scripted_modules_say_the_same_words(case):
    assert words(case) in words(case, scripted)


@pytest.mark.parametrize("case", [case for case, (module, _) in CASES.items() if module is LAYER])
@pytest.mark.parametrize("option", ["layer_norm", "zoneout", "recurrent_dropout"])
def test_what_runs_step_by_step_says_the_same_words(option, case):
    """But for the number of steps, of which a call that only checks has none."""

    def without_sizes(words):
        return re.sub(r"\[[\d, ]*\]", "[]", words)

    layer = lltm_ops.LLTM(5, 4, **{option: True if option == "layer_norm" else 0.3})
    assert without_sizes(words(case, lambda _: layer)) == without_sizes(words(case))


@pytest.mark.parametrize("make", [lambda module: module, compiled], ids=["eager", "compile"])
def test_a_state_of_another_batch_beside_a_packed_sequence(make):
    """Its permutation would take some of the rows in silence."""
    packed = pack_sequence([torch.zeros(n, 5) for n in (1, 4, 2)], enforce_sorted=False)
    state = torch.zeros(1, 4, 4)
    expected = "expected h_0 and c_0 to have a batch of 3, as the PackedSequence has, but got"
    for hx in ((state, STATE), (STATE, state)):
        assert expected in message(make(LAYER), (packed, hx), ERRORS)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(lltm_ops.LLTMCell, nn.LSTMCell), (lltm_ops.LLTM, nn.LSTM)]
)
def test_errors_are_of_the_kind_that_torch_nn_raises(ours, theirs):
    cases = [case for case in SIZES if isinstance(CASES[case][0], ours) and "resets" not in case]
    for case in cases:
        arguments = CASES[case][1]
        if len(arguments) > 2:  # batch_sizes, which theirs has not
            continue
        found = []
        for module in (ours(5, 4), theirs(5, 4)):
            with pytest.raises((RuntimeError, ValueError)) as error:
                module(*arguments)
            found.append(error.type)
        assert found[0] is found[1], case


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda module: module, id="eager"),
        pytest.param(scripted, id="script", marks=needs_torchscript),
    ],
)
@pytest.mark.parametrize("kind", [lltm_ops.LLTMCell, lltm_ops.LLTM])
def test_tensors_that_are_not_dense(kind, make):
    sequences = [torch.zeros(2, 5), torch.zeros(3, 5)]
    for tensor in (
        torch.nested.nested_tensor(sequences),
        torch.nested.nested_tensor(sequences, layout=torch.jagged),
        X.to_sparse(),
        X.to_sparse_csr(),
    ):
        for arguments in ((tensor,), (X, (tensor, H)), (X, (H, tensor))):
            found = message(make(kind(5, 4)), arguments, ERRORS)
            assert re.search("expected [a-z_0]+ to be a dense tensor, but got", found)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_anomaly_mode_names_the_operator_of_the_first_nan():
    layer, input = lltm_ops.LLTM(5, 4), torch.zeros(3, 1, 5)
    input[1] = torch.inf
    words = "LLTMSequenceFunction>' returned nan values"
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match=words):
        layer(input)[0].sum().backward()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("kinds", "first"),
    [((nn.LSTM, lltm_ops.LLTM), "weights_l0"), ((nn.LSTMCell, lltm_ops.LLTMCell), "weights")],
)
def test_a_checkpoint_of_an_lstm_is_refused_with_the_reason(kinds, first, nested):
    theirs, ours = (kind(5, 6) for kind in kinds)
    if nested:
        theirs, ours = nn.ModuleDict({"rnn": theirs}), nn.ModuleDict({"rnn": ours})
    prefix = "rnn." if nested else ""
    reason = f'"{prefix}{first} (the weights of nn.LSTM or nn.GRU cannot become those of an LLTM)"'
    assert reason in message(ours.load_state_dict, [theirs.state_dict()])
    missing_keys, _ = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert missing_keys == list(ours.state_dict())
