"""Which instructions the CPU kernels use, and which products of oneDNN.

Both are chosen once in a process. The fuzzer compares the numbers of each path (tests/tools/fuzz).
"""

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from common import CXX, ROOT, environment, printed
from torch.utils.cpp_extension import include_paths

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


LOOPS_OF_GATES = """
#include "ops/gate_math.h"

using Math = lltm::CellMath<float>;

void forward(Math math, const float* __restrict__ in, float* __restrict__ out, long n) {
  for (long i = 0; i < n; ++i) {
    const auto cell = math.forward(in[i], in[i + n], in[i + 2 * n], in[i + 3 * n]);
    out[i] = cell.new_h;
    out[i + n] = cell.new_cell;
  }
}

void backward(Math math, const float* __restrict__ in, float* __restrict__ out, long n) {
  for (long i = 0; i < n; ++i) {
    const auto cell = math.backward(
        in[i], in[i + n], lltm::tanh(in[i + 2 * n]),
        in[i + 3 * n], in[i + 4 * n], in[i + 5 * n]);
    out[i] = cell.d_input_gate;
    out[i + n] = cell.d_output_gate;
    out[i + 2 * n] = cell.d_candidate;
    out[i + 3 * n] = cell.d_old_cell;
  }
}
"""
INSTRUCTION_SETS = {16: [], 32: ["-mavx2", "-mfma"], 64: ["-mavx512f", "-mprefer-vector-width=512"]}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("width", INSTRUCTION_SETS)
def test_the_loops_of_the_gates_are_vectorised(tmp_path, width):
    """With -O3 alone: in the source no choice is left of which the compiler makes a jump."""
    source = tmp_path / "loops.cpp"
    source.write_text(LOOPS_OF_GATES)
    includes = [f"-I{ROOT / 'csrc'}", *(f"-I{path}" for path in include_paths())]
    options = ["-std=c++20", "-O3", *INSTRUCTION_SETS[width], "-fopt-info-vec"]
    command = [CXX, *options, *includes, "-c", source, "-o", tmp_path / "loops.o"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert len(re.findall(rf"loops.cpp.* loop vectorized using {width} byte vectors", said)) == 2


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
