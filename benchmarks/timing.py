"""Medians of torch.utils.benchmark, contenders taking turns, and the calls that are timed."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

# The numbers are those of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Training takes gradients of the parameters. In a model a step needs those of its inputs, too:
# for the step before it, and for the layer below.
ALL_GRADIENTS = "training, all gradients"
KINDS = ("inference", "training", ALL_GRADIENTS)


def settle_allocator() -> None:
    """Lets glibc keep memory instead of giving it back to the system after some calls.

    The next call would pay for its pages anew. Blocks of more than 32 MiB go back nevertheless.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def medians(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median microseconds of a call of each function, over rounds in which they take turns.

    Each round begins with another one.
    """
    timers = {
        name: Timer("f()", globals={"f": function}, num_threads=torch.get_num_threads())
        for name, function in functions.items()
    }
    for timer in timers.values():
        timer.timeit(3)  # compiles, and warms the caches
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(timers)
    for first in range(rounds):
        for i in range(len(names)):
            name = names[(first + i) % len(names)]
            times[name].append(timers[name].blocked_autorange(min_run_time=0.05).median)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def calls(
    what: str,
    modules: dict[str, nn.Module],
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    grads: tuple[Tensor, ...],
) -> dict[str, Callable[[], Any]]:
    """A call of each module, or of each that can be trained; what is one of KINDS.

    ``call(module, *inputs)`` returns what backward begins with.
    """
    if what == "inference":
        return {name: partial(call, module, *inputs) for name, module in modules.items()}
    leaves: tuple[Tensor, ...] = ()
    if what == ALL_GRADIENTS:
        inputs = leaves = tuple(input.detach().requires_grad_() for input in inputs)

    def training(module: nn.Module) -> Callable[[], Any]:
        wanted = [*module.parameters(), *leaves]
        return lambda: torch.autograd.grad(call(module, *inputs), wanted, grads)

    return {name: training(module) for name, module in modules.items() if [*module.parameters()]}


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
