"""What the machine can do at best: the rate of products, and bandwidth."""

from __future__ import annotations

import itertools

import torch
from timing import medians


def product_rate(dtype: torch.dtype) -> float:
    """FLOP per second of oneDNN's block products: the best block, operands in the cache."""
    try:
        torch.ops.lltm_benchmark.brgemm(dtype, 32, 32, 256, 1)
    except RuntimeError:  # oneDNN multiplies it on no such processor, and the kernels convert it
        dtype = torch.float32
    best = 0.0
    for m, n in itertools.product((32, 64, 128), (32, 48, 64)):
        flop = 2 * m * n * 256 * torch.get_num_threads()
        repeats = int(2e7 / flop) + 1
        functions = {
            "": lambda m=m, n=n, r=repeats: torch.ops.lltm_benchmark.brgemm(dtype, m, n, 256, r)
        }
        best = max(best, flop * repeats / medians(functions, rounds=3, min_run_time=0.02)[""])
    return best


def bandwidth(size: int) -> float:
    """Bytes per second at which as many bytes are read, over and over: of the cache they fit in."""
    data = torch.zeros(max(4096, size // 4))
    repeats = int(2e7 / data.nbytes) + 1
    functions = {"": lambda: torch.ops.lltm_benchmark.read(data, repeats)}
    return data.nbytes * repeats / medians(functions, rounds=3, min_run_time=0.02)[""]
