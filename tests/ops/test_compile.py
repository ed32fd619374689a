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
    needs_cuda,
    sample_inputs,
    sequence_inputs,
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.scan import scan
from torch.ao.quantization.fx.tracer import QuantizationTracer
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm_ops

assert_close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


class GraphRecorder:
    """A backend that runs graphs as they are and remembers what they call."""

    def __init__(self):
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.backend = aot_autograd(
            fw_compiler=self._record(self.forward), bw_compiler=self._record(self.backward)
        )

    @staticmethod
    def _record(calls):
        def compiler(graph_module, example_inputs):
            for module in graph_module.modules():  # with the bodies of loops
                nodes = module.graph.nodes if isinstance(module, torch.fx.GraphModule) else []
                calls.extend(str(node.target) for node in nodes if node.op == "call_function")
            return make_boxed_func(graph_module.forward)

        return compiler


def copies_of(inputs):
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs[:5]]
    return leaves + inputs[5:]


@pytest.mark.parametrize("operator", [CELL, Operator(("packed", True, True))], ids=str)
def test_our_operators_stand_in_the_graphs(operator):
    recorder = GraphRecorder()
    inputs = operator.inputs(requires_grad=True)
    step = torch.compile(operator.forward, backend=recorder.backend, fullgraph=True)
    with torch.no_grad():
        step(*inputs)
    assert [call for call in recorder.forward if "lltm" in call] == [str(operator.forward.default)]
    recorder.forward.clear()
    gradients(step, inputs)
    assert recorder.forward.count(str(operator.forward_with_gates.default)) == 1
    assert recorder.backward.count(str(operator.backward.default)) == 1
    assert not any("sigmoid" in call or "tanh" in call for call in recorder.backward)


def test_our_operators_stand_in_the_training_graph_of_scan():
    """It traces the step, then functionalizes what it traced, with gradients on."""

    def over_time(xs, weights, bias, h, c):
        def step(state, x):
            h, c = lltm_ops.forward(x, weights, bias, *state)
            return (h, c), h.clone()

        (h, c), output = scan(step, (h, c), xs)
        return output, c

    def sequence(xs, weights, bias, h, c):
        output, cells = lltm_ops.sequence_forward(xs, weights, bias, h, c)
        return output, cells[-1]

    recorder = GraphRecorder()
    leaves = sequence_inputs(requires_grad=True)[:5]
    compiled = torch.compile(over_time, backend=recorder.backend, fullgraph=True)
    assert_close(gradients(compiled, leaves), gradients(sequence, copies_of(leaves)))
    assert "lltm._forward_with_gates.default" in recorder.forward
    assert "lltm.backward.default" in recorder.backward
    assert not any("sigmoid" in call or "tanh" in call for call in recorder.backward)


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
    recorder = GraphRecorder()
    compiler = torch.compile(backend=recorder.backend, fullgraph=True, dynamic=dynamic)
    with torch._dynamo.compiled_autograd._enable(compiler):
        actual = gradients(operator.forward, inputs)
    assert_close(actual, gradients(operator.forward, copies))
    assert str(operator.backward.default) in recorder.forward


@needs_cuda
def test_cuda_graphs_of_inductor():
    inputs = sample_inputs("cuda", requires_grad=True)
    copies = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    step = torch.compile(lltm_ops.forward, mode="reduce-overhead", fullgraph=True)
    expected = gradients(lltm_ops.forward, copies)
    for _ in range(4):
        for tensor in inputs:
            tensor.grad = None
        assert_close(gradients(step, inputs), expected)


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
    CALLS = ("cell", "cell", "layer", "cell", "layer", "cell", "layer")

    def __init__(self):
        super().__init__()
        self.cell, self.layer = lltm_ops.LLTMCell(5, 4), lltm_ops.LLTM(4, 4)

    def forward(self, input, hx, packed):
        for _ in range(2):
            hx = self.cell(input, hx)
        output, (h_n, _) = self.layer(hx[0].unsqueeze(0))
        last = self.cell(torch.ones(3, 5), (h_n[0], h_n[0]))
        output_of_packed, _ = self.layer(packed)
        # No argument of these is a proxy.
        start = self.cell(torch.ones(3, 5))
        return last[0], output, output_of_packed, start[1], self.layer(torch.ones(2, 3, 4))[0]


class Recording(torch.fx.Tracer):
    """torchvision's tracer finds the features of a module by what it calls, too."""

    def __init__(self):
        super().__init__()
        self.called = []

    def call_module(self, module, *call):
        self.called.append(self.path_of_module(module))
        return super().call_module(module, *call)


@pytest.mark.parametrize("tracer", [Recording(), QuantizationTracer([], [])], ids=["fx", "ao"])
def test_modules_are_leaves_of_torch_fx(tracer):
    model = CellAndLayer()
    graph = tracer.trace(model)
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    assert calls == getattr(tracer, "called", calls) == list(CellAndLayer.CALLS)
    packed = pack_sequence([torch.randn(length, 4) for length in (3, 2)])
    arguments = torch.randn(3, 5), (torch.randn(3, 4), torch.randn(3, 4)), packed
    actual, expected = torch.fx.GraphModule(model, graph)(*arguments), model(*arguments)
    for ours, exact in zip(actual, expected, strict=True):
        ours, exact = ((r.data if isinstance(r, PackedSequence) else r) for r in (ours, exact))
        assert_close(ours, exact)


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
