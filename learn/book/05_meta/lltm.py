"""The LLTM as an operator that torch.compile can trace."""

import runpy

import torch
from build_library import BOOK, build

build("04_backward/lltm.cpp", "04_backward/lltm_cpu.cpp", "05_meta/lltm_meta.cpp")
runpy.run_path(str(BOOK / "04_backward" / "lltm_autograd.py"))


def forward(input, weights, bias, old_h, old_cell):
    return torch.ops.lltm._forward_with_gates(input, weights, bias, old_h, old_cell)[:2]
