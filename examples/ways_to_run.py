"""A trained model, run eagerly, scripted, compiled and exported: all must agree."""

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

Way = Callable[[Tensor, Tensor], Tensor]


def script(model: nn.Module, input: Tensor, lengths: Tensor) -> Way:
    return torch.jit.script(model)


def compile(model: nn.Module, input: Tensor, lengths: Tensor) -> Way:
    return torch.compile(model, fullgraph=True)


def export(model: nn.Module, input: Tensor, lengths: Tensor) -> Way:
    """Compiled ahead of time, for any number of steps and rows."""
    time, batch = torch.export.Dim("time"), torch.export.Dim("batch")
    shapes = ({0: time, 1: batch}, {0: batch})
    program = torch.export.export(model, (input, lengths), dynamic_shapes=shapes)
    with tempfile.TemporaryDirectory() as folder:
        package = str(Path(folder) / "model.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        return torch._inductor.aoti_load_package(package)


WAYS = {"torch.compile": compile, "AOTInductor": export}
if sys.version_info < (3, 14):  # where TorchScript ends
    WAYS = {"torch.jit.script": script} | WAYS


@torch.no_grad()
def compare(model: nn.Module, input: Tensor, lengths: Tensor) -> dict[str, tuple[float, float]]:
    """Prints each way's largest difference from eager and its seconds per call, and returns both.

    A way that this machine has no means for, such as a compiler, is left out with a sentence.
    """
    expected = model(input, lengths)
    ways: dict[str, Way] = {"eager": model}
    for name, make in WAYS.items():
        print(f"preparing {name} ...", flush=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch deprecates what it uses itself
                way = make(model, input, lengths)
                way(input, lengths)
        except Exception as error:  # each way raises kinds of its own
            reason = next(iter(str(error).splitlines()), "")
            print(f"{name} is left out, because of {type(error).__name__}: {reason}")
        else:
            ways[name] = way
    found = {}
    print(f"{'':18}{'largest difference':>20}{'time per call':>15}")
    for name, way in ways.items():
        difference = (way(input, lengths) - expected).abs().max().item()
        call = {"way": way, "input": input, "lengths": lengths}
        timer = Timer("way(input, lengths)", globals=call)
        seconds = timer.blocked_autorange(min_run_time=0.5).median
        print(f"{name:18}{difference:20.1e}{seconds * 1e3:12.2f} ms")
        found[name] = difference, seconds
    return found


def agree(found: dict[str, tuple[float, float]]) -> bool:
    """The layer is the same operator in each way, and only the head's product may be rounded."""
    return all(difference <= 1e-5 for difference, _ in found.values())
