"""Every instruction-set path of the CPU kernels that this machine can run gives the same numbers.

The path is chosen once in a process, so each runs the value and gradient tests in its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lltm_ops

TESTS = Path(__file__).parent
# The path of this machine runs in this process already.
CAPABILITIES = {"default": "DEFAULT", "avx2": "AVX2"}
NATIVE = lltm_ops.build_info()["cpu_capability"]


@pytest.mark.parametrize("capability", [c for c, name in CAPABILITIES.items() if name != NATIVE])
def test_path(capability):
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this CPU has one path only")
    files = [str(TESTS / name) for name in ("test_values.py", "test_gradients.py")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "not cuda", "-p", "no:cacheprovider", *files],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
