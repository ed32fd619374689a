import os
import subprocess
import sys

import lltm
import pytest
import torch
from sample import assert_same_gradients, reference
from sample import sample_inputs as on_the_cpu
from torch.utils._python_dispatch import TorchDispatchMode


def sample_inputs(*sizes, requires_grad=False, **options):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = [tensor.to(device) for tensor in on_the_cpu(*sizes, **options)]
    return [tensor.requires_grad_(requires_grad) for tensor in inputs]


class Calls(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


def test_the_pointwise_part_is_one_operator():
    inputs = sample_inputs()
    with Calls() as calls:
        lltm.forward(*inputs)
    assert "lltm::pointwise" in calls.names
    assert not {"aten::sigmoid", "aten::tanh", "aten::elu", "aten::mul"} & {*calls.names}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [0, 1, 50])
def test_values(batch, dtype):
    inputs = sample_inputs(batch, 0, 33, dtype=dtype)
    inputs[3].zero_()  # the products are those of ATen
    expected = reference(*(tensor.double() for tensor in inputs))
    torch.testing.assert_close(lltm.forward(*inputs), tuple(t.to(dtype) for t in expected))


def test_gradients():
    inputs = sample_inputs(requires_grad=True)
    assert torch.autograd.gradcheck(lltm.forward, inputs)
    inputs = [tensor.detach().t().contiguous().t().requires_grad_() for tensor in inputs]
    assert_same_gradients(lltm.forward, inputs)


def test_opcheck():
    pre_activations, old_cell = sample_inputs(requires_grad=True)[2:4]
    pre_activations = pre_activations.expand(len(old_cell), -1)
    torch.library.opcheck(lltm.pointwise, (pre_activations, old_cell))
    gates = torch.rand_like(pre_activations)
    grads = [torch.rand_like(old_cell) for _ in range(2)]
    saved = torch.rand_like(old_cell), gates.contiguous()
    torch.library.opcheck(lltm.pointwise_backward, [t.detach() for t in (*grads, *saved)])


def test_compiles_for_training():
    inputs = sample_inputs(requires_grad=True)
    assert_same_gradients(torch.compile(lltm.forward, fullgraph=True), inputs)


@pytest.mark.parametrize(
    ("interpret", "seen", "hidden"),
    [
        ("1", "lltm.pointwise.default", "triton_kernel_wrapper_functional"),
        ("0", "triton_kernel_wrapper_functional", "lltm.pointwise.default"),
    ],
    ids=["interpreted", "compiled"],
)
def test_what_compile_sees(interpret, seen, hidden):
    result = subprocess.run(
        [sys.executable, lltm.__file__],
        env=os.environ | {"TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=interpret == "1",  # without a GPU, nothing but the interpreter runs the kernel
    )
    nodes = result.stdout.splitlines()
    assert seen in nodes and hidden not in nodes
