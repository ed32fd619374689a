"""torch.compile, compiled autograd, torch.export and AOTInductor: whole graphs, with our operators
in them, static and dynamic."""

import pytest
import torch
from common import (
    CELL,
    OPERATORS,
    PADDED,
    Operator,
    each_device,
    each_operator,
    gradients,
    sequence_inputs,
)
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from torch._higher_order_ops.scan import scan
from torch.ao.quantization.fx.tracer import QuantizationTracer
from torch.nn.utils.rnn import pack_sequence

import lltm_ops

assert_close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def calls_of(graphs):
    """What graphs call, with the bodies of their loops."""
    return [
        str(node.target)
        for graph in graphs
        for module in graph.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    ]


def assert_calls_our_backward(recorder, operator):
    """And nothing of its formulas."""
    calls = calls_of(recorder.bw_graphs)
    assert str(operator.backward.default) in calls
    assert not any("sigmoid" in call or "tanh" in call for call in calls)


def copies_of(inputs):
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs[:5]]
    return leaves + inputs[5:]


@pytest.mark.parametrize("operator", [CELL, Operator(("packed", True, True))], ids=str)
def test_our_operators_stand_in_the_graphs(operator):
    recorder = AotEagerAndRecordGraphs()
    inputs = operator.inputs(requires_grad=True)
    step = torch.compile(operator.forward, backend=recorder, fullgraph=True)
    with torch.no_grad():
        step(*inputs)
    gradients(step, inputs)
    ours = [call for call in calls_of(recorder.fw_graphs) if "lltm" in call]
    assert ours == [str(operator.forward.default), str(operator.forward_with_gates.default)]
    assert_calls_our_backward(recorder, operator)


def test_our_operators_stand_in_the_training_graph_of_scan():
    """It traces the step, then functionalizes what it traced, with gradients on."""

    def over_time(xs, weights, bias, h, c):
        def step(state, x):
            h, c = lltm_ops.forward(x, weights, bias, *state)
            return (h, c), h.clone()

        (h, c), output = scan(step, (h, c), xs)
        return output, c

    def sequence(xs, weights, bias, h, c):
        output, _, _, c_n = lltm_ops.sequence_forward(xs, weights, bias, h, c)
        return output, c_n

    recorder = AotEagerAndRecordGraphs()
    leaves = sequence_inputs(requires_grad=True)[:5]
    compiled = torch.compile(over_time, backend=recorder, fullgraph=True)
    assert_close(gradients(compiled, leaves), gradients(sequence, copies_of(leaves)))
    assert "lltm._forward_with_gates.default" in calls_of(recorder.fw_graphs)
    assert_calls_our_backward(recorder, CELL)


def test_our_operators_stand_in_the_graph_after_torch_func_was_used():
    """Once torch.func ran on a thread, its thread-local state stays: no reason to decompose."""
    torch.func.grad(lambda x: (x * x).sum())(torch.ones(2))
    test_our_operators_stand_in_the_graphs(CELL)


@each_device
@pytest.mark.parametrize(
    ("operator", "dynamic"),
    [*((operator, False) for operator in OPERATORS), (CELL, True), (PADDED, True)],
    ids=str,
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_inference_and_training(device, operator, dynamic, backend):
    step = torch.compile(operator.forward, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        inputs = operator.inputs(device)
        assert_close(step(*inputs), operator.forward(*inputs))
    inputs = operator.inputs(device, requires_grad=True)
    copies = copies_of(inputs)
    assert_close(gradients(step, inputs), gradients(operator.forward, copies))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "operator",
    [CELL, Operator(("padded", False, True)), Operator(("packed", False, True))],
    ids=str,
)
def test_one_graph_for_many_sizes(operator, requires_grad):
    counter = CompileCounter()
    step = torch.compile(operator.forward, backend=counter, fullgraph=True, dynamic=True)
    # No two sizes of the first are equal: torch.compile would take them for one.
    for time, batch in ((7, 3), (3, 2), (7, 5), (50, 16), (5, 33)):
        inputs = operator.inputs(shape=(time, batch, 5, 4), requires_grad=requires_grad)
        assert_close(step(*inputs), operator.forward(*inputs))
    assert counter.frame_count == 1


def test_a_cell_whose_batch_is_a_value():
    cell = lltm_ops.LLTMCell(5, 4)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step_of_some(input, h, c, rows, rows_of_state):
        return cell(input[rows], (h[rows_of_state], c[rows_of_state]))

    input, h, c = (torch.randn(8, size) for size in (5, 4, 4))
    even = torch.arange(8) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        actual = step_of_some(input, h, c, even, ~even)
    assert_close(actual, cell(input[even], (h[~even], c[~even])))


@each_device
@each_operator
@pytest.mark.parametrize(
    ("dynamic", "required"),
    [(False, range(5)), (True, range(5)), (False, (1, 2)), (False, (0,)), (False, (4,))],
    ids=str,
)
def test_compiled_autograd(device, operator, dynamic, required):
    inputs = operator.inputs(device)
    for index in required:
        inputs[index].requires_grad_()
    copies = copies_of(inputs)
    recorder = AotEagerAndRecordGraphs()
    compiler = torch.compile(backend=recorder, fullgraph=True, dynamic=dynamic)
    with torch._dynamo.compiled_autograd._enable(compiler):
        actual = gradients(operator.forward, inputs)
    assert_close(actual, gradients(operator.forward, copies))
    assert str(operator.backward.default) in calls_of(recorder.fw_graphs)


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = lltm_ops.LLTMCell(5, 4)

    def forward(self, input, h, c):
        return self.cell(input, (h, c))


def step_arguments(batch, device="cpu"):
    return tuple(torch.randn(batch, size, device=device) for size in (5, 4, 4))


def exported(model, device="cpu"):
    batch = torch.export.Dim("batch", min=1, max=4096)
    arguments = step_arguments(3, device)
    shapes = {"input": {0: batch}, "h": {0: batch}, "c": {0: batch}}
    return torch.export.export(model, arguments, dynamic_shapes=shapes)


def test_export_with_dynamic_batch_saved_and_loaded(tmp_path):
    model = Step()
    path = tmp_path / "step.pt2"
    program = exported(model)
    assert "torch.ops.lltm.forward.default" in str(program.run_decompositions().graph)
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    for batch in (1, 3, 64):
        arguments = step_arguments(batch)
        assert_close(loaded(*arguments), model(*arguments))


def test_exported_module_trains():
    model = Step()
    module = exported(model).module()
    arguments = step_arguments(7)
    for function in (module, model):
        sum(output.sum() for output in function(*arguments)).backward()
    assert_close(
        [parameter.grad for parameter in module.parameters()],
        [parameter.grad for parameter in model.parameters()],
    )


class CellAndLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.layer = lltm_ops.LLTMCell(5, 4), lltm_ops.LLTM(4, 4)

    def forward(self, input, hx, packed):
        h, _ = self.cell(input, hx)
        output, _ = self.layer(h.unsqueeze(0))
        output_of_packed, _ = self.layer(packed)
        without_a_proxy = self.cell(torch.ones(3, 5))[0], self.layer(torch.ones(2, 3, 4))[0]
        return output, output_of_packed.data, *without_a_proxy


@pytest.mark.parametrize(
    "tracer", [torch.fx.Tracer(), QuantizationTracer([], [])], ids=["fx", "ao"]
)
def test_modules_are_leaves_of_torch_fx(tracer):
    model = CellAndLayer()
    graph = tracer.trace(model)
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    assert calls == ["cell", "layer", "layer", "cell", "layer"]
    packed = pack_sequence([torch.randn(length, 4) for length in (3, 2)])
    arguments = torch.randn(3, 5), (torch.randn(3, 4), torch.randn(3, 4)), packed
    assert_close(torch.fx.GraphModule(model, graph)(*arguments), model(*arguments))


@pytest.mark.parametrize("module", [lltm_ops.LLTMCell(5, 4), lltm_ops.LLTM(5, 4)], ids=str)
def test_a_module_alone_is_no_graph_of_torch_fx(module):
    with pytest.raises(TypeError, match="but got Proxy"):
        torch.fx.symbolic_trace(module)


@each_device
def test_aot_inductor_package(device, tmp_path):
    model = Step().to(device)
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(
            exported(model, device), package_path=str(tmp_path / "step.pt2")
        )
        loaded = torch._inductor.aoti_load_package(path)
        for batch in (1, 3, 64):
            arguments = step_arguments(batch, device)
            assert_close(loaded(*arguments), model(*arguments))
