"""The LLTM with a kernel of its own on the CPU."""

from collections.abc import Callable

import torch
from build_library import build
from torch.utils.benchmark import Timer

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


def time_steps(batch: int = 256, state_size: int = 512) -> dict[str, float]:
    """Nanoseconds for one hidden unit, of each way to write the loop."""
    build("09_kernel/steps.cpp", flags=FLAGS, name="book_steps")
    without_openmp = tuple(flag for flag in FLAGS if flag != "-fopenmp")
    build("09_kernel/steps.cpp", flags=without_openmp, name="book_steps_without_fopenmp")
    steps = torch.ops.steps
    gates, cell, h, c = (torch.randn(batch, k * state_size) for k in (3, 1, 1, 1))

    def aten() -> None:
        i, o, g = gates.chunk(3, 1)
        torch.tanh(cell + torch.nn.functional.elu(g) * torch.sigmoid(i)) * torch.sigmoid(o)

    def time(step: Callable[[], object], threads: int = 1) -> float:
        timer = Timer("step()", globals={"step": step}, num_threads=threads)
        return timer.blocked_autorange().median / (batch * state_size) * 1e9

    arguments = gates, cell, h, c
    return {
        "ATen's operators": time(aten),
        "one loop, std::exp": time(lambda: steps.plain(*arguments)),
        "gate_math.h, vectorised": time(lambda: steps.vectorized(*arguments)),
        "parallel_for without -fopenmp": time(
            lambda: steps.parallel_without_fopenmp(*arguments), 2
        ),
        "parallel_for on two threads": time(lambda: steps.parallel(*arguments), 2),
    }


if __name__ == "__main__":
    for name, nanoseconds in time_steps().items():
        print(f"{name:32} {nanoseconds:6.2f} ns a unit")
