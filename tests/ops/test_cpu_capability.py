"""Which instructions the CPU kernels use, and which products of oneDNN.

Both are chosen once in a process. The fuzzer compares the numbers of each path (tests/tools/fuzz).
"""

import subprocess
import sys
from pathlib import Path

import pytest
from common import CXX, ROOT, environment, printed

TESTS = Path(__file__).parent
INSTRUCTIONS = Path("/proc/cpuinfo").read_text().split()
# A choice differs from what the machine takes by itself if there are instructions that it forbids.
CHOICES = {
    ("ATEN_CPU_CAPABILITY", "default"): "avx2",
    ("ATEN_CPU_CAPABILITY", "avx2"): "avx512f",
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"): "avx512_bf16",
}
SUMS = """
import torch, lltm_ops
from common import sample_inputs
for dtype, shape in ((torch.float32, (3, 70, 40)), (torch.bfloat16, (64, 1024, 512))):
    inputs = sample_inputs(dtype=dtype, shape=shape)
    print(lltm_ops.forward(*inputs)[1].double().sum().item())
"""


def test_each_path_is_taken():
    """Each groups its sums in its own way, so the last bits differ."""
    command = [sys.executable, "-W", "ignore", "-c", SUMS]
    choices = [choice for choice, forbidden in CHOICES.items() if forbidden in INSTRUCTIONS]
    sums = {
        printed(*command, cwd=ROOT / "tests" / "support", env=environment(**dict([choice])))
        for choice in [*choices, ("OMP_NUM_THREADS", "1")]
    }
    assert len(sums) == len(choices) + 1


PRETEND_16_PROCESSORS = """
int omp_get_num_procs(void) {
  return 16;
}
"""


def test_teams_of_more_threads_than_this_machine_has_processors(tmp_path):
    """The kernels form no such team by themselves, so few machines would test the larger ones."""
    source, library = tmp_path / "pretend.c", tmp_path / "pretend.so"
    source.write_text(PRETEND_16_PROCESSORS)
    subprocess.run([CXX, "-shared", "-fPIC", source, "-o", library], check=True)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "threads"]
    printed(*pytest, TESTS / "test_sequence.py", cwd=ROOT, env=environment(LD_PRELOAD=str(library)))


WITHOUT_EXECUTABLE_MEMORY = """
import copy, ctypes, sys, torch, lltm_ops
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0):
    sys.exit("Linux before 6.3")
for dtype in (torch.float32, torch.bfloat16):
    layer = lltm_ops.LLTM(64, 128).to(dtype)
    input = torch.randn(20, 32, 64, dtype=dtype, requires_grad=True)
    output, _ = layer(input)
    expected, _ = copy.deepcopy(layer).double()(input.double())
    torch.testing.assert_close(output, expected.to(dtype), rtol=1e-2, atol=1e-2)
    output.sum().backward()
"""


def test_a_system_that_refuses_generated_code():
    """systemd's MemoryDenyWriteExecute does, and oneDNN cannot make a kernel there."""
    command = [sys.executable, "-c", WITHOUT_EXECUTABLE_MEMORY]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Linux before 6.3" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
