"""LLTM behaves like nn.LSTM, computes what a stack of cells computes, and does what else users of
recurrent layers ask for."""

import copy
import io
import itertools
import pickle
import re
import subprocess
import sys

import pytest
import torch
from common import (
    HAS_TORCHSCRIPT,
    TOLERANCES,
    each_device,
    each_dtype,
    needs_torchscript,
    sequence_reference,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import lltm_ops

STRUCTURES = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 3, "bidirectional": True, "bias": False},
    {"batch_first": True, "num_layers": 2},
]
each_structure = pytest.mark.parametrize("options", STRUCTURES, ids=str)
SLOW_OPTIONS = [{"layer_norm": True}, {"zoneout": 0.3}, {"recurrent_dropout": 0.3}]
each_slow_option = pytest.mark.parametrize("slow", SLOW_OPTIONS, ids=str)
LENGTHS = [4, 7, 1, 7]


def layer_and_peer(options, **both):
    peer_options = {name: value for name, value in options.items() if name != "bias"}
    return lltm_ops.LLTM(5, 6, **options, **both), nn.LSTM(5, 6, **peer_options, **both)


def state_of(layer, *batch, **both):
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    return tuple(torch.randn(count, *batch, layer.hidden_size, **both) for _ in range(2))


def sizes(results):
    output, (h_n, c_n) = results
    if isinstance(output, PackedSequence):
        output = output.data
    return [tuple(tensor.shape) for tensor in (output, h_n, c_n)]


@each_structure
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("form", ["batched", "unbatched", "sorted", "unsorted"])
def test_call_and_results_are_those_of_nn_lstm(options, with_state, form):
    layer, peer = layer_and_peer(options)
    sequences = [torch.randn(length, 5) for length in LENGTHS]
    if form == "sorted":
        sequences.sort(key=len, reverse=True)
    input = {
        "batched": torch.randn(7, 4, 5),
        "unbatched": torch.randn(7, 5),
        "sorted": pack_sequence(sorted(sequences, key=len, reverse=True)),
        "unsorted": pack_sequence(sequences, enforce_sorted=False),
    }[form]
    batch = () if form == "unbatched" else (7 if layer.batch_first and form == "batched" else 4,)
    state = state_of(layer, *batch) if with_state else None
    ours, theirs = layer(input, state), peer(input, state)
    assert sizes(ours) == sizes(theirs)
    assert type(ours[0]) is type(theirs[0])
    if form.endswith("sorted"):
        for mine, yours in zip(ours[0][1:], theirs[0][1:], strict=True):
            assert (mine is None and yours is None) or torch.equal(mine, yours)


def stacked_cells(layer, input, state=None):
    """What the layer computes, out of the reference, for padded input with time first."""
    parameters = dict(layer.named_parameters())
    directions = 2 if layer.bidirectional else 1
    if state is None:
        zeros = input.new_zeros(layer.num_layers * directions, input.shape[1], layer.hidden_size)
        state = zeros, zeros
    last_h, last_c = [], []
    for index in range(layer.num_layers):
        results = []
        for direction, suffix in enumerate(["", "_reverse"][:directions]):
            weights = parameters[f"weights_l{index}{suffix}"]
            bias = parameters.get(f"bias_l{index}{suffix}", weights.new_zeros(len(weights)))
            initial = (part[index * directions + direction] for part in state)
            reverse = suffix == "_reverse"
            results.append(sequence_reference(input, weights, bias, *initial, reverse=reverse))
            for last, states in zip((last_h, last_c), results[-1], strict=True):
                last.append(states[0 if reverse else -1])
        input, cells = (torch.cat(tensors, 2) for tensors in zip(*results, strict=True))
    return input, (torch.stack(last_h), torch.stack(last_c)), cells


def assert_close(actual, expected, **tolerance):
    for ours, exact in zip(actual, expected, strict=True):
        if isinstance(ours, tuple):
            assert_close(ours, exact, **tolerance)
        else:
            torch.testing.assert_close(ours, exact, **tolerance)


@each_device
@each_structure
@pytest.mark.parametrize("with_state", [False, True])
def test_values_are_those_of_stacked_cells(device, options, with_state):
    both = {"device": device, "dtype": torch.float64}
    layer = lltm_ops.LLTM(5, 6, return_cells=True, **options, **both)
    input = torch.randn(7, 4, 5, **both)
    state = state_of(layer, 4, **both) if with_state else None
    output, last, cells = layer(input.transpose(0, 1) if layer.batch_first else input, state)
    if layer.batch_first:
        output, cells = output.transpose(0, 1), cells.transpose(0, 1)
    expected = stacked_cells(layer, input, state)
    assert_close((output, last, cells), expected)
    loss = sum(tensor.square().sum() for tensor in (output, *last, cells))
    expected_loss = sum(t.square().sum() for t in (expected[0], *expected[1], expected[2]))
    parameters = list(layer.parameters())
    assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected_loss, parameters)
    )


@each_dtype
def test_dtypes(dtype):
    layer = lltm_ops.LLTM(5, 6, num_layers=2, bidirectional=True, dtype=dtype)
    output, (h_n, c_n) = layer(torch.randn(7, 4, 5, dtype=dtype))
    assert {output.dtype, h_n.dtype, c_n.dtype} == {dtype}


@each_device
@each_structure
@pytest.mark.parametrize("slow", [{}, {"layer_norm": True}, {"zoneout": 0.3}], ids=str)
@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_is_what_each_sequence_gives_alone(
    device, options, slow, enforce_sorted, with_state
):
    both = {"device": device, "dtype": torch.float64}
    layer = lltm_ops.LLTM(5, 6, return_cells=True, **options, **slow, **both).eval()
    lengths = sorted(LENGTHS, reverse=True) if enforce_sorted else LENGTHS
    sequences = [torch.randn(length, 5, **both) for length in lengths]
    state = state_of(layer, 4, **both) if with_state else None
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    output, last, cells = layer(packed, state)
    assert isinstance(output, PackedSequence) and isinstance(cells, PackedSequence)
    outputs, found = pad_packed_sequence(output, batch_first=True)
    all_cells, _ = pad_packed_sequence(cells, batch_first=True)
    assert found.tolist() == lengths
    for row, sequence in enumerate(sequences):
        own = None if state is None else tuple(part[:, row].contiguous() for part in state)
        alone = layer(sequence, own)
        here = (
            outputs[row, : len(sequence)],
            tuple(part[:, row] for part in last),
            all_cells[row, : len(sequence)],
        )
        assert_close(here, alone)


def test_arguments_are_named_as_those_of_nn_lstm():
    layer, cell = lltm_ops.LLTM(5, 6), lltm_ops.LLTMCell(5, 6)
    input, hx = torch.randn(7, 3, 5), state_of(layer, 3)
    assert_close(layer(input=input, hx=hx), layer(input, hx), rtol=0, atol=0)
    step = input[0], (hx[0][0], hx[1][0])
    assert_close(cell(input=step[0], hx=step[1]), cell(*step), rtol=0, atol=0)


@each_structure
def test_an_initialisation_of_nn_lstm_runs(options):
    def initialised(rnn):
        for parameters in rnn.all_weights:
            for parameter in parameters:
                nn.init.ones_(parameter)
        return [len(parameters) for parameters in rnn.all_weights]

    positional = [5, 6, 1, True, False, 0.0, False, 0, "cpu", torch.float64]
    for kind in (nn.LSTM, lltm_ops.LLTM):
        rnn = kind(5, 6, proj_size=0, **options)
        count = rnn.num_layers * (2 if rnn.bidirectional else 1)
        each = (2 if rnn.bias else 1) * (2 if kind is nn.LSTM else 1)
        assert initialised(rnn) == [each] * count
        assert all((parameter == 1).all() for parameter in rnn.parameters())
        assert kind(*positional).all_weights[0][0].dtype == torch.float64


def test_names_in_the_state_dict_are_those_of_nn_lstm():
    layer, peer = layer_and_peer({"num_layers": 2, "bidirectional": True})
    ours = {name.replace("weights_", "weight_") for name in layer.state_dict()}
    theirs = {name.replace("_ih_", "_").replace("_hh_", "_") for name in peer.state_dict()}
    assert ours == theirs
    assert ours == {name.replace("weights_", "weight_") for name, _ in layer.named_parameters()}
    assert set(lltm_ops.LLTM(5, 6, bias=False).state_dict()) == {"weights_l0"}


def test_a_cell_and_a_layer_share_parameters():
    cell, layer = lltm_ops.LLTMCell(5, 6), lltm_ops.LLTM(5, 6)
    layer.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    input, h = torch.randn(3, 4, 5), None
    for x in input:
        h = cell(x, h)
    output, (h_n, c_n) = layer(input)
    torch.testing.assert_close((h_n[0], c_n[0]), h)
    torch.testing.assert_close(output[-1], h[0])


@each_device
@each_structure
@pytest.mark.parametrize("slow", [{}, {"layer_norm": True}], ids=str)
@pytest.mark.parametrize("form", ["batched", "unbatched", "packed"])
def test_resets(device, options, slow, form):
    """A reset splits a sequence in two, the second of which begins with zeros."""
    both = {"device": device, "dtype": torch.float64}
    layer = lltm_ops.LLTM(5, 6, **options, **slow, **both)
    sequence = torch.randn(7, 5, **both)
    resets = torch.arange(7, device=device) == 4
    first, second = layer(sequence[:4]), layer(sequence[4:])
    last = [part.clone() for part in second[1]]
    if layer.bidirectional:  # backwards, the first is what runs last
        for part, of_first in zip(last, first[1], strict=True):
            part[1::2] = of_first[1::2]
    expected = (torch.cat([first[0], second[0]]), tuple(last))
    if form == "unbatched":
        return assert_close(layer(sequence, None, resets), expected)
    if form == "packed":
        packed = pack_sequence([sequence, sequence[:4]])
        rows = pack_sequence([resets.float(), torch.zeros(4, device=device)]).data.bool()
        output, last = layer(packed, None, rows)
        output, _ = pad_packed_sequence(output)
        assert_close([output[:4, 1]], [first[0]])
        return assert_close((output[:, 0], tuple(part[:, 0] for part in last)), expected)
    dim = 0 if layer.batch_first else 1
    output, last = layer(
        torch.stack([sequence, sequence], dim),
        None,
        torch.stack([resets, torch.zeros_like(resets)], dim),
    )
    assert_close((output.select(dim, 0), tuple(part[:, 0] for part in last)), expected)
    assert_close([output.select(dim, 1)], [layer(sequence)[0]])


@pytest.mark.parametrize("slow", [{}, *SLOW_OPTIONS], ids=str)
@pytest.mark.parametrize(("time", "batch"), [(0, 3), (4, 0), (0, 0)])
def test_empty(slow, time, batch):
    layer = lltm_ops.LLTM(5, 6, num_layers=2, bidirectional=True, return_cells=True, **slow)
    state = state_of(layer, batch)
    input = torch.randn(time, batch, 5, requires_grad=True)
    output, last, cells = layer(input, state)
    assert output.shape == cells.shape == (time, batch, 12)
    assert sizes((output, last)) == [(time, batch, 12), (4, batch, 6), (4, batch, 6)]
    if time == 0:
        assert_close(last, state)
    assert_close(torch.autograd.grad(output.sum(), input)[0], torch.zeros_like(input))


def test_repr_names_what_differs_from_the_defaults():
    assert repr(lltm_ops.LLTM(10, 20)) == "LLTM(10, 20)"
    layer = lltm_ops.LLTM(10, 20, 2, bias=False, zoneout=0.1, bidirectional=True)
    assert repr(layer) == "LLTM(10, 20, num_layers=2, bias=False, bidirectional=True, zoneout=0.1)"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"hidden_size": 0}, ValueError, "expected hidden_size to be 1 or more, but got 0"),
        ({"num_layers": 0}, ValueError, "expected num_layers to be 1 or more, but got 0"),
        ({"proj_size": 3}, ValueError, "expected proj_size to be 0, but got 3"),
        ({"num_layers": 1.0}, TypeError, "expected num_layers to be an integer, but got float"),
        ({"dropout": 1.5}, ValueError, "expected dropout to be a number between 0 and 1, but "),
        ({"dropout": True}, ValueError, "expected dropout to be a number between 0 and 1, but "),
        ({"zoneout": -0.1}, ValueError, "expected zoneout to be .* 0 and 1, but got -0.1"),
        ({"zoneout": "0.1"}, ValueError, "expected zoneout to be .* 0 and 1, but got '0.1'"),
        ({"recurrent_dropout": float("nan")}, ValueError, "expected recurrent_dropout .* got nan"),
        ({"recurrent_dropout": None}, ValueError, "expected recurrent_dropout .* got None"),
        *(
            ({name: flag}, TypeError, f"expected {name} to be a bool, but got")
            for name in ("bias", "batch_first", "bidirectional", "return_cells", "layer_norm")
            for flag in ("False", None, 1)
        ),
        ({"variational_dropout": 0.5}, TypeError, "expected .* to be a bool, but got float"),
    ],
    ids=str,
)
def test_constructor_refuses(arguments, error, words):
    with pytest.raises(error, match=f"^lltm_ops.LLTM: {words}"):
        lltm_ops.LLTM(**{"input_size": 5, "hidden_size": 6, **arguments})


def test_dropout_with_one_layer_warns():
    with pytest.warns(UserWarning, match="dropout=0.5 is applied between layers"):
        lltm_ops.LLTM(5, 6, dropout=0.5)


def test_batch_sizes_beside_a_packed_sequence_are_refused():
    packed = pack_sequence([torch.randn(4, 5)])
    with pytest.raises(RuntimeError, match="expected no batch_sizes beside a PackedSequence"):
        lltm_ops.LLTM(5, 6)(packed, batch_sizes=packed.batch_sizes)


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4, 1), (12,)], ids=str)
@pytest.mark.parametrize("scripted", [False, True])
def test_errors_name_the_shape_of_resets_with_the_batch_first(sizes, scripted):
    layer = lltm_ops.LLTM(5, 6, batch_first=True)
    layer = torch.jit.script(layer) if scripted else layer
    words = f"LLTM: expected resets to have shape [batch, time] = [3, 4], but got {list(sizes)}"
    with pytest.raises((RuntimeError, torch.jit.Error), match=re.escape(words)):
        layer(torch.randn(3, 4, 5), None, torch.zeros(sizes, dtype=torch.bool))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sizes", [(5,), (1, 4, 3, 5)], ids=str)
def test_input_of_other_rank_is_refused(batch_first, sizes):
    with pytest.raises(ValueError, match=r"lltm_ops.LLTM: expected input to have 2 dimensions"):
        lltm_ops.LLTM(5, 6, batch_first=batch_first)(torch.randn(sizes))


# Parameters that are not where the constructor put them.


def replace_by_plain_tensor(module, name, tensor):
    delattr(module, name)
    setattr(module, name, tensor)


ZEROED = {
    "pruned": lambda module, name: prune.l1_unstructured(module, name, 1.0),
    "parametrized": lambda module, name: parametrize.register_parametrization(
        module, name, Times(0.0)
    ),
    "assigned": lambda module, name: setattr(
        module, name, nn.Parameter(torch.zeros_like(getattr(module, name)))
    ),
    "plain tensor": lambda module, name: replace_by_plain_tensor(
        module, name, torch.zeros_like(getattr(module, name))
    ),
}


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, tensor):
        return tensor * self.factor


@pytest.mark.parametrize("name", ["weights_l0", "bias_l0", "weights_l1_reverse"])
@pytest.mark.parametrize("how", ZEROED)
def test_a_parameter_is_what_its_name_says(name, how):
    layer = lltm_ops.LLTM(5, 6, num_layers=2, bidirectional=True)
    expected = copy.deepcopy(layer)
    with torch.no_grad():
        getattr(expected, name).zero_()
    ZEROED[how](layer, name)
    input = torch.randn(7, 3, 5)
    assert_close(layer(input), expected(input))


def test_layers_that_share_parameters():
    layer = lltm_ops.LLTM(6, 6, num_layers=2)
    expected = copy.deepcopy(layer)
    layer.weights_l1 = layer.weights_l0
    expected.load_state_dict(layer.state_dict())
    input = torch.randn(7, 3, 6)
    assert_close(layer(input), expected(input))


def test_a_subclass_with_parameters_of_its_own():
    class WithHead(lltm_ops.LLTM):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.scale = nn.Parameter(torch.ones(6))
            self.head = nn.Linear(6, 2)

    layer = WithHead(5, 6, num_layers=2, layer_norm=True)
    plain = lltm_ops.LLTM(5, 6, num_layers=2, layer_norm=True)
    plain.load_state_dict({name: layer.state_dict()[name] for name in plain.state_dict()})
    input = torch.randn(7, 3, 5)
    assert_close(layer(input), plain(input))


# What runs step by step.


def test_layer_norm_is_its_formula():
    layer = lltm_ops.LLTM(5, 6, layer_norm=True, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    input = torch.randn(4, 3, 5, dtype=torch.float64)
    h = cell = torch.zeros(3, 6, dtype=torch.float64)

    def normalised(values):
        centred = values - values.mean(1, keepdim=True)
        return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()

    scale = layer.layer_norm_weight_l0.view(4, 6)
    shift = layer.bias_l0.view(3, 6)
    outputs = []
    for x in input:
        products = (torch.cat([h, x], 1) @ layer.weights_l0.T).chunk(3, 1)
        gates = [normalised(products[i]) * scale[i] + shift[i] for i in range(3)]
        cell = cell + nn.functional.elu(gates[2]) * gates[0].sigmoid()
        scaled = normalised(cell) * scale[3] + layer.layer_norm_bias_l0
        h = scaled.tanh() * gates[1].sigmoid()
        outputs.append(h)
    torch.testing.assert_close(layer(input)[0], torch.stack(outputs))


def test_layer_norm_keeps_its_output_in_scale():
    """The LLTM forgets nothing, and its cell state only grows here."""
    input = torch.randn(2000, 1, 5) + 1
    plain, normalised = (lltm_ops.LLTM(5, 64, layer_norm=norm) for norm in (False, True))
    with torch.no_grad():
        assert (plain(input)[0][-1].abs() == 0).sum() + (plain(input)[1][1].abs() > 20).sum() > 10
        assert normalised(input)[0][-1].std() > 0.1


def test_zoneout():
    torch.manual_seed(0)
    layer = lltm_ops.LLTM(5, 64, zoneout=0.25, return_cells=True, dtype=torch.float64)
    input = torch.randn(50, 8, 5, dtype=torch.float64)
    output, _, cells = layer(input)
    for states in (output, cells):
        kept = (states[1:] == states[:-1]).double().mean()
        assert 0.23 < kept < 0.27
    both = (output[1:] == output[:-1]) & (cells[1:] == cells[:-1])
    assert 0.05 < both.double().mean() < 0.075  # independently: 0.25 ** 2
    layer.eval()
    output, _, cells = layer(input)
    h = cell = torch.zeros(8, 64, dtype=torch.float64)
    for t in range(5):
        new_h, new_cell = lltm_ops.reference(input[t], layer.weights_l0, layer.bias_l0, h, cell)
        h, cell = 0.25 * h + 0.75 * new_h, 0.25 * cell + 0.75 * new_cell
        torch.testing.assert_close((output[t], cells[t]), (h, cell))


def test_small_probabilities_of_zoneout_in_half_types():
    torch.manual_seed(0)
    layer = lltm_ops.LLTM(1, 4096, zoneout=0.001, dtype=torch.bfloat16)
    nn.init.ones_(layer.bias_l0)  # drawn, some are 0 exactly, and h with them
    output, _ = layer(torch.zeros(1, 64, 1, dtype=torch.bfloat16))
    assert 0.0008 < (output == 0).double().mean() < 0.0012


def test_recurrent_dropout_takes_one_mask_for_all_steps():
    torch.manual_seed(0)
    layer = lltm_ops.LLTM(5, 6, recurrent_dropout=0.5, dtype=torch.float64)
    input = torch.randn(9, 3, 5, dtype=torch.float64)
    output, _ = layer(input)
    masks = itertools.product([0.0, 2.0], repeat=6)
    found = []
    for row in range(3):
        for mask in masks if row == 0 else itertools.product([0.0, 2.0], repeat=6):
            h = cell = torch.zeros(1, 6, dtype=torch.float64)
            outputs = []
            for x in input[:, row : row + 1]:
                h, cell = lltm_ops.reference(
                    x, layer.weights_l0, layer.bias_l0, h * torch.tensor(mask), cell
                )
                outputs.append(h)
            if torch.allclose(torch.cat(outputs), output[:, row]):
                found.append(mask)
    assert len(found) == 3
    layer.eval()
    assert_close(layer(input), stacked_cells(layer, input)[:2])


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_variational_dropout_takes_one_mask_for_all_steps(form):
    """The second layer shows what it was given: its candidate is its input, its gates are open."""
    torch.manual_seed(0)
    layer = lltm_ops.LLTM(5, 8, 2, dropout=0.5, variational_dropout=True, return_cells=True)
    with torch.no_grad():
        layer.weights_l1.zero_()
        layer.weights_l1[16:, 8:] = torch.eye(8)
        layer.bias_l1.zero_()
        layer.bias_l1[:8] = 100
    sequence = torch.randn(6, 5)
    if form == "padded":
        cells = layer(torch.stack([sequence] * 3, 1))[2]
        rows = cells.diff(dim=0).unbind(1)
    else:
        packed = pack_sequence([sequence, sequence[:4], sequence[:3]])
        cells, lengths = pad_packed_sequence(layer(packed)[2])
        rows = [cells[:length, i].diff(dim=0) for i, length in enumerate(lengths)]
    dropped = torch.stack([(row == 0).all(0) for row in rows])
    assert 0 < dropped.sum() < dropped.numel()
    assert all(((row == 0) == mask).all() for row, mask in zip(rows, dropped, strict=True))
    layer.eval()
    assert (layer(sequence)[2].diff(dim=0) != 0).all()


# With the rest of PyTorch.


@each_structure
@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, "pickle"])
def test_copies(options, duplicate):
    layer = lltm_ops.LLTM(5, 6, **options)
    if HAS_TORCHSCRIPT:
        torch.jit.script(layer)  # leaves nothing behind that hinders
    other = pickle.loads(pickle.dumps(layer)) if duplicate == "pickle" else duplicate(layer)
    input = torch.randn(7, 4, 5)
    assert_close(other(input), layer(input), rtol=0, atol=0)
    assert repr(other) == repr(layer)
    if duplicate is not copy.copy:
        with torch.no_grad():
            other.weights_l0.zero_()
        assert not torch.equal(other(input)[0], layer(input)[0])


@needs_torchscript
@pytest.mark.parametrize("return_cells", [False, True])
@pytest.mark.parametrize("options", [*STRUCTURES, *SLOW_OPTIONS], ids=str)
def test_scripted_saved_loaded_and_trained(options, return_cells):
    layer = lltm_ops.LLTM(5, 6, return_cells=return_cells, **options).eval()
    attributes = set(vars(layer))
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(layer), buffer)
    assert set(vars(layer)) == attributes
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    assert loaded.state_dict().keys() == layer.state_dict().keys()
    input = torch.randn(7, 4, 5)
    batch = 7 if layer.batch_first else 4
    resets = torch.rand(7, 4) < 0.2
    for arguments in ((input,), (input, state_of(layer, batch)), (input, None, resets)):
        assert_close(loaded(*arguments), layer(*arguments), rtol=0, atol=0)
    packed = pack_sequence([torch.randn(length, 5) for length in (5, 3, 2)])
    results = layer(packed)
    expected = (results[0].data, results[1], *(cells.data for cells in results[2:]))
    assert_close(loaded(packed.data, batch_sizes=packed.batch_sizes), expected)
    for module in (layer.train(), loaded.train()):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(input)[0].square().sum().backward()
        optimizer.step()
    assert_close(loaded.state_dict().values(), layer.state_dict().values())


PARAMETRIZATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "registered": lambda module, name: parametrize.register_parametrization(
        module, name, Times(2.0)
    ),
}


@needs_torchscript
@pytest.mark.parametrize("how", PARAMETRIZATIONS)
def test_scripted_with_the_value_of_a_parametrized_parameter(how):
    layer = lltm_ops.LLTM(5, 6, num_layers=2)
    names = set(layer.state_dict())
    PARAMETRIZATIONS[how](layer, "weights_l0")
    before = copy.deepcopy(layer.state_dict()), set(vars(layer)), type(layer)
    compiled = torch.jit.script(nn.Sequential(layer))[0]
    assert_close(layer.state_dict().values(), before[0].values(), rtol=0, atol=0)
    assert (set(vars(layer)), type(layer)) == before[1:]
    assert parametrize.is_parametrized(layer, "weights_l0")
    assert set(compiled.state_dict()) == names
    layer.eval()  # in training, each call of spectral_norm changes the weights
    input = torch.randn(7, 4, 5)
    assert_close(compiled(input), layer(input), rtol=0, atol=0)
    compiled(input)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in compiled.parameters())
    assert all(parameter.grad is None for parameter in layer.parametrizations.parameters())


@each_device
@each_structure
def test_compiled_with_one_graph_for_many_lengths(device, options):
    torch._dynamo.reset()
    layer = lltm_ops.LLTM(5, 6, **options, device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for time, batch in ((7, 3), (2, 4), (40, 2)):
        input = torch.randn(time, batch, 5, device=device)
        assert_close(compiled(input), layer(input))
        for module in (compiled, layer):
            layer.zero_grad()
            output, (h_n, _) = module(input)
            (output.square().sum() + h_n.sum()).backward()
            gradients = [p.grad for p in layer.parameters()]
            if module is compiled:
                expected = gradients
        assert_close(gradients, expected)
    assert counter.frame_count <= 2  # inference, and training of the same code


@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("with_resets", [False, True])
def test_compiled_with_one_graph_for_packed_sequences(enforce_sorted, with_resets):
    torch._dynamo.reset()
    layer = lltm_ops.LLTM(5, 6, num_layers=2, bidirectional=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([7, 2, 4], [9, 3, 3, 1], [5, 5]):
        sequences = [torch.randn(length, 5) for length in lengths]
        if enforce_sorted:
            sequences.sort(key=len, reverse=True)
        packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
        resets = torch.rand(sum(lengths)) < 0.3 if with_resets else None
        arguments = packed, state_of(layer, len(lengths)), resets
        (ours, last), (exact, expected) = compiled(*arguments), layer(*arguments)
        assert_close((ours.data, last), (exact.data, expected))
        ours.data.sum().backward()
        if lengths == [7, 2, 4]:
            frames = counter.frame_count
    assert counter.frame_count == frames


def test_compiled_with_packed_sequences_and_no_state():
    torch._dynamo.reset()
    layer = lltm_ops.LLTM(5, 6)
    packed = pack_sequence([torch.randn(length, 5) for length in (7, 4, 2)])
    ours, last = torch.compile(layer, backend="aot_eager")(packed)  # its batch breaks the graph
    assert_close((ours.data, last), (layer(packed)[0].data, layer(packed)[1]))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("options", "with_resets"),
    [
        ({"bidirectional": True}, True),
        ({"num_layers": 2, "dropout": 0.5, "variational_dropout": True}, False),
    ],
    ids=str,
)
def test_compiled_by_default_with_one_graph_for_packed_sequences(
    options, with_resets, requires_grad
):
    torch._dynamo.reset()
    layer = lltm_ops.LLTM(5, 6, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter)
    for lengths in ([7, 4, 2], [9, 3, 3, 1], [5, 5], [12, 11, 3, 2, 2, 1], [2, 2], [8, 6, 1]):
        packed = pack_sequence([torch.randn(length, 5) for length in lengths])
        resets = torch.rand(sum(lengths)) < 0.3 if with_resets else None
        results = []
        for module in (compiled, layer):
            torch.manual_seed(0)
            with torch.set_grad_enabled(requires_grad):
                output, last = module(packed, state_of(layer, len(lengths)), resets)
            results.append((output.data, last))
        assert_close(*results)
    assert counter.frame_count == 2  # the first is of the sizes of the first call only


# Sizes below 2 get graphs of their own from torch.compile, but not from torch.export.
FEW_AND_MANY = [(0, 0), (0, 3), (1, 1), (1, 4), (2, 0), (2, 1), (2, 3), (30, 17)]
each_form = pytest.mark.parametrize("form", ["padded", "packed"])
each_with_resets = pytest.mark.parametrize("with_resets", [False, True])


def call_of(layer, form, with_resets, time, batch):
    """Arguments of the layer; packed, sequences end at each other step."""
    sizes = [min(batch, max(1, batch - step // 2)) for step in range(time)]
    rows = (time, batch) if form == "padded" else (sum(sizes),)
    return (
        torch.randn(*rows, 5),
        state_of(layer, time if layer.batch_first and form == "padded" else batch),
        torch.rand(rows) < 0.3 if with_resets else None,
        None if form == "padded" else torch.tensor(sizes, dtype=torch.long),
    )


def assert_holds_for_few_and_many(function, layer, form, with_resets):
    for time, batch in FEW_AND_MANY:
        arguments = call_of(layer, form, with_resets, time, batch)
        assert_close(function(*arguments), layer(*arguments))


@each_form
def test_compiled_for_few_steps_and_many(form):
    torch._dynamo.reset()
    layer = lltm_ops.LLTM(5, 6, bidirectional=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_holds_for_few_and_many(compiled, layer, form, True)


@pytest.mark.parametrize(("backend", "with_resets"), [("aot_eager", False), ("inductor", True)])
def test_compiled_with_one_graph_for_unbacked_time(backend, with_resets):
    torch._dynamo.reset()
    layer = lltm_ops.LLTM(5, 6, bidirectional=True)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for time in (7, 0, 1, 2):
        input, hx, resets, _ = call_of(layer, "padded", with_resets, time, 3)
        for tensor in (input, resets):
            if tensor is not None:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
        found = []
        for module in (compiled, layer):
            layer.zero_grad()
            output, (h_n, _) = module(input, hx, resets)
            (output.square().sum() + h_n.sum()).backward()
            found.append((output, h_n, *(parameter.grad for parameter in layer.parameters())))
        assert_close(*found)
    assert counter.frame_count == 1


def test_compiled_with_the_batch_first_for_unbacked_time():
    """Nothing says to the compiler that input and resets have the same time."""
    torch._dynamo.reset()
    layer = lltm_ops.LLTM(5, 6, batch_first=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    input, resets = torch.randn(3, 7, 5), torch.rand(3, 7) < 0.3
    for tensor in (input, resets):
        torch._dynamo.decorators.mark_unbacked(tensor, 1)
    assert_close(compiled(input, None, resets), layer(input, None, resets))


def test_packed_sequences_take_a_state_that_has_no_values():
    layer = lltm_ops.LLTM(5, 6)
    packed = pack_sequence([torch.randn(length, 5) for length in (4, 2)])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        data, batch_sizes, *state = map(mode.from_tensor, (*packed[:2], *state_of(layer, 2)))
        output, (h_n, _) = layer(PackedSequence(data, batch_sizes), tuple(state))
    assert output.data.shape == (6, 6)
    assert h_n.shape == (1, 2, 6)


class OfKept(nn.Module):
    """The layer, of those steps that a mask keeps: their number is known only when it runs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input, resets, kept):
        return self.layer(input[kept], None, resets[kept])


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_unbacked_time(strict):
    model = OfKept(lltm_ops.LLTM(5, 6, bidirectional=True))
    input, resets = torch.randn(7, 3, 5), torch.rand(7, 3) < 0.3
    arguments = input, resets, torch.arange(7) < 4
    loaded = torch.export.export(model, arguments, strict=strict).module()
    for count in (0, 1, 2, 7):
        arguments = input, resets, torch.arange(7) < count
        assert_close(loaded(*arguments), model(*arguments))


def exported(layer, form, with_resets, dimension=torch.export.Dim, strict=False):
    batch = {1: dimension("batch")}
    first = {0: dimension("time" if form == "padded" else "rows")}
    rows = {**first, **(batch if form == "padded" else {})}
    shapes = (
        rows,
        (batch, batch),
        rows if with_resets else None,
        None if form == "padded" else {0: dimension("time")},
    )
    arguments = call_of(layer, form, with_resets, 7, 3)
    return torch.export.export(layer, arguments, dynamic_shapes=shapes, strict=strict)


@each_form
@each_with_resets
@pytest.mark.parametrize("options", [STRUCTURES[0], STRUCTURES[3]], ids=str)
def test_exported_for_few_steps_and_many(options, with_resets, form, tmp_path):
    layer = lltm_ops.LLTM(5, 6, return_cells=True, **options)
    torch.export.save(exported(layer, form, with_resets), tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    assert_holds_for_few_and_many(loaded, layer, form, with_resets)


@each_form
@pytest.mark.parametrize(
    "how",
    [{"strict": True}, {"dimension": lambda name: torch.export.Dim.DYNAMIC}],
    ids=["strict", "inferred dimensions"],
)
def test_exported_in_other_ways_for_few_steps_and_many(how, form):
    layer = lltm_ops.LLTM(5, 6, num_layers=2, bidirectional=True)
    loaded = exported(layer, form, True, **how).module()
    assert_holds_for_few_and_many(loaded, layer, form, True)


RUN_PACKAGE = """
import sys, torch, lltm_ops
package, calls, results = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(package)
with torch.no_grad():
    torch.save([loaded(*arguments) for arguments in torch.load(calls)], results)
"""


@pytest.mark.slow
@each_form
def test_aot_inductor_package_for_few_steps_and_many(form, tmp_path):
    layer = lltm_ops.LLTM(5, 6, bidirectional=True)
    calls = [call_of(layer, form, True, *sizes) for sizes in FEW_AND_MANY]
    torch.save(calls, tmp_path / "calls.pt")
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            exported(layer, form, True), package_path=str(tmp_path / "layer.pt2")
        )
        expected = [layer(*arguments) for arguments in calls]
    # In a process of its own: what reads beyond its rows crashes.
    files = package, tmp_path / "calls.pt", tmp_path / "results.pt"
    subprocess.run([sys.executable, "-c", RUN_PACKAGE, *map(str, files)], check=True, timeout=300)
    for actual, exact in zip(torch.load(tmp_path / "results.pt"), expected, strict=True):
        assert_close(actual, exact)


@each_device
@each_slow_option
def test_gradients_of_what_runs_step_by_step(device, slow):
    torch.manual_seed(0)
    layer = lltm_ops.LLTM(3, 4, **slow, device=device, dtype=torch.float64)
    input = torch.randn(4, 2, 3, device=device, dtype=torch.float64, requires_grad=True)

    def call(input):
        torch.manual_seed(1)
        return layer(input)[0]

    assert torch.autograd.gradcheck(call, (input,))


@needs_torchscript
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@each_form
@each_with_resets
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("options", STRUCTURES[3:], ids=str)
def test_traced_for_few_steps_and_many(options, with_state, with_resets, form):
    layer = lltm_ops.LLTM(5, 6, **options)

    def arguments(time, batch):
        input, hx, resets, batch_sizes = call_of(layer, form, with_resets, time, batch)
        call = {"input": input, "hx": hx, "resets": resets, "batch_sizes": batch_sizes}
        given = {name: value for name, value in call.items() if value is not None}
        return given if with_state else {n: v for n, v in given.items() if n != "hx"}

    traced = torch.jit.trace(layer, example_kwarg_inputs=arguments(4, 3))
    for time, batch in FEW_AND_MANY:
        call = arguments(time, batch)
        assert_close(traced(**call), layer(**call))


class Packs(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, input, lengths: torch.Tensor):
        packed = pack_padded_sequence(input, lengths, enforce_sorted=False)
        output, state = self.rnn(packed)
        return pad_packed_sequence(output)[0], state


class PacksInTorchScript(Packs):
    def forward(self, input, lengths: torch.Tensor):
        packed = pack_padded_sequence(input, lengths, enforce_sorted=False)
        indices, unsorted = packed.sorted_indices, packed.unsorted_indices
        output, (h_n, c_n) = self.rnn(packed.data, None, None, packed.batch_sizes)
        if unsorted is not None:
            h_n, c_n = h_n.index_select(1, unsorted), c_n.index_select(1, unsorted)
        packed = PackedSequence(output, packed.batch_sizes, indices, unsorted)
        return pad_packed_sequence(packed)[0], (h_n, c_n)


@needs_torchscript
def test_a_model_that_packs_is_scripted():
    layer = lltm_ops.LLTM(5, 6)
    call = torch.randn(8, 4, 5), torch.tensor([1, 2, 8, 4])
    scripted = torch.jit.script(PacksInTorchScript(layer))
    assert_close(scripted(*call), Packs(layer)(*call))
    with pytest.raises(RuntimeError, match=r"'input' but instead found .*PackedSequence'"):
        torch.jit.script(Packs(layer))


@needs_torchscript
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_a_model_that_packs_is_traced_for_any_batch():
    model = Packs(lltm_ops.LLTM(5, 6))
    traced = torch.jit.trace(model, (torch.randn(6, 3, 5), torch.tensor([6, 2, 4])))
    for call in (
        (torch.randn(8, 4, 5), torch.tensor([1, 2, 8, 4])),
        (torch.randn(3, 1, 5), torch.tensor([3])),
    ):
        assert_close(traced(*call), model(*call))


@each_device
@pytest.mark.parametrize("slow", [{}, *SLOW_OPTIONS], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_autocast(device, slow, training):
    layer = lltm_ops.LLTM(5, 6, num_layers=2, bidirectional=True, device=device, **slow)
    layer.train(training)
    with torch.autocast(device, torch.bfloat16):
        output, (h_n, c_n) = layer(torch.randn(7, 4, 5, device=device))
        empty, state = layer(torch.randn(0, 4, 5, device=device))
    dtypes = {tensor.dtype for tensor in (output, h_n, c_n, empty, *state)}
    assert dtypes == {torch.bfloat16}


@needs_torchscript
@pytest.mark.parametrize("slow", [{}, *SLOW_OPTIONS], ids=str)
def test_autocast_of_a_scripted_layer(slow):
    layer = lltm_ops.LLTM(5, 6, **slow).eval()
    compiled = torch.jit.script(layer)
    input = torch.randn(7, 4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):  # TorchScript optimises what it has seen run
            assert_close(compiled(input), layer(input), **TOLERANCES[torch.bfloat16])


def test_learns_what_needs_memory():
    """Says at the end which of two symbols it saw at the beginning."""
    torch.manual_seed(0)
    layer, head = lltm_ops.LLTM(2, 16, batch_first=True), nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for _ in range(150):
        symbols = torch.randint(0, 2, (32,))
        input = torch.randn(32, 12, 2) * 0.1
        input[torch.arange(32), 0, symbols] += 1
        logits = head(layer(input)[1][0][0]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, symbols.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 0.5 < losses[0]


def test_the_layer_is_documented():
    for public in (lltm_ops.LLTM, lltm_ops.sequence_forward, lltm_ops.sequence_backward):
        assert len(public.__doc__) > 500
