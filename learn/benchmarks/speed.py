"""Times the chapters of the book and the package, and draws the book's pictures.

Each chapter registers the same operators, so each runs in a process of its own. They take turns.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path

import timing
import torch
from torch.utils.benchmark import Timer
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "examples" / "book"
PICTURES = ROOT / "docs" / "images" / "book"
# batch, input_features, state_size
SHAPES = {"16 x 32 x 128": (16, 32, 128), "64 x 256 x 512": (64, 256, 512)}
PACKAGE = "lltm_ops"
ROUNDS = 5


def contenders() -> dict[str, Path]:
    """Labels of the bars, with the folder that has the code."""
    chapters = {path.parent.name: path.parent for path in sorted(BOOK.glob("0*/lltm.py"))}
    return {name.replace("_", " "): folder for name, folder in chapters.items()}


def load(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def work(name: str) -> dict[str, float]:
    """Microseconds of one contender, on one thread."""
    if name == PACKAGE:
        import lltm_ops as code
    else:
        sys.path.insert(0, str(BOOK))
        code = load(contenders()[name] / "lltm.py")
    times = {}
    for label, (batch, input_features, state_size) in SHAPES.items():
        features = state_size + input_features
        shapes = [(batch, input_features), (3 * state_size, features), (3 * state_size,)]
        inputs = [torch.randn(shape) / 10 for shape in [*shapes, *[(batch, state_size)] * 2]]

        def inference(inputs: list[torch.Tensor] = inputs) -> None:
            with torch.no_grad():
                code.forward(*inputs)

        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        ones = torch.ones(batch, state_size)

        def training(leaves: list[torch.Tensor] = leaves, ones: torch.Tensor = ones) -> None:
            torch.autograd.grad(code.forward(*leaves), leaves, (ones, ones))

        for what in (inference, training):
            timer = Timer("f()", globals={"f": what}, num_threads=1)
            median = timer.blocked_autorange(min_run_time=0.3).median
            times[f"{label}, {what.__name__}"] = median * 1e6
    return times


def take_turns() -> dict[str, dict[str, float]]:
    """Medians over rounds of each contender's times."""
    names = [*contenders(), PACKAGE]
    all_times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _, name in tqdm([(k, name) for k in range(ROUNDS) for name in names]):
        # A folder each: in one folder, chapters would replace one another's library.
        folder = {"TORCH_EXTENSIONS_DIR": str(ROOT / "build/book" / name)}
        env = os.environ | {"PYTHONPATH": str(ROOT)} | folder
        all_times[name].append(timing.in_a_process(__file__, name, env=env))
    return {
        name: {what: statistics.median(t[what] for t in times) for what in times[0]}
        for name, times in all_times.items()
    }


def draw_speed(times: dict[str, dict[str, float]]) -> None:
    from matplotlib import pyplot

    python = times["01 python"]
    most = max(python[what] / t[what] for t in times.values() for what in python)
    colors = ["tab:red" if name == PACKAGE else "silver" for name in times]
    figure, axes = pyplot.subplots(1, len(python), figsize=(11, 3.6), sharey=True)
    for axis, what in zip(axes, python, strict=True):
        speeds = [python[what] / t[what] for t in times.values()]
        bars = axis.barh(list(times), speeds, color=colors)
        axis.bar_label(bars, fmt="%.2f", padding=2)
        axis.axvline(1, color="gray", linewidth=0.8)
        axis.set(xlim=(0, most * 1.2), title=what.replace(", ", "\n"))
    axes[0].invert_yaxis()
    figure.supxlabel("speed, Python = 1")
    figure.tight_layout()
    figure.savefig(PICTURES / "speed.png", dpi=80)


def draw_steps(nanoseconds: dict[str, float]) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 0.45 * len(nanoseconds) + 1))
    bars = axis.barh(list(nanoseconds), list(nanoseconds.values()))
    axis.bar_label(bars, fmt="%.3g", padding=2)
    axis.invert_yaxis()
    axis.set(xlabel="nanoseconds a hidden unit", xscale="log")
    axis.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(PICTURES / "steps.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work)))
        return
    torch.set_num_threads(1)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(ROOT / "build" / "book" / "09 kernel")
    times = take_turns()
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / "speed.json").write_text(json.dumps(times, indent=1) + "\n")
    draw_speed(times)
    sys.path.insert(0, str(BOOK))
    draw_steps(load(BOOK / "09_kernel" / "lltm.py").time_steps())
    for name, row in times.items():
        print(f"{name:14}", *(f"{what} {value:9.1f} us" for what, value in row.items()))


if __name__ == "__main__":
    main()
