"""The LLTM with a kernel of its own on the CPU."""

import torch
from build_library import build

# For this processor only. The package compiles for several, and chooses when it runs.
FLAGS = ("-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
build(
    "04_backward/lltm.cpp",
    "05_meta/lltm_meta.cpp",
    "07_composite/lltm_autograd.cpp",
    "07_composite/lltm_composite.cpp",
    "08_autocast/lltm_autocast.cpp",
    "09_kernel/lltm_cpu.cpp",
    flags=FLAGS,
)
forward = torch.ops.lltm.forward
