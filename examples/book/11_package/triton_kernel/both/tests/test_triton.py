"""All tests once more, with the kernels of Triton on the CPU, where Triton interprets them."""

import os
import subprocess
import sys

import pytest
from test_swiglu import arguments, swiglu

interpreted = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(interpreted, reason="runs the others")
def test_the_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", os.path.dirname(__file__)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.skipif(not interpreted, reason="test_the_interpreter runs it")
def test_kernels_are_called(monkeypatch):
    from my_ops import _triton

    monkeypatch.delattr(_triton, "launch")
    with pytest.raises(NameError, match="launch"):
        swiglu(*arguments())
