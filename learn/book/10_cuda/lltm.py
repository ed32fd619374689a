"""The LLTM with a kernel on the GPU, where torch has CUDA and a CUDA toolkit is there."""

import shutil
import subprocess

import torch
from build_library import BOOK, INCLUDE, build
from torch.utils.cpp_extension import CUDA_HOME, include_paths

NVCC = shutil.which("nvcc")
HAS_CUDA = torch.version.cuda is not None and CUDA_HOME is not None
build(
    "04_backward/lltm.cpp",
    "05_meta/lltm_meta.cpp",
    "07_composite/lltm_autograd.cpp",
    "07_composite/lltm_composite.cpp",
    "08_autocast/lltm_autocast.cpp",
    "09_kernel/lltm_cpu.cpp",
    *(["10_cuda/lltm_cuda.cu"] if HAS_CUDA else []),
    flags=("-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
)
forward = torch.ops.lltm.forward


def compile_only(output: str) -> None:
    """Compiles the kernel without a GPU, and without a torch that has CUDA."""
    command = [NVCC, "-c", str(BOOK / "10_cuda" / "lltm_cuda.cu"), "-o", output]
    command += [f"-I{path}" for path in INCLUDE + include_paths()]
    command += ["-std=c++20", "--expt-relaxed-constexpr", "-arch=sm_80"]
    # The header that it leaves out is written by the build of a torch with CUDA.
    subprocess.run([*command, "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"], check=True)
