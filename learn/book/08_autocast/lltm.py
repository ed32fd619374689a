"""The LLTM under autocast."""

import os

import torch
from build_library import build

build(
    "04_backward/lltm.cpp",
    "04_backward/lltm_cpu.cpp",
    "05_meta/lltm_meta.cpp",
    "07_composite/lltm_autograd.cpp",
    "07_composite/lltm_composite.cpp",
    "08_autocast/lltm_autocast.cpp",
)
forward = torch.ops.lltm.forward


def print_trace() -> None:
    """Every kernel prints its key once LLTM_LOG_CALLS is set."""
    os.environ["LLTM_LOG_CALLS"] = "1"
    shapes = (4, 3), (15, 8), (15,), (4, 5), (4, 5)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    print("Training under autocast", flush=True)
    with torch.autocast("cpu"):
        new_h, _ = forward(*inputs)
    new_h.sum().backward()
    print("vmap under autocast", flush=True)
    with torch.autocast("cpu"):
        torch.vmap(forward, (None, 0, None, None, None))(
            inputs[0], inputs[1].expand(2, 15, 8), *inputs[2:]
        )


if __name__ == "__main__":
    print_trace()
