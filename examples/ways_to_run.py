"""The trained model of char_lm.py, run in four ways and step by step: all have to agree, and each
is timed. What this machine lacks for one way costs that row of the table, with a sentence."""

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from language_model import CharLM
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from tqdm import trange

import lltm_ops

Way = Callable[[Tensor], Tensor]
# Trained weights amplify the rounding of one step in the next.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


class LoopOverTime(nn.Module):
    """What the layer computes, step by step: by its operator for one step, or in plain PyTorch."""

    def __init__(self, layer: lltm_ops.LLTM, step: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layer = layer
        self.step = step

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        h = cell = input.new_zeros(len(input), self.layer.hidden_size)
        outputs = []
        for x in input.unbind(1):
            h, cell = self.step(x, self.layer.weights_l0, self.layer.bias_l0, h, cell)
            outputs.append(h)
        return torch.stack(outputs, dim=1), None


def step_by_step(model: CharLM, step: Callable[..., tuple[Tensor, Tensor]]) -> CharLM:
    """A copy that runs the layer so."""
    model = copy.deepcopy(model)
    model.rnn = LoopOverTime(model.rnn, step)
    return model


def script(model: CharLM, tokens: Tensor) -> Way:
    if sys.version_info >= (3, 14):
        raise RuntimeError("PyTorch has no TorchScript on Python 3.14 and later")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.script.* is deprecated")
        return torch.jit.script(model)


def compile(model: CharLM, tokens: Tensor) -> Way:
    return torch.compile(model, fullgraph=True)


def export(model: CharLM, tokens: Tensor) -> Way:
    """Exported for any number of rows and characters."""
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("time")},)
    return torch.export.export(model, (tokens,), dynamic_shapes=shapes).module()


# How each is made, and what it needs beside torch.
MADE: dict[str, tuple[Callable[[CharLM, Tensor], Way], str]] = {
    "torch.jit.script": (script, "Python 3.13 at most"),
    "torch.compile": (compile, "a C++ compiler and the C headers of Python"),
    "torch.export": (export, "nothing else"),
}


def prepare(model: CharLM, tokens: Tensor) -> dict[str, Way]:
    """Eager, and what this machine has the means for, after a first call, which may compile."""
    ways: dict[str, Way] = {"eager": model}
    for name, (make, needs) in MADE.items():
        print(f"preparing {name} ...", flush=True)
        try:
            way = make(model, tokens)
            way(tokens)
        except Exception as error:  # each way raises its own kinds
            reason = next(iter(str(error).splitlines()), "")
            print(
                f"{name} is left out, because it ended with {type(error).__name__}: {reason} "
                f"(It needs {needs}.)"
            )
        else:
            ways[name] = way
    return ways


def seconds_per_call(
    ways: dict[str, Callable[[Tensor], Any]], argument: Tensor
) -> dict[str, float]:
    """The median of each one's best round: other programs can only add to the time of a round.

    The ways take turns, so that a quiet moment is nobody's alone.
    """
    timers = {
        name: Timer(
            "way(argument)",
            globals={"way": way, "argument": argument},
            num_threads=torch.get_num_threads(),
        )
        for name, way in ways.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for timer in timers.values():
        timer.timeit(3)  # warms the caches
    for _ in trange(10, desc="timing", unit="round", leave=False):
        for name, timer in timers.items():
            times[name].append(timer.blocked_autorange(min_run_time=0.1).median)
    return {name: min(values) for name, values in times.items()}


@torch.no_grad()
def compare(model: CharLM, tokens: Tensor) -> tuple[bool, dict[str, float]]:
    """Prints a table of all ways to run the model; whether they agree, and their times."""
    ways = prepare(model, tokens)
    ways["cell in a loop"] = step_by_step(model, lltm_ops.forward)
    ways["plain PyTorch"] = step_by_step(model, lltm_ops.reference)

    times = seconds_per_call(ways, tokens)
    expected = model(tokens)
    failures = []
    print(f"\nOne call, for {tokens.shape[1]} characters of each of {tokens.shape[0]} texts:")
    print(f"{'':18}{'difference':>12}{'time per call':>15}{'speed-up':>10}")
    for name, way in ways.items():
        actual = way(tokens)
        difference = (actual - expected).abs().max().item()
        ratio = times["plain PyTorch"] / times[name]
        print(f"{name:18}{difference:12.1e}{times[name] * 1e3:12.2f} ms{ratio:9.2f}x")
        try:
            torch.testing.assert_close(actual, expected, **TOLERANCE)
        except AssertionError as error:
            failures.append(f"{name} does not agree with eager: {error}")
    print("difference: largest of a logit from eager; speed-up: over plain PyTorch.")
    print("\n".join(failures) or "All agree with eager.")
    return not failures, times
