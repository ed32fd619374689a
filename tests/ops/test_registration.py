"""The operators as the dispatcher knows them: schemas, keys, and what opcheck asks of them."""

import inspect
import os

import pytest
import torch
from common import (
    LAYOUTS,
    ROOT,
    SEQUENCE_KINDS,
    backward_inputs,
    cell_inputs,
    each_device,
    each_dtype,
    each_sequence_kind,
    names_of,
    needs_cuda,
    sequence_backward_inputs,
    sequence_inputs,
    sequence_reference,
)
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

import lltm_ops
from lltm_ops._direction import run_step_by_step

CELL_OPERATORS = {
    "forward": cell_inputs,
    "_forward_with_gates": cell_inputs,
    "backward": backward_inputs,
}
SEQUENCE_OPERATORS = {
    "sequence_forward": sequence_inputs,
    "_sequence_forward_with_gates": sequence_inputs,
    "sequence_backward": sequence_backward_inputs,
}
OPERATORS = CELL_OPERATORS | SEQUENCE_OPERATORS
DIFFERENTIABLE = ("forward", "sequence_forward")
each_operator = pytest.mark.parametrize("name", OPERATORS)
each_sequence_operator = pytest.mark.parametrize("name", SEQUENCE_OPERATORS)


def operator(name):
    return getattr(torch.ops.lltm, name).default


@each_operator
def test_schemas_are_those_of_the_docs(name):
    page = " ".join((ROOT / "docs" / "operators.md").read_text().split())
    assert str(operator(name)._schema) in page


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("forward", lltm_ops.forward),
        ("forward", lltm_ops.reference),
        ("backward", lltm_ops.backward),
        ("sequence_forward", lltm_ops.sequence_forward),
        ("sequence_forward", sequence_reference),
        ("sequence_forward", run_step_by_step),
        ("sequence_backward", lltm_ops.sequence_backward),
    ],
)
def test_functions_begin_with_the_arguments_of_the_schema(name, function):
    """Nothing else would notice an argument that step by step lacks, or a default of its own."""
    schema = operator(name)._schema.arguments
    parameters = list(inspect.signature(function).parameters.values())[: len(schema)]
    assert [parameter.name for parameter in parameters] == [argument.name for argument in schema]
    for parameter, argument in zip(parameters, schema, strict=True):
        if parameter.default is not parameter.empty:
            given, default = parameter.default, argument.default_value
            assert given == (tuple(default) if isinstance(default, list) else default)


@each_operator
def test_some_inputs_of_the_tests_give_each_option(name):
    """Another value than its default, with which whoever forgets the option computes, too."""
    arguments = [a for a in operator(name)._schema.arguments if a.name != "output_mask"]
    kinds = [{"kind": kind} for kind in SEQUENCE_KINDS] if name in SEQUENCE_OPERATORS else [{}]
    calls = [OPERATORS[name](**kind) for kind in kinds]
    for argument, *values in zip(arguments, *calls, strict=True):
        assert any(
            isinstance(value, torch.Tensor) or value != argument.default_value for value in values
        ), argument.name


@each_operator
@pytest.mark.parametrize("key", ["AutocastCPU", "AutocastCUDA"])
def test_what_autograd_calls_follows_the_dtypes_of_forward(name, key):
    registered = torch._C._dispatch_has_kernel_for_dispatch_key(f"lltm::{name}", key)
    assert registered == name.endswith("forward")


@each_operator
@pytest.mark.skipif(
    lltm_ops.build_info()["cuda"] == "not built" and os.environ.get("FORCE_CUDA") != "1",
    reason="built without CUDA",
)
def test_cuda_kernels_are_built(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lltm::{name}", "CUDA")


@needs_cuda
def test_cuda_is_built_where_there_is_a_gpu():
    assert lltm_ops.build_info()["cuda"] != "not built"


WITHOUT_GRAPHS = ("test_schema", "test_autograd_registration", "test_faketensor")
# The parts of opcheck. The last one compiles, which takes seconds, and no graph depends on dtypes.
ALL = (*WITHOUT_GRAPHS, "test_aot_dispatch_dynamic")


@each_device
@each_dtype
@each_operator
def test_opcheck(device, dtype, name):
    parts = ALL if dtype == torch.float32 else WITHOUT_GRAPHS
    for requires_grad in {False, name in DIFFERENTIABLE}:
        inputs = OPERATORS[name](device, dtype, requires_grad=requires_grad)
        opcheck(operator(name), inputs, test_utils=parts)


@each_device
@each_sequence_operator
@each_sequence_kind
def test_opcheck_of_sequences(device, name, kind):
    for requires_grad in {False, name in DIFFERENTIABLE}:
        inputs = OPERATORS[name](device, kind=kind, requires_grad=requires_grad)
        opcheck(operator(name), inputs, test_utils=ALL)


def function_of_data(batch_sizes, *parameters):
    def run(data):
        h = data.new_zeros(3, 5)
        return lltm_ops.sequence_forward(data, *parameters, h, h, batch_sizes)[0]

    return run


def second_derivative(data, *others):
    data = data.detach().requires_grad_()
    output = function_of_data(*others)(data)
    (first,) = torch.autograd.grad(output.square().sum(), data, create_graph=True)
    return torch.autograd.grad(first.square().sum(), data)[0]


def jvp(data, *others):
    return torch.func.jvp(function_of_data(*others), (data,), (data,))[1]


def vmap(data, *others):
    return torch.func.vmap(function_of_data(*others))(torch.stack([data, data]))


def on_meta(function, tensors):
    return function(*(tensor.to("meta") for tensor in tensors))


def fake(function, tensors, shape_env=None):
    with FakeTensorMode(shape_env=shape_env) as mode:
        return function(*(mode.from_tensor(t, static_shapes=not shape_env) for t in tensors))


WITHOUT_VALUES = {
    "meta": on_meta,
    "fake": fake,
    "fake with symbolic sizes": lambda *call: fake(*call, ShapeEnv()),
    "make_fx fake": lambda call, tensors: make_fx(call, tracing_mode="fake")(*tensors),
    "make_fx symbolic": lambda call, tensors: make_fx(call, tracing_mode="symbolic")(*tensors),
}
each_packed_call = pytest.mark.parametrize("call", [second_derivative, jvp, vmap])
PACKED = torch.randn(6, 4), torch.tensor([3, 2, 1]), torch.randn(15, 9), torch.randn(15)


@each_packed_call
@pytest.mark.parametrize("how", WITHOUT_VALUES)
def test_a_loop_over_steps_is_refused_where_batch_sizes_have_no_values(call, how):
    if call is jvp and "symbolic" in how and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13, jvp of symbolic sizes fails inside of PyTorch")
    call(*PACKED)
    with pytest.raises(
        RuntimeError, match=r"lltm::sequence_\w+: expected the values of batch_sizes"
    ):
        WITHOUT_VALUES[how](call, PACKED)


@pytest.mark.parametrize(
    ("call", "mode"),
    [(second_derivative, "real"), (jvp, "real"), (jvp, "fake"), (vmap, "real"), (vmap, "symbolic")],
)
def test_make_fx_keeps_the_values_of_batch_sizes_that_are_no_input_of_its_graph(call, mode):
    data, batch_sizes, *parameters = PACKED

    def run(data, *parameters):
        return call(data, batch_sizes, *parameters)

    graph = make_fx(run, tracing_mode=mode)(data, *parameters)
    other = torch.randn(6, 4)
    torch.testing.assert_close(graph(other, *parameters), run(other, *parameters))


def test_functionalize_reads_the_values_of_batch_sizes():
    torch.testing.assert_close(torch.func.functionalize(vmap)(*PACKED), vmap(*PACKED))


each_extreme_shape = pytest.mark.parametrize(
    "shape", [(0, 3, 5, 4), (4, 0, 5, 4), (4, 3, 0, 4), (1, 1, 1, 1)], ids=str
)


def laid_out(name, layout, shape):
    """Samples of an operator, whose tensors lie so."""
    if name in CELL_OPERATORS:
        return [LAYOUTS[layout](t) for t in OPERATORS[name](shape=shape[1:])]
    inputs = OPERATORS[name](shape=shape, kind=("padded", True, True))
    return [LAYOUTS[layout](t) if isinstance(t, torch.Tensor) else t for t in inputs]


@each_operator
@pytest.mark.parametrize("layout", LAYOUTS)
@each_extreme_shape
def test_opcheck_of_layouts_and_shapes(name, layout, shape):
    """The strides of the arguments change nothing about the results, real or fake."""
    opcheck(operator(name), laid_out(name, layout, shape), test_utils=WITHOUT_GRAPHS)


@each_sequence_operator
@each_extreme_shape
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_opcheck_of_packed_half_types(name, shape, dtype):
    """With steps of no rows at the end, which a PackedSequence has not, and no tensor contiguous."""
    inputs = OPERATORS[name](dtype=dtype, shape=shape, kind=("packed", True, True))
    at = names_of(name).index("batch_sizes")
    if inputs[at] is not None:
        inputs[at] = torch.cat([inputs[at], torch.zeros(2, dtype=torch.long)])
    inputs = [LAYOUTS["strided"](t) if isinstance(t, torch.Tensor) else t for t in inputs]
    opcheck(operator(name), inputs, test_utils=WITHOUT_GRAPHS)


@pytest.mark.parametrize("mask", [[True, False] * 2 + [True], [False] * 5, [False] * 4 + [True]])
def test_opcheck_of_output_mask(mask):
    parts = ALL if sum(mask) == 3 else WITHOUT_GRAPHS
    for name, sample in (
        ("backward", backward_inputs),
        ("sequence_backward", sequence_backward_inputs),
    ):
        opcheck(operator(name), (*sample(), mask), test_utils=parts)


def test_opcheck_of_missing_gradients():
    grad_output, _, _, _, *others = sequence_backward_inputs()
    given = (grad_output, None, None, None, *others)
    opcheck(operator("sequence_backward"), given, test_utils=ALL)


@each_operator
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_know_the_device(name, form, device):
    """Also that of a device which is not there: what deployment tools trace with. batch_sizes lie on
    the CPU, as those of a PackedSequence do."""
    options = {} if name in CELL_OPERATORS else {"kind": (form, False, True)}
    inputs = OPERATORS[name](**options)
    with FakeTensorMode() as mode:
        fake = [
            torch.empty(t.shape, dtype=t.dtype, device="cpu" if t.dtype == torch.long else device)
            if isinstance(t, torch.Tensor)
            else t
            for t in inputs
        ]
        outputs = operator(name)(*fake)
    assert all(mode.is_our_fake(output) and output.device.type == device for output in outputs)
