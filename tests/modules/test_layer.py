"""LLTM behaves like nn.LSTM, computes what a stack of cells computes, and does what else users of
recurrent layers ask for."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from common import HAS_TORCHSCRIPT, each_device, sequence_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import (
    SLOW_OPTIONS,
    STRUCTURES,
    Times,
    assert_close,
    each_structure,
    state_of,
)
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, unpack_sequence

import lltm_ops

LENGTHS = [4, 7, 1, 7]


def layer_and_peer(options, **both):
    peer_options = {name: value for name, value in options.items() if name != "bias"}
    return lltm_ops.LLTM(5, 6, **options, **both), nn.LSTM(5, 6, **peer_options, **both)


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


@each_structure
def test_attributes_that_programs_read_are_those_of_nn_lstm(options):
    layer, peer = lltm_ops.LLTM(5, 6, **options), nn.LSTM(5, 6, **options)
    names = "input_size hidden_size num_layers bias batch_first dropout bidirectional proj_size"
    for name in names.split():
        assert getattr(layer, name) == getattr(peer, name)
    # nn.LSTM has two tensors of weights and two of bias.
    assert [2 * len(parameters) for parameters in layer.all_weights] == [
        len(parameters) for parameters in peer.all_weights
    ]
    everything = [parameter for parameters in layer.all_weights for parameter in parameters]
    assert set(map(id, everything)) == set(map(id, layer.parameters()))


def stacked_cells(layer, sequence, state, resets):
    """Output, h_n, c_n and cells of one sequence, out of the reference."""
    parameters = dict(layer.named_parameters())
    directions = 2 if layer.bidirectional else 1
    input, last = sequence.unsqueeze(1), []
    for index in range(layer.num_layers):
        results = []
        for direction, suffix in enumerate(["", "_reverse"][:directions]):
            weights = parameters[f"weights_l{index}{suffix}"]
            bias = parameters.get(f"bias_l{index}{suffix}", weights.new_zeros(len(weights)))
            initial = (part[index * directions + direction].unsqueeze(0) for part in state)
            reverse = suffix == "_reverse"
            if reverse and resets is not None:  # an episode that begins at a step ends before it
                begins = torch.cat([resets[1:], resets[:1] & False])
            else:
                begins = resets
            states = sequence_reference(input, weights, bias, *initial, None, reverse, begins)[:2]
            results.append(states)
            last.append([of_steps[0 if reverse else -1, 0] for of_steps in states])
        input, cells = (torch.cat(tensors, 2) for tensors in zip(*results, strict=True))
    return input[:, 0], *map(torch.stack, zip(*last, strict=True)), cells[:, 0]


def results_of_each(layer, form, sequences, state, resets):
    """Output, h_n, c_n and cells of each sequence, by one call in that form."""
    if form == "unbatched":
        state = tuple(part[:, 0] for part in state) if state else None
        output, last, cells = layer(sequences[0], state, resets and resets[0])
        return [(output, *last, cells)]
    if form in ("padded", "batch_first"):
        dim = 0 if layer.batch_first else 1
        resets = resets and torch.stack(resets, dim)
        output, last, cells = layer(torch.stack(sequences, dim), state, resets)
        each = output.unbind(dim), cells.unbind(dim)
    else:
        packed = pack_sequence(sequences, enforce_sorted=form != "unsorted")
        resets = resets and pack_sequence(resets, enforce_sorted=form != "unsorted").data
        if form == "batch_sizes":
            output, last, cells = layer(packed.data, state, resets, packed.batch_sizes)
            output, cells = packed._replace(data=output), packed._replace(data=cells)
        else:
            output, last, cells = layer(packed, state, resets)
        assert isinstance(output, PackedSequence) and isinstance(cells, PackedSequence)
        each = unpack_sequence(output), unpack_sequence(cells)
    return list(zip(each[0], *(part.unbind(1) for part in last), each[1], strict=True))


@each_device
@pytest.mark.parametrize(
    "form", ["padded", "batch_first", "unbatched", "sorted", "unsorted", "batch_sizes"]
)
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(
    options=st.fixed_dictionaries(
        {"num_layers": st.integers(1, 3), "bidirectional": st.booleans(), "bias": st.booleans()}
    ),
    slow=st.sampled_from([{}, {}, {"layer_norm": True}, {"zoneout": 0.3}]),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    with_state=st.booleans(),
    with_resets=st.booleans(),
    used=st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
)
def test_any_layer_is_a_stack_of_cells(
    device, form, options, slow, lengths, with_state, with_resets, used
):
    """In each form of a call, and with all its gradients. What runs step by step, of which other
    tests have the formulas, gives what it gives each sequence alone."""
    both = {"device": device, "dtype": torch.float64}
    layer = lltm_ops.LLTM(
        5, 6, batch_first=form == "batch_first", return_cells=True, **options, **slow, **both
    ).eval()
    if form in ("padded", "batch_first"):
        lengths = lengths[:1] * len(lengths)
    elif form != "unsorted":
        lengths = sorted(lengths, reverse=True)[: 1 if form == "unbatched" else None]
    sequences = [torch.randn(length, 5, **both, requires_grad=True) for length in lengths]
    given = state_of(layer, len(lengths), **both, requires_grad=True)
    resets = [torch.rand(length, device=device) < 0.3 for length in lengths]
    state, resets = given if with_state else None, resets if with_resets else None
    ours = results_of_each(layer, form, sequences, state, resets)
    expected = []
    for i, sequence in enumerate(sequences):
        own = [part[:, i] if with_state else torch.zeros_like(part[:, i]) for part in given]
        begins = resets and resets[i]
        if slow:
            own = [part.unsqueeze(1) for part in own]
            begins = begins if begins is None else [begins]
            expected += results_of_each(layer, "unbatched", [sequence], own, begins)
        else:
            expected.append(stacked_cells(layer, sequence, own, begins))
    assert_close(ours, expected)
    leaves = [*sequences, *layer.parameters(), *(given if with_state else ())]

    def gradients(results):
        chosen = [t for each in results for t, wanted in zip(each, used, strict=True) if wanted]
        loss = sum(tensor.sin().sum() for tensor in chosen)
        return torch.autograd.grad(loss, leaves, materialize_grads=True)

    assert_close(gradients(ours), gradients(expected))


def test_arguments_are_named_as_those_of_nn_lstm():
    layer, cell = lltm_ops.LLTM(5, 6), lltm_ops.LLTMCell(5, 6)
    input, hx = torch.randn(7, 3, 5), state_of(layer, 3)
    assert_close(layer(input=input, hx=hx), layer(input, hx), rtol=0, atol=0)
    step = input[0], (hx[0][0], hx[1][0])
    assert_close(cell(input=step[0], hx=step[1]), cell(*step), rtol=0, atol=0)
    positional = lltm_ops.LLTM(5, 6, 1, True, False, 0.0, False, 0, "meta", torch.float64)
    assert positional.weights_l0.dtype == torch.float64
    assert positional.weights_l0.is_meta


def test_names_in_the_state_dict_are_those_of_nn_lstm():
    layer, peer = layer_and_peer({"num_layers": 2, "bidirectional": True})
    ours = {name.replace("weights_", "weight_") for name in layer.state_dict()}
    theirs = {name.replace("_ih_", "_").replace("_hh_", "_") for name in peer.state_dict()}
    assert ours == theirs
    assert ours == {name.replace("weights_", "weight_") for name, _ in layer.named_parameters()}
    assert set(lltm_ops.LLTM(5, 6, bias=False).state_dict()) == {"weights_l0"}


def test_parameters_are_drawn_as_those_of_nn_lstm():
    for parameter in lltm_ops.LLTM(5, 100, 2).parameters():
        assert 0.095 < parameter.abs().max() <= 0.1


@each_structure
@pytest.mark.parametrize("slow", [{}, {"layer_norm": True}], ids=str)
def test_resets(options, slow):
    """A reset splits a sequence in two, the second of which begins with zeros."""
    layer = lltm_ops.LLTM(5, 6, **options, **slow, dtype=torch.float64)
    sequence = torch.randn(7, 5, dtype=torch.float64)
    first, second = layer(sequence[:4]), layer(sequence[4:])
    last = [part.clone() for part in second[1]]
    if layer.bidirectional:  # backwards, the first is what runs last
        for part, of_first in zip(last, first[1], strict=True):
            part[1::2] = of_first[1::2]
    expected = (torch.cat([first[0], second[0]]), tuple(last))
    assert_close(layer(sequence, None, torch.arange(7) == 4), expected)


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
    for kind in (lltm_ops.LLTM, lltm_ops.LLTMCell):
        assert repr(kind(10, 20)) == f"{kind.__name__}(10, 20)"
        assert repr(kind(10, 20, bias=False)) == f"{kind.__name__}(10, 20, bias=False)"
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
        ({"zoneout": -0.1}, ValueError, "expected zoneout to be .* 0 and 1, but got -0.1"),
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


@pytest.mark.parametrize("scripted", [False, True])
def test_errors_name_the_shape_of_resets_with_the_batch_first(scripted):
    layer = lltm_ops.LLTM(5, 6, batch_first=True)
    layer = torch.jit.script(layer) if scripted else layer
    words = "LLTM: expected resets to have shape [batch, time] = [3, 4], but got [4, 3]"
    with pytest.raises((RuntimeError, torch.jit.Error), match=re.escape(words)):
        layer(torch.randn(3, 4, 5), None, torch.zeros(4, 3, dtype=torch.bool))


# Parameters that are not where the constructor put them.


ZEROED = {
    "pruned": lambda module, name: prune.l1_unstructured(module, name, 1.0),
    "parametrized": lambda module, name: parametrize.register_parametrization(
        module, name, Times(0.0)
    ),
    "assigned": lambda module, name: setattr(
        module, name, nn.Parameter(torch.zeros_like(getattr(module, name)))
    ),
}


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
    found = []
    for row in range(3):
        for mask in itertools.product([0.0, 2.0], repeat=6):
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
    plain = lltm_ops.LLTM(5, 6, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    assert_close(layer.eval()(input), plain(input))


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


@pytest.mark.parametrize(
    "layer", [lltm_ops.LLTMCell(5, 6), *(lltm_ops.LLTM(5, 6, **o) for o in STRUCTURES)], ids=str
)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, "pickle"])
def test_copies(layer, duplicate):
    if HAS_TORCHSCRIPT:
        torch.jit.script(layer)  # leaves nothing behind that hinders
    other = pickle.loads(pickle.dumps(layer)) if duplicate == "pickle" else duplicate(layer)
    input = torch.randn(7, 5)
    assert_close(other(input), layer(input), rtol=0, atol=0)
    assert repr(other) == repr(layer)
    if duplicate is not copy.copy:
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert not torch.equal(other(input)[0], layer(input)[0])


@each_device
@pytest.mark.parametrize("slow", SLOW_OPTIONS, ids=str)
def test_gradients_of_what_runs_step_by_step(device, slow):
    torch.manual_seed(0)
    layer = lltm_ops.LLTM(3, 4, **slow, device=device, dtype=torch.float64)
    input = torch.randn(4, 2, 3, device=device, dtype=torch.float64, requires_grad=True)

    def call(input):
        torch.manual_seed(1)
        return layer(input)[0]

    assert torch.autograd.gradcheck(call, (input,))


@each_device
@pytest.mark.parametrize("slow", [{}, *SLOW_OPTIONS], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_autocast(device, slow, training):
    layer = lltm_ops.LLTM(5, 6, num_layers=2, bidirectional=True, device=device, **slow)
    layer.train(training)
    with torch.autocast(device, torch.bfloat16):
        output, state = layer(torch.randn(7, 4, 5, device=device))
        half = tuple(part.half() for part in state)
        results = [output, *state]
        for steps in (0, 7):
            output, state = layer(torch.randn(steps, 4, 5, device=device).bfloat16(), half)
            results += [output, *state]
    dtypes = {tensor.dtype for tensor in results}
    assert dtypes == {torch.bfloat16}
