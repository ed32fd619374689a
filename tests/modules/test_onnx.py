"""torch.onnx.export writes the operators in ONNX, and onnxruntime computes the same numbers."""

import subprocess
import sys

import pytest
import torch
from common import (
    NUMBERS,
    TOLERANCES,
    double,
    each_dtype,
    each_sequence_kind,
    sample_inputs,
    sequence_inputs,
    sequence_reference,
)
from layers import SLOW_OPTIONS
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

import lltm_ops

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

DYNAMIC = torch.export.Dim.DYNAMIC
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


def dynamic(arguments, *sizes):
    """Dynamic shapes for arguments of which each has as many dynamic dimensions as sizes say."""
    return [
        None if argument is None else {dim: DYNAMIC for dim in range(count)}
        for argument, count in zip(arguments, sizes, strict=True)
    ]


def assert_close(actual, expected, dtype=torch.float32):
    for ours, exact in zip(actual, tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), **TOLERANCES[dtype])


class InDtype(nn.Module):
    """An operator in any dtype, with float64 outside: NumPy has no bfloat16."""

    def __init__(self, operator, dtype):
        super().__init__()
        self.operator, self.dtype = operator, dtype

    def forward(self, arguments):
        inside = tree_map_only(torch.Tensor, self.converted, arguments)
        return tuple(result.double() for result in self.operator(*inside))

    def converted(self, tensor):
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def cell_operator(*tensors):
    return torch.ops.lltm.forward(*tensors, *NUMBERS)


@each_dtype
def test_cell_by_value(dtype):
    example = double(sample_inputs(dtype=dtype))
    shapes = dynamic(example, 1, 0, 0, 1, 1)
    run = exported(InDtype(cell_operator, dtype), (example,), (shapes,))
    for batch in (3, 17, 1, 0):
        arguments = double(sample_inputs(dtype=dtype, shape=(batch, 5, 4)))
        assert_close(run(arguments), lltm_ops.reference(*arguments, *NUMBERS), dtype)


def sequence_operator(kind, dtype=torch.float32):
    def operator(*arguments):
        *others, resets = arguments
        return torch.ops.lltm.sequence_forward(*others, kind[1], resets, *NUMBERS)

    return InDtype(operator, dtype)


def sequence_arguments(shape, kind, dtype=torch.float32):
    inputs = double(sequence_inputs("cpu", dtype, shape, kind))
    return [*inputs[:6], inputs[7]]


def sequence_shapes(arguments):
    rows = arguments[0].dim() - 1
    return (dynamic(arguments, rows, 0, 0, 1, 1, 1, rows),)


def sequence_results(arguments, kind):
    *others, resets = arguments
    return sequence_reference(*others, kind[1], resets, *NUMBERS)


@each_dtype
@each_sequence_kind
def test_sequence_by_value(kind, dtype):
    example = sequence_arguments((5, 3, 5, 4), kind, dtype)
    run = exported(sequence_operator(kind, dtype), (example,), sequence_shapes(example))
    for time, batch in TIMES_AND_BATCHES:
        if batch > 0 or kind[0] == "padded":
            arguments = sequence_arguments((time, batch, 5, 4), kind, dtype)
            assert_close(run(arguments), sequence_results(arguments, kind), dtype)


def gates_of_every_magnitude(dtype):
    """Input of one unit whose weights let each of its three features be a gate."""
    magnitudes = torch.logspace(-30, 4, 400, dtype=torch.float64).to(dtype)
    gates = torch.cat([magnitudes, -magnitudes])
    input = torch.stack([gates[torch.randperm(len(gates))], gates.flip(0), gates], 1)
    weights = torch.cat([torch.zeros(3, 1, dtype=dtype), torch.eye(3, dtype=dtype)], 1)
    zeros = torch.zeros(len(gates), 1, dtype=dtype)
    return input, weights, zeros[:3, 0], zeros, zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["cell", "sequence", "sequence with resets"])
def test_results_are_exact_at_every_magnitude(dtype, form):
    """All steps of a sequence are alike, so that no sum cancels."""
    arguments = double(gates_of_every_magnitude(dtype))
    kind = ("padded", False, form == "sequence with resets")
    if form == "cell":
        operator = InDtype(torch.ops.lltm.forward, dtype)
        expected = lltm_ops.reference(*arguments)
    else:
        input = arguments[0].expand(3, *arguments[0].shape)
        resets = torch.rand(input.shape[:2]) < 0.3 if kind[2] else None
        arguments = [input, *arguments[1:], None, resets]
        operator, expected = sequence_operator(kind, dtype), sequence_results(arguments, kind)
    # A gate is zero where exp() overflows, and would be the smallest of numbers.
    bounds = {"rtol": 64 * torch.finfo(dtype).eps, "atol": 1e5 * torch.finfo(dtype).tiny}
    for ours, exact in zip(
        exported(operator, (arguments,), None)(arguments), expected, strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, **bounds)


each_body = pytest.mark.parametrize(
    "kind", [("padded", False, False), ("packed", True, True)], ids=["padded", "packed"]
)


@pytest.mark.parametrize("are", ["fixed", "dynamic"])
@pytest.mark.parametrize("shape", [(3, 2, 0, 4), (3, 2, 5, 0)], ids=str)
@each_body
def test_sequence_of_sizes_of_zero(kind, are, shape):
    arguments = sequence_arguments(shape, kind)
    shapes = None if are == "fixed" else sequence_shapes(arguments)
    run = exported(sequence_operator(kind), (arguments,), shapes)
    assert_close(run(arguments), sequence_results(arguments, kind))


@pytest.mark.parametrize("sizes", [(2, 0, 4), (2, 5, 0), (0, 5, 4), (2, 0, 0)], ids=str)
def test_cell_of_sizes_of_zero(sizes):
    batch, input_size, hidden_size = sizes
    cell = lltm_ops.LLTMCell(input_size, hidden_size)
    input = torch.randn(batch, input_size)
    assert_close(exported(cell, (input,), None)(input), cell(input))


@pytest.mark.parametrize("version", [16, 17, 18, 21])
@pytest.mark.parametrize("optimize", [False, True])
@each_body
def test_opset_version(kind, optimize, version):
    example = sequence_arguments((5, 3, 6, 6), kind)
    shapes = sequence_shapes(example)
    options = {"opset_version": version, "optimize": optimize}
    run = exported(sequence_operator(kind), (example,), shapes, **options)
    assert {(opset.domain, opset.version) for opset in run.model.opset_import} == {("", version)}
    arguments = sequence_arguments((4, 2, 6, 6), kind)
    assert_close(run(arguments), sequence_results(arguments, kind))


def layer_arguments(layer, time, batch):
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = (batch, time) if layer.batch_first else (time, batch)
    state = tuple(torch.randn(count, batch, layer.hidden_size) for _ in range(2))
    return torch.randn(*sizes, layer.input_size), state, torch.rand(sizes) < 0.2


STRUCTURES = [
    {"num_layers": 2},
    {"bidirectional": True, "return_cells": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
]


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
@pytest.mark.parametrize("given", [1, 2, 3], ids=["input", "with state", "with resets"])
def test_layer(options, given):
    layer = lltm_ops.LLTM(5, 6, **options)
    reference = lltm_ops.LLTM(5, 6, **options, dtype=torch.float64)
    reference.load_state_dict(layer.state_dict())
    both, of_state = {0: DYNAMIC, 1: DYNAMIC}, {1: DYNAMIC}
    shapes = (both, (of_state, of_state), both)[:given]
    run = exported(layer, layer_arguments(layer, 7, 3)[:given], shapes)
    for time, batch in TIMES_AND_BATCHES:
        arguments = layer_arguments(layer, time, batch)[:given]
        exact = tree_map_only(
            torch.Tensor, lambda t: t if t.dtype == torch.bool else t.double(), arguments
        )
        assert_close(run(*arguments), reference(*exact))


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


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("with_resets", [False, True])
@torch.no_grad()
def test_layer_with_batch_sizes(options, with_state, with_resets):
    layer = lltm_ops.LLTM(5, 6, return_cells=True, **options)

    def arguments_of(lengths):
        packed = pack_sequence([torch.randn(length, 5) for length in lengths])
        _, state, _ = layer_arguments(layer, 1, len(lengths))
        resets = torch.rand(len(packed.data)) < 0.3
        return (
            packed.data,
            state if with_state else None,
            resets if with_resets else None,
            packed.batch_sizes,
        )

    first, of_state = {0: DYNAMIC}, ({1: DYNAMIC}, {1: DYNAMIC})
    shapes = (first, of_state if with_state else None, first if with_resets else None, first)
    run = exported(layer, arguments_of([5, 4, 2]), shapes)
    for lengths in ([9, 9, 4, 1], [3], [2, 2], [1, 1, 1]):
        arguments = arguments_of(lengths)
        assert_close(run(*arguments), layer(*arguments))


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
def test_shape_inference_gives_the_types_within_a_sequence(kind):
    """OpenVINO needs them."""
    arguments = sequence_arguments((5, 3, 5, 4), kind)
    model = exported(sequence_operator(kind), (arguments,), None).model
    for of, is_typed in (model, False), (onnx.shape_inference.infer_shapes(model), True):
        (scan,) = (node for node in of.graph.node if node.op_type == "Scan")
        (body,) = (attribute.g for attribute in scan.attribute if attribute.name == "body")
        assert all(bool(i.type.tensor_type.elem_type) == is_typed for i in body.input)


def python(code, *flags):
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("flags", [(), ("-W", "error")], ids=str)
def test_import_prints_nothing(flags):
    result = python("import lltm_ops.onnx", *flags)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_import_does_not_load_onnx():
    code = "import sys, lltm_ops; print({'onnx', 'onnxscript'} & sys.modules.keys())"
    assert python(code).stdout == "set()\n"


def test_without_the_extra():
    result = python("import sys; sys.modules['onnxscript'] = None; import lltm_ops.onnx")
    assert result.stderr.splitlines()[-1] == (
        "ImportError: lltm_ops.onnx: expected the packages of the extra onnx, but onnxscript is "
        "missing: install them with `pip install onnx onnxscript onnxruntime`"
    )
