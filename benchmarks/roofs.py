"""What the machine can do at best: an empty call, bandwidth, the rate of products."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import medians
from torch import Tensor


@dataclass
class Roof:
    call: float  # microseconds
    bytes_per_microsecond: float
    flop_per_microsecond: float

    def share(self, microseconds: float, flop: int, size: int) -> float:
        """Returns the part of our time beyond a call that products or reading take at best."""
        best = max(flop / self.flop_per_microsecond, size / self.bytes_per_microsecond)
        return best / (microseconds - self.call)


def measure(empty: Callable[[], Any], weights: Tensor) -> Roof:
    with torch.no_grad():
        call = medians({"": empty})[""]
    rate = product_rate(weights.dtype, torch.get_num_threads())
    return Roof(call, bandwidth(weights.nbytes), rate)


@functools.cache
def product_rate(dtype: torch.dtype, threads: int) -> float:
    """Times oneDNN's block products: the best block, operands in the cache."""
    try:
        torch.ops.lltm_benchmark.brgemm(dtype, 32, 32, 256, 1)
    except RuntimeError:  # oneDNN multiplies it on no such processor, and the kernels convert it
        dtype = torch.float32
    best = 0.0
    for m, n in itertools.product((32, 64, 128), (32, 48, 64)):
        flop = 2 * m * n * 256 * threads
        repeats = int(2e7 / flop) + 1
        functions = {
            "": lambda m=m, n=n, r=repeats: torch.ops.lltm_benchmark.brgemm(dtype, m, n, 256, r)
        }
        best = max(best, flop * repeats / medians(functions, min_run_time=0.02)[""])
    return best


def bandwidth(size: int) -> float:
    """Times reading as many bytes over and over, from the cache that they fit in."""
    data = torch.zeros(max(4096, size // 4))
    repeats = int(2e7 / data.nbytes) + 1
    functions = {"": lambda: torch.ops.lltm_benchmark.read(data, repeats)}
    return data.nbytes * repeats / medians(functions, rounds=3, min_run_time=0.02)[""]
