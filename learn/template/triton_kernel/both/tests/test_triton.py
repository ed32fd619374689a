"""What can be known of Triton's kernels without a GPU. With one, all tests call them."""

import os
import subprocess
import sys

import pytest
from test_masked_softmax import arguments, masked_softmax

triton = pytest.importorskip("triton")
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
in_the_interpreter = pytest.mark.skipif(not interpreted, reason="test_the_interpreter runs it")


@pytest.mark.skipif(interpreted, reason="this test starts the interpreter")
def test_the_interpreter():
    """All tests pass with the kernels on the CPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", os.path.dirname(__file__)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@in_the_interpreter
def test_kernels_are_called(monkeypatch):
    from my_ops import _triton

    monkeypatch.delattr(_triton, "launch")
    with pytest.raises(NameError, match="launch"):
        masked_softmax(*arguments())


@pytest.mark.skipif(interpreted, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_the_compiler(kernel, dtype):
    """It compiles for GPUs of NVIDIA and of AMD."""
    from my_ops import _triton

    kernel = getattr(_triton, kernel)
    types = {name: f"*{dtype}" for name in kernel.arg_names}
    types |= {"mask": "*i1", "columns": "i32", "BLOCK": "constexpr"}
    source = triton.compiler.ASTSource(kernel, types, {"BLOCK": 1024})
    for target in (("cuda", 80, 32), ("hip", "gfx942", 64)):
        triton.compile(source, triton.backends.compiler.GPUTarget(*target))
