"""Rows of docs/works_with.md that no other file is about: cell and layer give, inside of other
parts of PyTorch, what they give alone."""

import io
import subprocess
import sys

import pytest
import torch
from layers import SLOW_OPTIONS
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_simple, aot_export_module
from torch._higher_order_ops import map as map_
from torch._higher_order_ops import while_loop
from torch.export.experimental import _export_forward_backward
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_sequence
from torch.package import PackageExporter, PackageImporter

import lltm_ops


@pytest.fixture
def cell():
    torch._dynamo.reset()
    return lltm_ops.LLTMCell(5, 4)


@pytest.fixture
def layer():
    torch._dynamo.reset()
    return lltm_ops.LLTM(5, 4, num_layers=2, bidirectional=True)


INPUT = torch.randn(6, 3, 5)
# Two layers in two directions call each operator four times.
FORWARD_AND_BACKWARD = ["lltm._sequence_forward_with_gates.default"] * 4 + [
    "lltm.sequence_backward.default"
] * 4
STATE = torch.randn(3, 4), torch.randn(3, 4)
assert_close = torch.testing.assert_close


def results(module, call):
    """Output and gradients of a module that is called by call."""
    module.zero_grad()
    output = call(INPUT)[0]
    output.square().sum().backward()
    return [output, *(parameter.grad for parameter in module.parameters())]


def operators_of(graph):
    return [str(node.target) for node in graph.nodes if "lltm" in str(node.target)]


@pytest.mark.parametrize("option", ["cpp_wrapper", "freezing"])
def test_options_of_inductor(layer, option):
    with torch._inductor.config.patch({option: True}):
        compiled = torch.compile(layer)
        with torch.no_grad():
            assert_close(compiled(INPUT), layer(INPUT))
        if option == "cpp_wrapper":
            assert_close(results(layer, compiled), results(layer, layer))


each_runner = pytest.mark.parametrize(
    "run", [lambda function: function, torch.compile], ids=["eager", "compiled"]
)


@each_runner
@pytest.mark.parametrize("sign", [1, -1])
def test_cond(cell, run, sign):
    def step(input):
        def takes(input, h, c):
            return tuple(state.clone() for state in cell(input, (h, c)))

        def skips(input, h, c):
            return h * cell.bias[0], c.clone()

        return torch.cond(input.sum() > 0, takes, skips, (input, *STATE))

    input = torch.full((3, 5), float(sign))
    expected = cell(input, STATE) if sign > 0 else (STATE[0] * cell.bias[0], STATE[1])
    actual = run(step)(input)
    assert_close(actual, expected)
    assert_close(*(torch.autograd.grad(h.sum(), cell.bias) for h, _ in (actual, expected)))


@each_runner
def test_while_loop(cell, run):
    weights, bias = cell.weights.detach(), cell.bias.detach()

    def loop(h, c):
        def step(i, h, c):
            return i + 1, *lltm_ops.forward(INPUT[0], weights, bias, h, c)

        return while_loop(lambda i, h, c: i < 4, step, (torch.tensor(0), h, c))[1:]

    state = STATE
    for _ in range(4):
        state = cell(INPUT[0], state)
    assert_close(run(loop)(*STATE), tuple(t.detach() for t in state))


@torch.no_grad()
def test_map(cell):
    def every_step(input):
        return map_(lambda x: cell(x, STATE)[0].clone(), input)

    compiled = torch.compile(every_step, backend="aot_eager", fullgraph=True)
    assert_close(compiled(INPUT), torch.stack([cell(x, STATE)[0] for x in INPUT]))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(layer, mode):
    parameters = dict(layer.named_parameters())

    def run(input, parameters):
        return torch.func.functional_call(layer, parameters, (input,))[0]

    graph = make_fx(run, tracing_mode=mode)(INPUT, parameters)
    assert operators_of(graph.graph) == ["lltm._sequence_forward_with_gates.default"] * 4
    longer = INPUT if mode != "symbolic" else torch.randn(9, 2, 5)
    assert_close(graph(longer, parameters), layer(longer)[0])


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("options", [{}, *SLOW_OPTIONS], ids=str)
def test_linearize_a_packed_sequence(options):
    """The lengths are constants of the linear map."""
    packed = pack_sequence([torch.randn(length, 5) for length in (3, 1)])
    layer = lltm_ops.LLTM(5, 4, **options).eval()

    def run(data):
        return layer(packed._replace(data=data))[0].data

    tangent = torch.randn_like(packed.data)
    output, linear = torch.func.linearize(run, packed.data)
    expected = torch.func.jvp(run, (packed.data,), (tangent,))
    assert_close((output, linear(tangent)), expected)


def test_functionalize(layer):
    assert_close(torch.func.functionalize(layer)(INPUT), layer(INPUT))


def test_joint_export(layer):
    parameters = dict(layer.named_parameters())

    def run(input, *values):
        named = dict(zip(parameters, values, strict=True))
        return (torch.func.functional_call(layer, named, (input,))[0],)

    graph = aot_export_joint_simple(run, (INPUT, *parameters.values()), trace_joint=True)
    assert operators_of(graph.graph) == FORWARD_AND_BACKWARD


class SumOfSquares(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input):
        return (self.layer(input)[0].square().sum(),)


def test_joint_export_of_a_loss(layer):
    """Both functionalize a graph that has been traced already, with gradients on."""
    model = SumOfSquares(layer)
    graph, _ = aot_export_module(model, (INPUT,), trace_joint=True, output_loss_index=0)
    assert operators_of(graph.graph) == FORWARD_AND_BACKWARD
    program = _export_forward_backward(torch.export.export(model, (INPUT,)))
    assert operators_of(program.graph) == FORWARD_AND_BACKWARD


class Tagged(torch.Tensor):
    """It stands for the tensors of torchvision, MONAI and fastai."""


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("named", ["layer", "resets", "packed", "options", "cell"])
def test_subclasses_of_tensor(layer, cell, named, compiles):
    """Dynamo traces their __torch_function__, which not every function of PyTorch bears."""
    state = torch.randn(4, 3, 4), torch.randn(4, 3, 4)
    module, *arguments = {
        "layer": (layer, INPUT),
        "resets": (layer, INPUT, None, torch.rand(6, 3) < 0.3),
        "packed": (layer, INPUT[:, 0], state, torch.rand(6) < 0.3, torch.tensor([3, 2, 1])),
        "options": (lltm_ops.LLTM(5, 4, layer_norm=True, zoneout=0.1).eval(), INPUT),
        "cell": (cell, INPUT[0]),
    }[named]
    expected = module(*arguments)[0]
    call = torch.compile(module, backend="eager", fullgraph=True) if compiles else module
    result = call(arguments[0].as_subclass(Tagged), *arguments[1:])[0]
    assert type(result) is Tagged
    assert_close(result.as_subclass(torch.Tensor), expected)
    first = next(module.parameters())
    (gradient,) = torch.autograd.grad(result.square().sum(), first)
    assert_close(gradient, *torch.autograd.grad(expected.square().sum(), first))


def test_an_unflattened_export_trains(layer):
    model = nn.Sequential(layer)
    unflattened = torch.export.unflatten(torch.export.export(model, (INPUT,)))
    assert [name for name, _ in unflattened.named_children()] == ["0"]
    assert_close(results(unflattened, unflattened), results(model, model))


def test_save_on_cpu(layer):
    def offloaded(input):
        with torch.autograd.graph.save_on_cpu():
            return layer(input)

    assert_close(results(layer, offloaded), results(layer, layer))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("how", ["intern", "extern"])
def test_torch_package(layer, how):
    """The package holds the modules of Python, or expects them where it is loaded."""
    buffer = io.BytesIO()
    with PackageExporter(buffer) as exporter:
        getattr(exporter, how)("lltm_ops.**")
        exporter.extern("**", exclude="lltm_ops.**")
        exporter.save_pickle("layer", "layer.pkl", layer)
    buffer.seek(0)
    loaded = PackageImporter(buffer).load_pickle("layer", "layer.pkl")
    assert_close(loaded(INPUT), layer(INPUT))


def test_a_forked_child_trains_on_one_thread():
    code = """
import os, torch, lltm_ops
layer, input = lltm_ops.LLTM(64, 64), torch.randn(20, 16, 64)
def gradient():
    (result,) = torch.autograd.grad(layer(input)[0].sum(), layer.weights_l0)
    return result
expected = gradient()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    torch.testing.assert_close(gradient(), expected)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
