"""What users put around the modules runs once in each mode: subclasses, hooks, parametrizations."""

import subprocess
import sys
from typing import Optional, Tuple  # noqa: UP035

import pytest
import torch
from common import needs_torchscript
from layers import assert_close
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_sequence

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


State = Tuple[torch.Tensor, torch.Tensor]
LayerInput = Tuple[torch.Tensor, Optional[State], Optional[torch.Tensor], Optional[torch.Tensor]]


def halve_layer(self, input: LayerInput) -> LayerInput:
    return input[0] / 2, input[1], input[2], input[3]


def double_layer(self, input: LayerInput, output: Tuple[torch.Tensor, State]):
    return 2 * output[0], output[1]


class CallsLayer(Model):
    def forward(self, input):
        return self.rnn(input, None, None, None)


@needs_torchscript
def test_scripted_hooks_run_once():
    """With hooks, TorchScript wants all arguments from the caller."""
    input, layer = ARGUMENTS[lltm_ops.LLTM], lltm_ops.LLTM(4, 6)
    output, state = layer(input / 2)
    layer.register_forward_pre_hook(halve_layer)
    layer.register_forward_hook(double_layer)
    assert_close(torch.jit.script(CallsLayer(layer))(input), (2 * output, state))


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


class Halving(lltm_ops.LLTM):
    def forward(self, input, hx=None):
        return super().forward(input._replace(data=input.data / 2), hx)


def test_a_subclass_may_change_a_packed_sequence():
    layer, halving = lltm_ops.LLTM(4, 6), Halving(4, 6)
    halving.load_state_dict(layer.state_dict())
    packed = pack_sequence([torch.randn(n, 4) for n in (2, 5, 3)], enforce_sorted=False)
    state = torch.randn(1, 3, 6), torch.randn(1, 3, 6)
    assert_close(halving(packed, state), layer(packed._replace(data=packed.data / 2), state))


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
