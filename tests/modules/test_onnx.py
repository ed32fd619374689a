"""torch.onnx.export writes the operators in ONNX, and onnxruntime computes the same numbers."""

import subprocess
import sys

import pytest
import torch
from common import CELL, NUMBERS, PADDED, TOLERANCES, Operator, double, each_dtype, each_operator
from layers import SLOW_OPTIONS, STRUCTURES, call_of, each_form, each_with_resets
from torch import nn
from torch.utils._pytree import tree_leaves

import lltm_ops

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

DYNAMIC = torch.export.Dim.DYNAMIC
WITH_RESETS, PACKED = Operator(("padded", False, True)), Operator(("packed", True, True))
each_body = pytest.mark.parametrize("operator", [PADDED, PACKED], ids=str)
# Unlike those of the export, ones and an empty batch among them.
TIMES_AND_BATCHES = [(9, 4), (2, 17), (1, 2), (4, 1), (1, 1), (4, 0)]


def exported(module, arguments, dynamic_shapes, **options):
    """Runs in onnxruntime what was exported; its attribute ``model`` is the ONNX model."""
    import lltm_ops.onnx

    program = torch.onnx.export(
        module.eval(),
        arguments,
        dynamo=True,
        dynamic_shapes=dynamic_shapes,
        custom_translation_table=lltm_ops.onnx.translation_table(),
        verbose=False,
        **options,
    )
    onnx.checker.check_model(program.model_proto, full_check=True)
    assert {node.domain for node in program.model_proto.graph.node} == {""}
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [input.name for input in session.get_inputs()]

    def run(*arguments):
        arrays = [leaf.numpy() for leaf in tree_leaves(arguments) if leaf is not None]
        results = session.run(None, dict(zip(names, arrays, strict=True)))
        return [torch.from_numpy(result) for result in results]

    run.model = program.model_proto
    return run


def assert_close(actual, expected, dtype=torch.float32):
    for ours, exact in zip(actual, tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), **TOLERANCES[dtype])


class InDtype(nn.Module):
    """An operator in any dtype, with float64 outside: NumPy has no bfloat16. What is no tensor
    among the arguments is no input of the graph."""

    def __init__(self, operator, dtype, arguments):
        super().__init__()
        self.operator, self.dtype = operator, dtype
        self.constants = {i: a for i, a in enumerate(arguments) if not isinstance(a, torch.Tensor)}

    def forward(self, tensors):
        arguments = [self.converted(tensor) for tensor in tensors]
        for index, constant in self.constants.items():
            arguments.insert(index, constant)
        return tuple(result.double() for result in self.operator.forward(*arguments))

    def converted(self, tensor):
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def tensors_of(arguments):
    return [argument for argument in arguments if isinstance(argument, torch.Tensor)]


def exported_operator(operator, arguments, dtype=torch.float32, is_dynamic=True, **options):
    """Takes all arguments, of which time and batch may be dynamic."""
    rows, batch = dict.fromkeys(range(arguments[0].dim() - 1), DYNAMIC), {0: DYNAMIC}
    of = {"input": rows, "resets": rows, "weights": {}, "bias": {}}
    shapes = [
        of.get(name, batch)
        for name, argument in zip(operator.arguments, arguments, strict=True)
        if isinstance(argument, torch.Tensor)
    ]
    module = InDtype(operator, dtype, arguments)
    shapes = (shapes,) if is_dynamic else None
    return exported(module, (tensors_of(arguments),), shapes, **options)


@each_dtype
@each_operator
def test_operator_by_value(operator, dtype):
    def arguments(time, batch):
        return double(operator.inputs(dtype=dtype, shape=(time, batch, 5, 4)))

    run = exported_operator(operator, arguments(5, 3), dtype)
    for time, batch in TIMES_AND_BATCHES:
        if batch > 0 or operator.kind is None or operator.kind[0] == "padded":
            call = arguments(time, batch)
            assert_close(run(tensors_of(call)), operator.reference(*call), dtype)


def gates_of_every_magnitude(dtype):
    """Input of one unit whose weights let each of its three features be a gate."""
    magnitudes = torch.logspace(-30, 4, 400, dtype=torch.float64).to(dtype)
    gates = torch.cat([magnitudes, -magnitudes])
    input = torch.stack([gates[torch.randperm(len(gates))], gates.flip(0), gates], 1)
    weights = torch.cat([torch.zeros(3, 1, dtype=dtype), torch.eye(3, dtype=dtype)], 1)
    zeros = torch.zeros(len(gates), 1, dtype=dtype)
    return input, weights, zeros[:3, 0], zeros, zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("operator", [CELL, PADDED, WITH_RESETS], ids=str)
def test_results_are_exact_at_every_magnitude(dtype, operator):
    """All steps of a sequence are alike, so that no sum cancels."""
    arguments = double(gates_of_every_magnitude(dtype))
    if operator is not CELL:
        input = arguments[0].expand(3, *arguments[0].shape)
        resets = torch.rand(input.shape[:2]) < 0.3 if operator is WITH_RESETS else None
        arguments = [input, *arguments[1:], None, False, resets]
    arguments += NUMBERS
    expected = operator.reference(*arguments)
    # A gate is zero where exp() overflows, and would be the smallest of numbers.
    bounds = {"rtol": 64 * torch.finfo(dtype).eps, "atol": 1e5 * torch.finfo(dtype).tiny}
    run = exported_operator(operator, arguments, dtype, is_dynamic=False)
    for ours, exact in zip(run(tensors_of(arguments)), expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, **bounds)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 0, 4), (3, 2, 5, 0), (3, 2, 0, 0)], ids=str)
@pytest.mark.parametrize("operator", [CELL, PADDED, PACKED], ids=str)
def test_sizes_of_zero(operator, is_dynamic, shape):
    arguments = double(operator.inputs(shape=shape))
    run = exported_operator(operator, arguments, is_dynamic=is_dynamic)
    assert_close(run(tensors_of(arguments)), operator.reference(*arguments))


@pytest.mark.parametrize("version", [16, 17, 18, 21])
@pytest.mark.parametrize("optimize", [False, True])
@each_body
def test_opset_version(operator, optimize, version):
    example, arguments = (double(operator.inputs(shape=(*s, 6, 6))) for s in ((5, 3), (4, 2)))
    run = exported_operator(operator, example, opset_version=version, optimize=optimize)
    assert {(opset.domain, opset.version) for opset in run.model.opset_import} == {("", version)}
    assert_close(run(tensors_of(arguments)), operator.reference(*arguments))


@pytest.mark.parametrize("options", STRUCTURES[1:], ids=str)
@pytest.mark.parametrize("with_state", [False, True])
@each_with_resets
@each_form
def test_layer(options, with_state, with_resets, form):
    layer = lltm_ops.LLTM(5, 6, return_cells=True, **options)

    def arguments(time, batch):
        input, state, resets, batch_sizes = call_of(layer, form, with_resets, time, batch)
        return input, state if with_state else None, resets, batch_sizes

    example = arguments(7, 3)
    rows = {0: DYNAMIC} if form == "packed" else {0: DYNAMIC, 1: DYNAMIC}
    shapes = rows, ({1: DYNAMIC}, {1: DYNAMIC}), rows, {0: DYNAMIC}
    given = [shape if a is not None else None for shape, a in zip(shapes, example, strict=True)]
    run = exported(layer, example, given)
    for time, batch in TIMES_AND_BATCHES:
        if batch > 0 or form == "padded":
            call = arguments(time, batch)
            assert_close(run(*call), layer(*call))


each_unrolled = pytest.mark.parametrize("slow", SLOW_OPTIONS[:2], ids=str)


@each_unrolled
def test_what_runs_step_by_step_is_unrolled(slow):
    layer = lltm_ops.LLTM(5, 6, **slow).eval()
    run = exported(layer, (torch.randn(7, 3, 5),), ({1: DYNAMIC},))
    for batch in (3, 17, 1):
        input = torch.randn(7, batch, 5)
        assert_close(run(input), layer(input))
    assert "Scan" not in {node.op_type for node in run.model.graph.node}


@each_unrolled
def test_what_runs_step_by_step_takes_as_many_packed_steps(slow):
    layer = lltm_ops.LLTM(5, 6, **slow).eval()
    input, state = torch.randn(8, 5), (torch.randn(1, 4, 6), torch.randn(1, 4, 6))
    run = exported(layer, (input, state, None, torch.tensor([4, 3, 1])), None)
    for batch_sizes in ([4, 3, 1], [4, 2, 2], [4, 4, 0]):
        arguments = (input, state, None, torch.tensor(batch_sizes))
        assert_close(run(*arguments), layer(*arguments))


@torch.no_grad()
def test_a_reset_begins_anew_from_a_state_that_is_not_finite():
    layer = lltm_ops.LLTM(5, 6)
    input, resets = torch.randn(3, 2, 5), torch.ones(3, 2, dtype=torch.bool)
    broken = tuple(torch.full((1, 2, 6), value) for value in (float("nan"), float("inf")))
    run = exported(layer, (input, broken, resets), None)
    assert_close(run(input, broken, resets), layer(input, None, resets))


def test_no_steps_are_refused_by_onnxruntime():
    """The operator's result would be empty; a wrong one must not come instead."""
    layer = lltm_ops.LLTM(5, 6)
    run = exported(layer, (torch.randn(7, 3, 5),), ({0: DYNAMIC, 1: DYNAMIC},))
    with pytest.raises(Exception, match="running Scan node"):
        run(torch.randn(0, 3, 5))


@each_body
def test_shape_inference_gives_the_types_within_a_sequence(operator):
    """OpenVINO needs them."""
    model = exported_operator(operator, double(operator.inputs()), is_dynamic=False).model
    for of, is_typed in (model, False), (onnx.shape_inference.infer_shapes(model), True):
        (scan,) = (node for node in of.graph.node if node.op_type == "Scan")
        (body,) = (attribute.g for attribute in scan.attribute if attribute.name == "body")
        assert all(bool(i.type.tensor_type.elem_type) == is_typed for i in body.input)


def python(code, *flags):
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True)


def test_import_prints_nothing():
    result = python("import lltm_ops.onnx", "-W", "error")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_without_the_extra():
    result = python("import sys; sys.modules['onnxscript'] = None; import lltm_ops.onnx")
    assert result.stderr.splitlines()[-1] == (
        "ImportError: lltm_ops.onnx: expected the packages of the extra onnx, but onnxscript is "
        "missing: install them with `pip install onnx onnxscript onnxruntime`"
    )
