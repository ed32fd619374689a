import subprocess
import sys
from pathlib import Path

import lltm
import torch
from sample import reference, sample_inputs


def test_autocast():
    inputs = sample_inputs(dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = lltm.forward(*inputs)
    assert {result.dtype for result in ours} == {torch.bfloat16}
    expected = reference(*inputs)
    tolerances = {"rtol": 0.05, "atol": 0.05, "check_dtype": False}
    torch.testing.assert_close(ours, expected, **tolerances)
    gradients = [
        torch.autograd.grad(sum(map(torch.norm, step)), inputs) for step in (ours, expected)
    ]
    assert {gradient.dtype for gradient in gradients[0]} == {torch.float32}
    torch.testing.assert_close(*gradients, **tolerances)


def test_the_layer_before_returns_bfloat16():
    input, *rest = sample_inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        new_h, _ = lltm.forward(input.bfloat16(), *rest)
    assert new_h.dtype == torch.bfloat16


def test_vmap_changes_the_dtype():
    """Its key comes first: the formula runs, and a sum with a float32 state is float32."""
    inputs = [tensor[None] for tensor in sample_inputs(dtype=torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        new_h, new_cell = torch.vmap(lltm.forward)(*inputs)
    assert (new_h.dtype, new_cell.dtype) == (torch.float32, torch.float32)


def test_order_of_the_keys():
    """The trace of a process of its own: the variable is read once."""
    program = str(Path(lltm.__file__))
    printed = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    training = printed.stdout.split("Training under autocast\n")[1].split("vmap")[0]
    assert training.splitlines() == [
        "AutocastCPU: forward",
        "Autograd: forward",
        "CPU: forward",
        "Autograd: backward",
        "CPU: backward",
    ]
