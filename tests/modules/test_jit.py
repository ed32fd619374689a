"""TorchScript, which PyTorch has deprecated and does not support on Python 3.14 and later."""

import io

import pytest
import torch
from common import each_operator, gradients, needs_torchscript

import lltm_ops

pytestmark = needs_torchscript


def saved_and_loaded(module):
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("with_state", [True, False])
def test_module_scripted_saved_and_loaded(bias, batch, with_state):
    cell = lltm_ops.LLTMCell(5, 4, bias=bias)
    lead = () if batch is None else (batch,)
    state = (torch.randn(*lead, 4), torch.randn(*lead, 4)) if with_state else None
    input = torch.randn(*lead, 5)
    loaded = saved_and_loaded(torch.jit.script(cell))
    torch.testing.assert_close(loaded(input, state), cell(input, state), rtol=0, atol=0)


@each_operator
def test_operators_script_and_train(operator):
    schema = operator.forward.default._schema.arguments
    parameters = [f"{argument.name}: {argument.type.annotation_str}" for argument in schema]
    unit = torch.jit.CompilationUnit(f"""
def run({", ".join(parameters)}):
    return torch.ops.lltm.{operator.forward.__name__}({", ".join(operator.arguments)})
""")
    inputs = operator.inputs(dtype=torch.float64, requires_grad=True)
    expected = gradients(operator.forward, inputs)
    for _ in range(3):  # the profiling executor specialises on later calls
        for tensor in inputs[:5]:
            tensor.grad = None
        actual = gradients(unit.run, inputs)
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_traced_and_frozen():
    cell = lltm_ops.LLTMCell(5, 4).eval()
    input = torch.randn(3, 5)
    traced = torch.jit.trace(cell, (input, (torch.randn(3, 4), torch.randn(3, 4))))
    without_state = torch.jit.trace(cell, (input,))
    torch.testing.assert_close(without_state(input[:2]), cell(input[:2]))
    assert "lltm::forward" in str(traced.inlined_graph)
    frozen = torch.jit.freeze(torch.jit.script(cell))
    state = (torch.randn(2, 4), torch.randn(2, 4))
    for module in (saved_and_loaded(traced), frozen):
        torch.testing.assert_close(module(input[:2], state), cell(input[:2], state))
