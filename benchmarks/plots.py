"""Draws pictures of CSV files of figures beside them: lengths, recurrence, sweep. Without files,
draws those of the docs.
"""

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

PLOTTED = ("zen4/lengths.csv", "zen4/sweep.csv", "h100/recurrence.csv")
OURS, PEER, OTHER = "tab:red", "tab:gray", "silver"
# What the README shows: from which file, which shape of it, and what a newcomer calls the
# contenders.
GLANCED = DOCUMENTED / "zen4"
PROCESSOR = "AMD EPYC, family 25, model 17 (zen4)"
GLANCE = {
    "cell": (
        "64x256x512",
        "One step: 64 rows, 256 features, 512 units",
        {
            "lltm_ops": "LLTMCell of this package",
            "eager": "its formulas in plain PyTorch",
            "compile": "the same under torch.compile",
            "C++": "the same in C++, as tutorials teach it",
            "LSTMCell": "nn.LSTMCell",
        },
    ),
    "sequence": (
        "128x16x128x128",
        "A sequence: 128 steps, 16 rows, 128 features, 128 units",
        {
            "lltm_ops": "LLTM of this package",
            "LSTM": "nn.LSTM",
            "GRU": "nn.GRU",
            "eager loop": "LLTM in plain PyTorch, in a loop",
        },
    ),
}


def counted(threads: str) -> str:
    return f"{threads} thread{'s' if int(threads) > 1 else ''}"


def plot_recurrence(rows: list[Row]) -> None:
    """Bars of microseconds a step; a panel for inference and one for training."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    dtype = rows[0]["dtype"]
    for axis, what in zip(axes, ("inference", "training"), strict=True):
        bars = [row for row in rows if (row["dtype"], row["what"]) == (dtype, what)]
        colors = {"recurrence": OURS, "a kernel a step": "lightcoral", "nn.LSTM": PEER}
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


def plot_sweep(rows: list[Row]) -> None:
    """A map of batch by state for each number of input features: eager's time over ours."""
    from matplotlib.colors import TwoSlopeNorm

    threads = rows[0]["threads"]
    rows = [row for row in rows if row["threads"] == threads]
    keys = ("batch", "input", "state")
    batches, inputs, states = (sorted({int(row[key]) for row in rows}) for key in keys)
    kinds = [key for key in rows[0] if key not in (*keys, "threads")]
    ratios = {
        (what, *(int(row[key]) for key in keys)): float(row[what]) for row in rows for what in kinds
    }
    figure, axes = plt.subplots(
        len(kinds), len(inputs), figsize=(2.2 * len(inputs), 2.2 * len(kinds)),
        squeeze=False, sharex=True, sharey=True, layout="constrained",
    )  # fmt: skip
    for line, what in enumerate(kinds):
        for axis, size in zip(axes[line], inputs, strict=True):
            values = [[ratios[what, batch, size, state] for state in states] for batch in batches]
            norm = TwoSlopeNorm(1.0, 0.5, 4.0)
            image = axis.imshow(values, origin="lower", cmap="RdYlGn", norm=norm, aspect="auto")
            axis.set_xticks(range(len(states)), states, rotation=90, fontsize=7)
            axis.set_yticks(range(len(batches)), batches, fontsize=7)
            axis.set_title(f"{what}, input {size}", fontsize=7)
        axes[line][0].set_ylabel("batch", fontsize=8)
    figure.supxlabel("state", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label="eager's time over ours", extend="max")
    figure.suptitle(f"float32, {counted(threads)}", fontsize=9)


def plot_lengths(rows: list[Row]) -> None:
    """Time for a row by the length of the sequences, padded and packed."""
    from matplotlib.ticker import LogLocator

    threads = list(dict.fromkeys(row["threads"] for row in rows))
    figure, axes = plt.subplots(
        len(threads), 2, figsize=(9, 1 + 2.6 * len(threads)), layout="constrained",
        squeeze=False, sharex=True,
    )  # fmt: skip
    for line, count in zip(axes, threads, strict=True):
        for axis, what in zip(line, ("inference", "training"), strict=True):
            for name, color in (("lltm_ops", OURS), ("LSTM", PEER)):
                for form, style in (("padded", "o-"), ("packed", "x--")):
                    wanted = {"threads": count, "what": what, "form": form}
                    points = [row for row in rows if wanted.items() <= row.items() and row[name]]
                    axis.plot(
                        [int(row["length"]) for row in points],
                        [float(row[name]) for row in points],
                        style, color=color, label=f"{name}, {form}",
                    )  # fmt: skip
            axis.set(xscale="log", yscale="log", title=f"{what}, {counted(count)}")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        line[0].set_ylabel("microseconds for a row")
    axes[0, 0].legend(fontsize=8)
    figure.supxlabel("steps of the longest sequence", fontsize=10)
    sizes = f"batch {lengths.BATCH}, input and state {lengths.SIZE}"
    figure.suptitle(f"{sizes}, float32", fontsize=9)


def glance() -> dict[str, dict[str, float]]:
    """Titles of the README's picture, and below each the contenders' times over ours."""
    panels = {}
    for name, (shape, title, names) in GLANCE.items():
        wanted = {"dtype": "float32", "shape": shape, "threads": "1", "what": "training"}
        rows = figures.read(GLANCED / f"{name}.csv")
        row = next(row for row in rows if wanted.items() <= row.items())
        ours = float(row["lltm_ops"])
        panels[title] = {shown: round(float(row[name]) / ours, 3) for name, shown in names.items()}
    return panels


def plot_glance(panels: dict[str, dict[str, float]], file: Path) -> None:
    """A few bars for the README: times of training over ours. The file has them as text, too."""
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 3.8), sharex=True, layout="constrained",
        height_ratios=[len(times) for times in panels.values()],
    )  # fmt: skip
    for axis, (title, times) in zip(axes, panels.items(), strict=True):
        ours, *others = times
        bars = axis.barh([*times], [*times.values()], color=[OURS, *len(others) * [OTHER]])
        axis.bar_label(bars, fmt="%.2f", padding=4)
        axis.axvline(times[ours], color=OURS, linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10, loc="left")
        axis.invert_yaxis()
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(length=0, labelbottom=False)
    axes[0].margins(x=0.1)
    figure.suptitle(
        f"Time to train over ours, float32, one thread, {PROCESSOR}: shorter is faster",
        fontsize=10,
    )
    figure.savefig(file, dpi=100, metadata={"Description": json.dumps(panels)})


PLOTS: dict[str, Any] = {
    "lengths": plot_lengths,
    "recurrence": plot_recurrence,
    "sweep": plot_sweep,
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
