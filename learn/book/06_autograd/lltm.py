"""The LLTM with autograd in C++."""

import torch
from build_library import build

build(
    "04_backward/lltm.cpp",
    "04_backward/lltm_cpu.cpp",
    "05_meta/lltm_meta.cpp",
    "06_autograd/lltm_autograd.cpp",
)
forward = torch.ops.lltm.forward
