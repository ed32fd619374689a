"""Times the chapters of the book and the package, and draws the picture of chapter 9."""

import argparse
import json
from pathlib import Path

import torch
from turns import BOOK, microseconds, take_turns

PICTURES = BOOK / "images"
# batch, input_features, state_size
SHAPES = {"16 x 32 x 128": (16, 32, 128), "64 x 256 x 512": (64, 256, 512)}
PACKAGE = "lltm_ops"
ROUNDS = 5
# Labels of the bars, with the folder that has the code.
CONTENDERS: dict[str, Path | None] = {
    path.name.replace("_", " "): path for path in sorted(BOOK.glob("0*"))
} | {PACKAGE: None}


def work(name: str) -> dict[str, float]:
    """Microseconds of one contender."""
    if name == PACKAGE:
        import lltm_ops as code
    else:
        import lltm as code
    from sample import sample_inputs

    torch.set_num_threads(1)
    times = {}
    for label, shape in SHAPES.items():
        inputs = sample_inputs(*shape, dtype=torch.float32)

        def inference(inputs: list[torch.Tensor] = inputs) -> None:
            with torch.no_grad():
                code.forward(*inputs)

        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        ones = torch.ones_like(inputs[-1])

        def training(leaves: list[torch.Tensor] = leaves, ones: torch.Tensor = ones) -> None:
            torch.autograd.grad(code.forward(*leaves), leaves, (ones, ones))

        for what in (inference, training):
            times[f"{label}, {what.__name__}"] = microseconds(what)
    return times


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work)))
        return
    times = take_turns(__file__, CONTENDERS, ROUNDS)
    (PICTURES / "speed.json").write_text(json.dumps(times, indent=1) + "\n")
    draw_speed(times)
    for name, row in times.items():
        print(f"{name:14}", *(f"{what} {value:9.1f} us" for what, value in row.items()))


if __name__ == "__main__":
    main()
