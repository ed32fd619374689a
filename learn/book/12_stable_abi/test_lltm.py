import re
import subprocess
import sys

import lltm
import pytest
import torch
from sample import assert_same_gradients, assert_same_mapped, loss, reference, sample_inputs


def test_asks_torch_for_functions_of_c_alone():
    (library,) = torch.ops.loaded_libraries
    command = ["nm", "--dynamic", "--undefined-only", library]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not sorted(re.findall(r" (_ZNK?(?:2at|3c10|5torch)\w+)", symbols))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [0, 1, 500])
def test_values(batch, dtype):
    inputs = [tensor.t().contiguous().t() for tensor in sample_inputs(batch, 0, 33, dtype)]
    inputs[3].zero_()  # the products are those of ATen
    expected = reference(*(tensor.double() for tensor in inputs))
    torch.testing.assert_close(lltm.forward(*inputs), tuple(t.to(dtype) for t in expected))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit.script ends with Python 3.13")
def test_scripts():
    @torch.jit.script
    def step(input, weights, bias, old_h, old_cell):
        return torch.ops.lltm_stable.forward(input, weights, bias, old_h, old_cell)

    torch.testing.assert_close(step(*sample_inputs())[:2], reference(*sample_inputs()))


def test_derivatives():
    inputs = sample_inputs(requires_grad=True)
    assert torch.autograd.gradcheck(lltm.forward, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lltm.forward, inputs)


def test_opcheck():
    inputs = [tensor.t().contiguous().t() for tensor in sample_inputs()]
    torch.library.opcheck(torch.ops.lltm_stable.forward, inputs)
    input, weights, _, old_h, _ = inputs
    _, *saved = torch.ops.lltm_stable.forward(*inputs)
    saved += input, weights, old_h
    torch.library.opcheck(torch.ops.lltm_stable.backward, (old_h, old_h, *saved))


@pytest.mark.parametrize("compiled", [False, True])
def test_training_takes_the_kernels(compiled):
    step = torch.compile(lltm.forward, fullgraph=True) if compiled else lltm.forward
    inputs = sample_inputs(requires_grad=True)
    assert_same_gradients(step, inputs)
    with torch.profiler.profile() as profiler:
        torch.autograd.grad(loss(step)(*inputs), inputs)
    names = {event.name for event in profiler.events()}
    assert {"lltm_stable::forward", "lltm_stable::backward"} <= names


TRANSFORMS = {
    "gradient": lambda f: torch.func.grad(loss(f)),
    "jvp": lambda f: lambda *inputs: torch.func.jvp(f, inputs, inputs)[1],
    "jvp of jvp": lambda f: torch.func.jacfwd(torch.func.jacfwd(loss(f))),
    "hessian": lambda f: torch.func.hessian(loss(f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform):
    ours, expected = (
        TRANSFORMS[transform](step)(*sample_inputs()) for step in (lltm.forward, reference)
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("transform", ["gradient", "jvp"])
def test_compiled_transforms(transform):
    ours, expected = (TRANSFORMS[transform](step) for step in (lltm.forward, reference))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*sample_inputs()), expected(*sample_inputs()))


@pytest.mark.parametrize("mapped", range(5))
def test_vmap(mapped):
    assert_same_mapped(lltm.forward, mapped)


def test_autocast():
    """The loss and its gradients are outside of the region, as in a training loop."""
    input, *rest = sample_inputs(dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = lltm.forward(input.bfloat16(), *rest)
    assert {result.dtype for result in results} == {torch.bfloat16}
    ours, expected = (
        torch.autograd.grad(sum(map(torch.norm, states)), rest)
        for states in (results, reference(input, *rest))
    )
    torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("argument", range(5))
@pytest.mark.parametrize("change", [lambda t: t[:1], torch.Tensor.float], ids=["sizes", "dtype"])
def test_refuses_what_it_would_read_wrongly(argument, change):
    inputs = sample_inputs()
    inputs[argument] = change(inputs[argument])
    message = r"^lltm_stable: expected \w+ of the dtype of input, \[\d+(, \d+)?\]$"
    with pytest.raises(RuntimeError, match=message):
        lltm.forward(*inputs)
