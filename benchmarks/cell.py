"""One step of the cell beside what else PyTorch offers for it, all in one process.

Medians of torch.utils.benchmark, the contenders taking turns, in microseconds; ``ratio`` is the
best of the others over ours. Written as JSON with ``--output``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import lltm_ops

# batch, input, state: the tutorial's is the second.
SHAPES = [(1, 32, 128), (16, 32, 128), (64, 256, 512), (256, 1024, 1024)]
Step = Callable[[Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]


class PlainCell(lltm_ops.LLTMCell):
    """The same parameters, the mathematics in plain PyTorch."""

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return lltm_ops.reference(input, self.weights, self.bias, *state)


def contenders(shape: tuple[int, int, int], options: dict) -> dict[str, Step]:
    _, input_size, hidden_size = shape
    torch._dynamo.reset()
    return {
        "lltm_ops": lltm_ops.LLTMCell(input_size, hidden_size, **options),
        "eager": PlainCell(input_size, hidden_size, **options),
        "compile": torch.compile(PlainCell(input_size, hidden_size, **options)),
        "LSTMCell": nn.LSTMCell(input_size, hidden_size, **options),
    }


def inference(step: Step, input: Tensor, state: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        step(input, state)


def training(step: Step, input: Tensor, state: tuple[Tensor, Tensor]) -> None:
    new_h, new_cell = step(input, state)
    torch.autograd.backward((new_h, new_cell), (state[0], state[1]))


def medians(
    function: Callable[..., None], steps: dict[str, Step], arguments: tuple, rounds: int
) -> dict[str, float]:
    """Median microseconds of each step over rounds in which they take turns."""
    timers = {
        name: Timer(
            "function(step, *arguments)",
            globals={"function": function, "step": step, "arguments": arguments},
            num_threads=torch.get_num_threads(),
        )
        for name, step in steps.items()
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for timer in timers.values():
        timer.timeit(3)  # compiles, and warms the caches
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer.blocked_autorange(min_run_time=0.1).median * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="a JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    rows = []
    for shape in SHAPES:
        batch, input_size, hidden_size = shape
        steps = contenders(shape, options)
        input = torch.randn(batch, input_size, **options)
        state = tuple(torch.randn(batch, hidden_size, **options) for _ in range(2))
        for function in (inference, training):
            times = medians(function, steps, (input, state), args.rounds)
            best = min(time for name, time in times.items() if name != "lltm_ops")
            row = {"shape": shape, "what": function.__name__, **times}
            rows.append({**row, "ratio": best / times["lltm_ops"]})
            print(
                f"{' x '.join(map(str, shape)):>18} {function.__name__:>10}",
                *(f"{name} {time:.1f}" for name, time in times.items()),
                f"ratio {rows[-1]['ratio']:.2f}",
                sep="  ",
            )
    if args.output:
        machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
        run = {"machine": machine, "device": args.device, "dtype": args.dtype}
        run |= {"threads": args.threads, "rounds": args.rounds, **lltm_ops.build_info()}
        with open(args.output, "w") as file:
            json.dump(run | {"microseconds": rows}, file, indent=1)


if __name__ == "__main__":
    main()
