"""LLTM in graphs: scripted, traced, compiled, exported, packaged, for few steps and many."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from common import TOLERANCES, each_device, needs_torchscript
from layers import (
    SLOW_OPTIONS,
    STRUCTURES,
    Times,
    assert_close,
    call_of,
    each_form,
    each_structure,
    each_with_resets,
    state_of,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import lltm_ops


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
    assert_close(loaded.state_dict(), layer.state_dict())


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
    assert_close(layer.state_dict(), before[0], rtol=0, atol=0)
    assert (set(vars(layer)), type(layer)) == before[1:]
    assert parametrize.is_parametrized(layer, "weights_l0")
    assert set(compiled.state_dict()) == names
    layer.eval()  # in training, each call of spectral_norm changes the weights
    input = torch.randn(7, 4, 5)
    assert_close(compiled(input), layer(input), rtol=0, atol=0)
    compiled(input)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in compiled.parameters())
    assert all(parameter.grad is None for parameter in layer.parametrizations.parameters())


def results_and_gradients(layer, call, *arguments):
    output, (h_n, _) = call(*arguments)
    loss = output.square().sum() + h_n.sum()
    return [output, h_n, *torch.autograd.grad(loss, [*layer.parameters()])]


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
        assert_close(*(results_and_gradients(layer, call, input) for call in (compiled, layer)))
    assert counter.frame_count <= 2  # inference, and training of the same code


@pytest.mark.parametrize(
    ("options", "with_resets", "requires_grad"),
    [
        ({"bidirectional": True}, True, True),
        ({"num_layers": 2, "dropout": 0.5, "variational_dropout": True}, False, False),
    ],
    ids=["trains", "infers"],
)
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "by default"])
@pytest.mark.parametrize("enforce_sorted", [True, False], ids=["sorted", "unsorted"])
def test_compiled_with_one_graph_for_packed_sequences(
    enforce_sorted, dynamic, options, with_resets, requires_grad
):
    torch._dynamo.reset()
    layer = lltm_ops.LLTM(5, 6, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=bool(dynamic), dynamic=dynamic)
    for lengths in ([7, 4, 2], [9, 3, 3, 1], [5, 5], [12, 11, 3, 2, 2, 1], [2, 2], [1, 8, 6]):
        lengths = sorted(lengths, reverse=True) if enforce_sorted else lengths
        sequences = [torch.randn(length, 5) for length in lengths]
        packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
        resets = torch.rand(sum(lengths)) < 0.3 if with_resets else None
        arguments = packed, state_of(layer, len(lengths)), resets
        results = []
        for module in (compiled, layer):
            torch.manual_seed(0)
            with torch.set_grad_enabled(requires_grad):
                output, last = module(*arguments)
            results.append((output.data, last))
            if requires_grad:
                output.data.sum().backward()
        assert_close(*results)
    # The first call makes both, or by default one of its own sizes only.
    assert counter.frame_count == 2


# Sizes below 2 get graphs of their own from torch.compile, but not from torch.export.
FEW_AND_MANY = [(0, 0), (0, 3), (1, 1), (1, 4), (2, 0), (2, 1), (2, 3), (30, 17)]


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


@pytest.mark.parametrize(
    ("backend", "with_resets", "batch_first"),
    [("aot_eager", False, False), ("aot_eager", True, True), ("inductor", True, False)],
)
def test_compiled_with_one_graph_for_unbacked_time(backend, with_resets, batch_first):
    """Nothing says to the compiler that input and resets have the same time."""
    torch._dynamo.reset()
    layer = lltm_ops.LLTM(5, 6, bidirectional=True, batch_first=batch_first)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for time in (7, 0, 1, 2):
        input, hx, resets, _ = call_of(layer, "padded", with_resets, time, 3)
        for tensor in (input, resets):
            if tensor is not None:
                torch._dynamo.decorators.mark_unbacked(tensor, int(batch_first))
        calls = (compiled, layer)
        assert_close(*(results_and_gradients(layer, call, input, hx, resets) for call in calls))
    # With the batch first, the time is among the strides, which are others where it is 0.
    assert counter.frame_count == 1 + batch_first


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
@pytest.mark.parametrize(
    "how",
    [{}, {"strict": True}, {"dimension": lambda name: torch.export.Dim.DYNAMIC}],
    ids=["named dimensions", "strict", "inferred dimensions"],
)
def test_exported_for_few_steps_and_many(how, with_resets, form, tmp_path):
    layer = lltm_ops.LLTM(5, 6, return_cells=True, **STRUCTURES[3])
    torch.export.save(exported(layer, form, with_resets, **how), tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    assert_holds_for_few_and_many(loaded, layer, form, with_resets)


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
    assert_close(torch.load(tmp_path / "results.pt"), expected)


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


@needs_torchscript
@pytest.mark.parametrize("slow", [{}, *SLOW_OPTIONS], ids=str)
def test_autocast_of_a_scripted_layer(slow):
    layer = lltm_ops.LLTM(5, 6, **slow).eval()
    compiled = torch.jit.script(layer)
    input = torch.randn(7, 4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):  # TorchScript optimises what it has seen run
            assert_close(compiled(input), layer(input), **TOLERANCES[torch.bfloat16])
