"""Every path of the CPU kernels gives the same numbers, on every machine.

Which instructions the kernels use, and which products of oneDNN, is chosen once in a process, so
each choice runs the value and gradient tests in its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import assert_matches_float64, double, each_dtype, sample_inputs

import lltm_ops

TESTS = Path(__file__).parent
# Derivatives of higher order run no other kernels than these.
CHOSEN = "not cuda and not gradgradcheck and not gradcheck and not composite and not checkpointing"
VALUE_TESTS = ["test_values.py", "test_gradients.py", "test_sequence.py"]
# Of the kernels: portable and AVX2. Of oneDNN: AVX-512 without bfloat16, AVX2, and nothing that it
# has products for, where PyTorch takes the BLAS. What the machine takes by itself runs in this
# process already; on one without these instructions, all of them come to the same.
CHOICES = [
    ("ATEN_CPU_CAPABILITY", "default"),
    ("ATEN_CPU_CAPABILITY", "avx2"),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),
    ("ONEDNN_MAX_CPU_ISA", "AVX2"),
    ("ONEDNN_MAX_CPU_ISA", "SSE41"),
]


@pytest.mark.parametrize(("variable", "value"), CHOICES)
def test_path(variable, value):
    files = [str(TESTS / name) for name in VALUE_TESTS]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", CHOSEN, "-p", "no:cacheprovider", *files],
        env={**os.environ, variable: value},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


@each_dtype
def test_without_onednn(dtype):
    """It can be switched off and on at any time."""
    inputs = sample_inputs(dtype=dtype, shape=(40, 30, 50))
    exact = lltm_ops.reference(*double(inputs))
    with torch.backends.mkldnn.flags(enabled=False):
        outputs = lltm_ops.forward(*inputs)
    for actual, expected in zip(outputs, exact, strict=True):
        assert_matches_float64(actual, expected)
