"""Every path of the CPU kernels gives the same numbers, on every machine.

Which instructions the kernels use, and which products of oneDNN, is chosen once in a process, so
each choice runs the value and gradient tests in its own.
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import (
    CXX,
    ROOT,
    SEQUENCE_SHAPES,
    SHAPES,
    backward_inputs,
    each_dtype,
    printed,
    sample_inputs,
    sequence_backward_inputs,
    sequence_inputs,
)
from torch.profiler import ProfilerActivity, profile
from torch.utils.cpp_extension import include_paths

import lltm_ops

TESTS = Path(__file__).parent
# csrc/cpu/primitives/gemm.cpp asks the same.
INSTRUCTIONS = Path("/proc/cpuinfo").read_text().split()
HAS_BFLOAT16_PRODUCTS = "avx512_bf16" in INSTRUCTIONS
# What computes numbers: the rest of these files is about autograd, or the same on each path.
CHOSEN = "tiles or reference or accuracy or threads or infinite"
VALUE_TESTS = [f"test_{of}.py" for of in ("tiles", "values", "accuracy", "gradients", "sequence")]
# The kernels run as portable code and with AVX2; oneDNN with AVX-512 without bfloat16, with AVX2,
# and with nothing that it has products for, where PyTorch takes the BLAS. What the machine takes by
# itself runs in this process already: a choice differs from it where there are instructions that
# it forbids. Without AVX-512 the kernels never ask oneDNN.
CHOICES = {
    ("ATEN_CPU_CAPABILITY", "default"): "avx2",
    ("ATEN_CPU_CAPABILITY", "avx2"): "avx512f",
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"): "avx512_bf16",
    ("ONEDNN_MAX_CPU_ISA", "AVX2"): "avx512f",
    ("ONEDNN_MAX_CPU_ISA", "SSE41"): "avx512f",
}


def run_tests(chosen, files, **environment):
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    printed(*pytest, *(TESTS / name for name in files), cwd=ROOT, env=os.environ | environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value"),
    [choice for choice, forbidden in CHOICES.items() if forbidden in INSTRUCTIONS],
)
def test_path(variable, value):
    # oneDNN multiplies no float64.
    chosen = f"({CHOSEN}) and not float64" if variable.startswith("ONEDNN") else CHOSEN
    run_tests(chosen, VALUE_TESTS, **{variable: value})


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
    run_tests("threads", ["test_sequence.py"], LD_PRELOAD=str(library))


LOOPS_OF_GATES = """
#include "ops/gate_math.h"

void forward(const float* __restrict__ in, float* __restrict__ out, long n) {
  for (long i = 0; i < n; ++i) {
    const auto cell = lltm::cell_forward<float>(in[i], in[i + n], in[i + 2 * n], in[i + 3 * n]);
    out[i] = cell.new_h;
    out[i + n] = cell.new_cell;
  }
}

void backward(const float* __restrict__ in, float* __restrict__ out, long n) {
  for (long i = 0; i < n; ++i) {
    const auto cell = lltm::cell_backward<float>(
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


def paths(call):
    """The names that the kernels record for the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    names = {event.key for event in profiled.key_averages()}
    return {name for name in names if re.match("lltm::.*_gemm", name)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("onednn", [True, False])
def test_a_profile_says_which_path_a_call_took(dtype, onednn):
    native = dtype == torch.bfloat16 and onednn and HAS_BFLOAT16_PRODUCTS
    gemm = "gemm_bfloat16" if native else "gemm"
    with torch.backends.mkldnn.flags(enabled=onednn):
        for batch, expected in ((8, "forward_gemm"), (64, f"forward_{gemm}")):
            inputs = sample_inputs(dtype=dtype, shape=(batch, 6, 4))
            assert paths(lambda i=inputs: lltm_ops.forward(*i)) == {f"lltm::{expected}"}
        inputs = backward_inputs(dtype=dtype, shape=(3, 6, 4))
        assert paths(lambda: lltm_ops.backward(*inputs)) == {f"lltm::backward_{gemm}"}
        # With few steps, a sequence takes the paths of the cell.
        for steps, expected in ((7, "forward_gemm"), (8, f"sequence_forward_{gemm}")):
            inputs = sequence_inputs(dtype=dtype, shape=(steps, 3, 6, 4))
            found = paths(lambda i=inputs: lltm_ops.sequence_forward(*i))
            assert found == {f"lltm::{expected}"}
        inputs = sequence_backward_inputs(dtype=dtype, shape=(3, 3, 6, 4))
        found = paths(lambda: lltm_ops.sequence_backward(*inputs))
        assert found == {f"lltm::sequence_backward_{gemm}"}


@each_dtype
def test_the_shapes_of_the_tests_take_every_path(dtype):
    taken = set()
    for shape in SHAPES.values():
        inputs = sample_inputs(dtype=dtype, shape=shape)
        taken |= paths(lambda i=inputs: lltm_ops.forward(*i))
    for shape in SEQUENCE_SHAPES.values():
        inputs = sequence_inputs(dtype=dtype, shape=shape)
        taken |= paths(lambda i=inputs: lltm_ops.sequence_forward(*i))
    expected = {"forward_gemm", "sequence_forward_gemm"}
    if dtype == torch.bfloat16 and HAS_BFLOAT16_PRODUCTS:
        expected |= {"forward_gemm_bfloat16", "sequence_forward_gemm_bfloat16"}
    assert taken == {f"lltm::{name}" for name in expected}


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
