"""The LLTM under torch.func."""

import torch
from build_library import build

build(
    "04_backward/lltm.cpp",
    "04_backward/lltm_cpu.cpp",
    "05_meta/lltm_meta.cpp",
    "07_composite/lltm_autograd.cpp",
    "07_composite/lltm_composite.cpp",
)
forward = torch.ops.lltm.forward
