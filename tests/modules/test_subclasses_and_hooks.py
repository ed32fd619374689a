"""What users put around the modules runs once in each mode: subclasses, hooks, parametrizations."""

import contextlib
import subprocess
import sys
from typing import Optional, Tuple  # noqa: UP035

import pytest
import torch
from common import needs_torchscript
from layers import assert_close
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import lltm_ops

ARGUMENTS = {lltm_ops.LLTM: torch.randn(5, 3, 4), lltm_ops.LLTMCell: torch.randn(3, 4)}
each_kind = pytest.mark.parametrize("kind", ARGUMENTS, ids=lambda kind: kind.__name__)


class Model(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, input):
        return self.rnn(input)


MODES = {
    "eager": lambda model, input: model,
    "fx": lambda model, input: torch.fx.symbolic_trace(model),
    "compiled": lambda model, input: torch.compile(model, backend="aot_eager", fullgraph=True),
    "exported": lambda model, input: torch.export.export(model, (input,)).module(),
    "exported strictly": lambda model, input: torch.export.export(
        model, (input,), strict=True
    ).module(),
    "traced": lambda model, input: torch.jit.trace(model, (input,), check_trace=False),
}
each_mode = pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=needs_torchscript if m == "traced" else ()) for m in MODES]
)


def doubling(base):
    class Doubling(base):
        def forward(self, input, hx=None):
            first, *rest = super().forward(input / 2, hx)
            return 2 * first, *rest

    return Doubling


def halve_input(module, args):
    return args[0] / 2, *args[1:]


def double_first(module, args, results):
    return 2 * results[0], *results[1:]


def hooked(base):
    def make(*args, **options):
        module = base(*args, **options)
        module.register_forward_pre_hook(halve_input)
        module.register_forward_hook(double_first)
        return module

    return make


@each_mode
@each_kind
@pytest.mark.parametrize("changed", [doubling, hooked])
def test_what_stands_around_forward_runs_once(changed, kind, mode):
    torch._dynamo.reset()
    input, plain = ARGUMENTS[kind], kind(4, 6)
    model = Model(changed(kind)(4, 6))
    model.rnn.load_state_dict(plain.state_dict())
    first, *rest = plain(input / 2)
    assert_close(MODES[mode](model, input)(input), (2 * first, *rest))


@each_kind
def test_compiled_subclasses_share_no_limit_of_recompilations(kind):
    torch._dynamo.reset()
    input = ARGUMENTS[kind]
    for factor in range(torch._dynamo.config.recompile_limit + 2):
        source = f"lambda self, input: {factor} * kind.forward(self, input)[0]"
        subclass = type("Subclass", (kind,), {"forward": eval(source, {"kind": kind})})
        module = subclass(4, 6)
        assert_close(torch.compile(module, backend="eager", fullgraph=True)(input), module(input))


def test_a_hook_of_a_compiled_module_may_do_what_cannot_be_traced():
    layer, input = lltm_ops.LLTM(4, 6), ARGUMENTS[lltm_ops.LLTM]
    sums = []
    layer.register_forward_hook(lambda module, args, results: sums.append(results[0].sum().item()))
    torch.compile(layer, backend="eager", fullgraph=True)(input)
    assert len(sums) == 1


@each_kind
@pytest.mark.parametrize("changed", [doubling, hooked])
def test_torch_fx_calls_a_module_with_the_arguments_of_its_user(changed, kind):
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = changed(kind)(4, 6)

        def forward(self, input, hx):
            return self.rnn(input, hx=hx)

    traced = torch.fx.symbolic_trace(Calls())
    (node,) = (node for node in traced.graph.nodes if node.op == "call_module")
    assert (len(node.args), list(node.kwargs)) == (1, ["hx"])


State = Optional[Tuple[torch.Tensor, torch.Tensor]]
CellInput = Tuple[torch.Tensor, State]
LayerInput = Tuple[torch.Tensor, State, Optional[torch.Tensor], Optional[torch.Tensor]]


def halve_cell(self, input: CellInput) -> CellInput:
    return input[0] / 2, input[1]


def double_cell(self, input: CellInput, output: Tuple[torch.Tensor, torch.Tensor]):
    return 2 * output[0], output[1]


def halve_layer(self, input: LayerInput) -> LayerInput:
    return input[0] / 2, input[1], input[2], input[3]


def double_layer(
    self, input: LayerInput, output: Tuple[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
):
    return 2 * output[0], output[1]


class CallsCell(Model):
    def forward(self, input):
        return self.rnn(input, None)


class CallsLayer(Model):
    def forward(self, input):
        return self.rnn(input, None, None, None)


@needs_torchscript
@pytest.mark.parametrize(
    ("kind", "caller", "pre_hook", "hook"),
    [
        (lltm_ops.LLTMCell, CallsCell, halve_cell, double_cell),
        (lltm_ops.LLTM, CallsLayer, halve_layer, double_layer),
    ],
)
def test_scripted_hooks_run_once(kind, caller, pre_hook, hook):
    """With hooks, TorchScript wants all arguments from the caller."""
    input, module = ARGUMENTS[kind], kind(4, 6)
    first, second = module(input / 2)
    module.register_forward_pre_hook(pre_hook)
    module.register_forward_hook(hook)
    assert_close(torch.jit.script(caller(module))(input), (2 * first, second))


@each_kind
def test_a_subclass_may_use_any_private_name(kind):
    """Names of nn.Module are taken, and those that begin with the name of the package."""
    for_torchscript = {"__constants__", "__jit_unused_properties__", "__prepare_scriptable__"}
    taken = set(dir(nn.Module())) | for_torchscript
    names = {name for name in dir(kind(4, 6)) if name.startswith("_")} - taken
    assert not [name for name in names if not name.startswith("_lltm_")]


@each_kind
def test_a_subclass_may_use_the_name_of_an_argument(kind):
    class Placed(kind):
        @property
        def dtype(self):
            return next(self.parameters()).dtype

        def device(self):
            return next(self.parameters()).device

    assert repr(Placed(4, 6, bias=False)) == "Placed(4, 6, bias=False)"


def with_lengths(base):
    class WithLengths(base):
        def forward(self, x, hx=None, lengths=None, enforce_sorted=True):
            packed = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
            output, state = super().forward(packed, hx)
            return pad_packed_sequence(output)[0], state

    return WithLengths


def of_packed(base):
    class OfPacked(base):
        def forward(self, input, hx=None):
            if isinstance(input, PackedSequence):
                input = input._replace(data=input.data / 2)
            output, (h_n, c_n) = super().forward(input, hx)
            return output, (h_n.transpose(0, 1), c_n.transpose(0, 1))

    return OfPacked


@pytest.mark.parametrize("lengths", [[5, 3, 2], [2, 5, 3]], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("with_state", [False, True])
def test_subclasses_of_nn_lstm_are_right_with_packed_sequences(lengths, with_state):
    """The same source, on nn.LSTM and on LLTM, does the same to the plain layer."""
    input = torch.randn(5, 3, 4)
    for base in (nn.LSTM, lltm_ops.LLTM):
        plain = base(4, 6, num_layers=2)
        state = (torch.randn(2, 3, 6), torch.randn(2, 3, 6)) if with_state else None
        is_sorted = lengths[0] == 5
        padded, own = with_lengths(base)(4, 6, num_layers=2), of_packed(base)(4, 6, num_layers=2)
        for module in (padded, own):
            module.load_state_dict(plain.state_dict())
        packed = pack_padded_sequence(input, lengths, enforce_sorted=is_sorted)
        output, last = plain(packed, state)
        assert_close(
            padded(input, state, lengths, is_sorted), (pad_packed_sequence(output)[0], last)
        )
        output, (h_n, c_n) = plain(packed._replace(data=packed.data / 2), state)
        actual, transposed = own(packed, state)
        assert_close(
            (actual.data, *transposed), (output.data, h_n.transpose(0, 1), c_n.transpose(0, 1))
        )


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("reads", torch.zeros((), dtype=torch.long))

    def forward(self, tensor):
        self.reads.add_(1)
        return tensor.clone()


def reads(module):
    return [int(buffer) for name, buffer in module.named_buffers() if name.endswith("reads")]


OPTIONS = [
    (lltm_ops.LLTMCell, {}),
    (lltm_ops.LLTMCell, {"bias": False}),
    (lltm_ops.LLTM, {"bias": False}),
    (lltm_ops.LLTM, {"num_layers": 2, "bidirectional": True}),
    (lltm_ops.LLTM, {"layer_norm": True}),
    (lltm_ops.LLTM, {"zoneout": 0.1, "recurrent_dropout": 0.1}),
]


@each_mode
@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_each_parameter_is_read_once_a_call(kind, options, mode):
    torch._dynamo.reset()
    model, input = Model(kind(4, 6, **options)), ARGUMENTS[kind]
    for name, _ in list(model.rnn.named_parameters()):
        parametrize.register_parametrization(model.rnn, name, Counting())
    run = MODES[mode](model, input)
    before = reads(run)
    run(input)
    after = reads(run)
    assert before and after == [count + 1 for count in before]
    repr(run)
    assert reads(run) == after


@each_kind
@pytest.mark.parametrize("wrong", ["features", "dtype"])
def test_each_parameter_is_read_at_most_once_in_a_call_that_fails(kind, wrong):
    module = kind(4, 6)
    for name, _ in list(module.named_parameters()):
        parametrize.register_parametrization(module, name, Counting())
    before = reads(module)
    input = ARGUMENTS[kind]
    with contextlib.suppress(RuntimeError, ValueError):
        module(input.double() if wrong == "dtype" else torch.cat([input, input], -1))
    assert all(after <= count + 1 for after, count in zip(reads(module), before, strict=True))


MEMORY = """
import resource, torch
from torch.nn.utils.rnn import PackedSequence
import lltm_ops
steps, batch = 60_000, 1_500  # one long sequence, and 1,499 of a single step
sizes = torch.ones(steps, dtype=torch.long)
sizes[0] = batch
layer = lltm_ops.LLTM(4, 8, bidirectional=True)
data, resets = torch.randn(int(sizes.sum()), 4), torch.rand(int(sizes.sum())) < 0.1
def run(rows, sizes):
    layer(PackedSequence(data[:rows], sizes), None, resets[:rows])[0].data.sum().backward()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
run(batch + 9, sizes[:10])
before = peak()
run(len(data), sizes)
print(peak() - before)  # longest length times batch would be 90 million elements
"""


def test_memory_of_a_packed_sequence_follows_its_rows():
    run = subprocess.run([sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True)
    assert float(run.stdout) < 120  # MiB; each of the 61,499 rows needs less than 1 KiB
