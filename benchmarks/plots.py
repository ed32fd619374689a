"""Draws a picture of a CSV file of figures: lengths, recurrence. Without files, draws the docs'."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import figures
import lengths
import matplotlib
from figures import DOCUMENTED, Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PLOTTED = ("zen5/lengths.csv", "h100/recurrence.csv")
# The picture of the demo has the same colors.
OURS, LSTM, GRU, PLAIN = "tab:red", "tab:blue", "slategrey", "burlywood"
# A longer bar is cut here, and its number says how long it is.
LONGEST_BAR = 6
# The README shows float32 on one thread of one processor: panels by file, row, and what a newcomer
# calls the contenders.
PROCESSOR = "zen5"
TRAINING = {"what": "training", "threads": "1"}
PANELS = (
    (
        "Time to train, padded: 16 sequences of 128 steps",
        f"{PROCESSOR}/sequence.csv",
        TRAINING | {"dtype": "float32", "shape": "128x16x128x128"},
        {
            "lltm_ops": "LLTM of this package",
            "LSTM": "nn.LSTM",
            "GRU": "nn.GRU",
            "compiled loop": "LLTM in PyTorch, compiled steps",
            "eager loop": "LLTM in PyTorch, eager steps",
        },
    ),
    (
        "Time to train, packed: 16 sequences of 40 to 640 steps",
        f"{PROCESSOR}/lengths.csv",
        TRAINING | {"form": "packed", "length": str(lengths.LONGEST_TRAINED_PACK)},
        {
            "lltm_ops": "LLTM of this package",
            "LSTM by segments": "nn.LSTM, cut by hand",
            "LSTM padded": "nn.LSTM, padded",
            "LSTM": "nn.LSTM, packed",
            "GRU": "nn.GRU, packed",
        },
    ),
    (
        "Memory to train: 16 sequences of 1000 steps",
        "memory.csv",
        {},
        {"lltm_ops": "LLTM of this package", "LSTM": "nn.LSTM", "GRU": "nn.GRU"},
    ),
)


def plot_recurrence(rows: list[Row]) -> None:
    """Bars of microseconds a step; a panel for inference and one for training."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    dtype = rows[0]["dtype"]
    for axis, what in zip(axes, ("inference", "training"), strict=True):
        bars = [row for row in rows if (row["dtype"], row["what"]) == (dtype, what)]
        colors = {"recurrence": OURS, "a kernel a step": "lightcoral", "nn.LSTM": LSTM}
        for i, (name, color) in enumerate(colors.items()):
            heights = [float(row[name] or 0) for row in bars]
            places = [place + (i - 1) * 0.27 for place in range(len(bars))]
            drawn = axis.bar(places, heights, 0.27, label=name, color=color)
            axis.bar_label(drawn, fmt="%.1f", fontsize=7)
        labels = [f"{row['size']} units\nbatch {row['batch']}" for row in bars]
        axis.set_xticks(range(len(bars)), labels, fontsize=8)
        axis.set(title=what, ylabel="microseconds a step")
        axis.legend(fontsize=8)
    figure.suptitle(f"A sequence of {rows[0]['time']} steps, {dtype}")


def plot_lengths(rows: list[Row]) -> None:
    """Time for a row by the length of the sequences: packed, on one thread."""
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    lines = {
        "lltm_ops": (OURS, "o-"),
        "LSTM by segments": (LSTM, "o-"),
        "LSTM padded": (LSTM, "s--"),
        "LSTM": (LSTM, "x:"),
        "GRU": (GRU, "x:"),
    }
    for axis, what in zip(axes, ("inference", "training"), strict=True):
        wanted = {"threads": "1", "what": what, "form": "packed"}
        for name, (color, style) in lines.items():
            points = [row for row in rows if wanted.items() <= row.items() and row[name]]
            steps = [int(row["length"]) for row in points]
            times = [float(row[name]) for row in points]
            axis.plot(steps, times, style, color=color, label=name, markersize=4)
        axis.set(xscale="log", yscale="log", title=what, ylabel="microseconds for a row")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    figure.legend(*axes[1].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.supxlabel("steps of the longest sequence", fontsize=10)
    sizes = f"{lengths.BATCH} packed sequences, {lengths.SIZE} features and units"
    figure.suptitle(f"{sizes}, float32, one thread", fontsize=9)


def glance() -> dict[str, dict[str, float]]:
    """Titles of the README's panels, and below each how many times as much as ours others take."""
    panels = {}
    for title, file, wanted, names in PANELS:
        row = next(r for r in figures.read(DOCUMENTED / file) if wanted.items() <= r.items())
        ours = float(row["lltm_ops"])
        panels[title] = {shown: round(float(row[name]) / ours, 3) for name, shown in names.items()}
    return panels


def plot_glance(panels: dict[str, dict[str, float]], file: Path) -> None:
    """A few bars for the README. The file has the numbers as text, too."""
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 4.6), sharex=True, layout="constrained",
        height_ratios=[len(times) for times in panels.values()],
    )  # fmt: skip
    colors = {"LLTM of": OURS, "nn.LSTM": LSTM, "nn.GRU": GRU, "LLTM in": PLAIN}
    for axis, (title, times) in zip(axes, panels.items(), strict=True):
        for name, ratio in times.items():
            color = next(color for word, color in colors.items() if name.startswith(word))
            bar = axis.barh(name, min(ratio, LONGEST_BAR), color=color)
            label = f"{ratio:.1f}" if ratio <= LONGEST_BAR else f"{ratio:.0f} \N{RIGHTWARDS ARROW}"
            axis.bar_label(bar, [label], padding=4)
        axis.axvline(1, color=OURS, linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10, loc="left")
        axis.invert_yaxis()
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(length=0, labelbottom=False)
    axes[0].margins(x=0.1)
    figure.suptitle("Training time and memory relative to lltm_ops: shorter is better", fontsize=11)
    figure.savefig(file, dpi=100, metadata={"Description": json.dumps(panels)})


PLOTS: dict[str, Any] = {
    "lengths": plot_lengths,
    "recurrence": plot_recurrence,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help=f"of {', '.join(PLOTS)}.csv")
    files = parser.parse_args().files
    if not files:
        plot_glance(glance(), figures.ROOT / "docs" / "images" / "how_fast.png")
    for file in files or [DOCUMENTED / name for name in PLOTTED]:
        PLOTS[file.stem](figures.read(file))
        plt.savefig(file.with_suffix(".png"), dpi=80)


if __name__ == "__main__":
    main()
