"""What the demo found: its picture, and sentences, from the figures of the run."""

import io
import sys
import textwrap
from itertools import accumulate
from pathlib import Path
from typing import Any

from language_model import Training, write
from matplotlib.figure import Figure
from memory_tasks import TASKS

COLORS = {"LLTM": "tab:red", "LSTM": "tab:blue", "GRU": "tab:green"}
SOLVED = 0.01  # squared error
CHANCE = TASKS["recall"]


def kind(layer: str) -> str:
    """Without what is set at its beginning."""
    return layer.split(",")[0]


def smoothed(values: list[float]) -> list[float]:
    return list(accumulate(values, lambda mean, value: 0.95 * mean + 0.05 * value))


def draw(trainings: dict[str, Training], recalls: dict[str, list[float]], path: Path) -> None:
    """Bits per character of each layer, and, once they are known, its errors in recall."""
    panels = 2 if recalls else 1
    figure = Figure(figsize=(6 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    draw_text(axes[0], trainings)
    if recalls:
        draw_recall(axes[1], recalls)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_xlabel("step of training")
    file = io.BytesIO()
    figure.savefig(file, dpi=120)
    write(path, file.getvalue())


def draw_text(axis: Any, trainings: dict[str, Training]) -> None:
    for layer, training in trainings.items():
        color = COLORS[layer]
        steps = range(1, len(training.bits) + 1)
        axis.plot(steps, smoothed(training.bits), color=color, alpha=0.35, linewidth=1)
        if training.validation_bits:
            end = training.validation_bits[-1][1]
            points = zip(*training.validation_bits, strict=True)
            axis.plot(*points, "o-", color=color, label=f"{layer}: {end:.2f}")
    axis.set(title="Text: the next character", ylabel="bits per character")
    validated = [bits for training in trainings.values() for _, bits in training.validation_bits]
    if validated:
        axis.legend(title="unseen text, at the end", loc="upper right")
        if max(validated) > 0:  # a text of one letter has no bits
            axis.set_ylim(0.8 * min(validated), 1.5 * max(validated))


def draw_recall(axis: Any, recalls: dict[str, list[float]]) -> None:
    for layer, losses in recalls.items():
        style = "-" if "," in layer else "--"
        steps = range(1, len(losses) + 1)
        label = layer.replace(", ", "\n")
        axis.plot(steps, smoothed(losses), style, color=COLORS[kind(layer)], label=label)
    axis.axhline(CHANCE, color="black", linestyle=":", linewidth=1, label="always the mean")
    axis.set(yscale="log", title="Memory: the first of 100 values", ylabel="squared error")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def about_text(trainings: dict[str, Training]) -> str:
    bits = {layer: training.validation_bits[-1][1] for layer, training in trainings.items()}
    best, *others = sorted(bits, key=bits.__getitem__)
    rest = listed([f"{layer} {bits[layer]:.2f}" for layer in others])
    return f"Text: {best} learned it best, to {bits[best]:.2f} bits per character; {rest}."


def about_recall(recalls: dict[str, list[float]], errors: dict[str, float]) -> str:
    able = [layer for layer, error in errors.items() if error < SOLVED]
    if not able:
        return "Memory: no layer learned to say the first of 100 values in this run."
    first = {
        layer: next((i for i, loss in enumerate(smoothed(recalls[layer])) if loss < SOLVED), None)
        for layer in able
    }
    # The smoothed loss may not have come down yet.
    after = {layer: f" (after {step} steps)" if step else "" for layer, step in first.items()}
    names = listed([layer + after[layer] for layer in able])
    unable = [f"{layer} ({error:.2f})" for layer, error in errors.items() if layer not in able]
    rest = f"; {listed(unable)} did not, where always the mean has {CHANCE:.2f}" if unable else ""
    return f"Memory: {names} learned to say the first of 100 values{rest}."


def about_speed(steps: dict[str, float], calls: dict[str, float]) -> str:
    times = listed([f"{steps[layer] * 1e3:.0f} ms with {layer}" for layer in COLORS])
    gain = calls["plain PyTorch"] / calls["eager"]
    return (
        f"Speed: a training step on the text takes {times}; without gradients the LLTM's formulas "
        f"in plain PyTorch take {gain:.1f} times as long as the layer."
    )


def print_end(sentences: list[str], files: dict[str, Path]) -> None:
    print("\n--- What the tables show")
    for sentence in sentences:
        print(textwrap.fill(sentence, 100, initial_indent="- ", subsequent_indent="  "))
    print("\n--- What this run left")
    for what, file in files.items():
        print(f"{what:12}{file}")
    print(
        "\n--- What to do next\n"
        "make test           runs the tests of the operators\n"
        "docs/training.md    says when to choose an LLTM, and how to train one\n"
        f'{sys.executable} -c "import lltm_ops; help(lltm_ops.LLTM)"'
    )
