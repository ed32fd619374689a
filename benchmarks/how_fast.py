"""Draws the picture of the README from the CSV files of figures: docs/images/how_fast.png."""

from __future__ import annotations

import json
from pathlib import Path

import figures
import lengths
import matplotlib
from figures import DOCUMENTED

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The picture of the demo has the same colors.
OURS, LSTM, GRU, PLAIN = "tab:red", "tab:blue", "slategrey", "burlywood"
# The README shows float32 on one thread of one processor: panels by file, row, and what a newcomer
# calls the contenders.
PROCESSOR = "zen5"
TRAINING = {"what": "training", "threads": "1"}
PANELS = (
    (
        "Time to train: 16 sequences of 40 to 640 steps",
        f"{PROCESSOR}/lengths.csv",
        TRAINING | {"form": "packed", "length": str(lengths.LONGEST_TRAINED_PACK)},
        {
            "lltm_ops": "LLTM",
            "LSTM by segments": "nn.LSTM, by segments",
            "LSTM padded": "nn.LSTM, padded",
            "LSTM": "nn.LSTM, packed",
            "GRU": "nn.GRU, packed",
        },
    ),
    (
        "Time to train: 16 sequences of 128 steps each",
        f"{PROCESSOR}/sequence.csv",
        TRAINING | {"dtype": "float32", "shape": "128x16x128x128"},
        {
            "lltm_ops": "LLTM",
            "LSTM": "nn.LSTM",
            "GRU": "nn.GRU",
            "compiled loop": "compiled loop of an LLTM cell",
            "eager loop": "eager loop of an LLTM cell",
        },
    ),
    (
        "Memory to train: 16 sequences of 1000 steps",
        "memory.csv",
        {},
        {"lltm_ops": "LLTM", "LSTM": "nn.LSTM", "GRU": "nn.GRU"},
    ),
)


def panels() -> dict[str, dict[str, float]]:
    """Titles of the README's panels, and below each how many times as much as ours others take."""
    panels = {}
    for title, file, wanted, names in PANELS:
        row = next(r for r in figures.read(DOCUMENTED / file) if wanted.items() <= r.items())
        ours = float(row["lltm_ops"])
        times = {shown: round(float(row[name]) / ours, 3) for name, shown in names.items()}
        panels[title] = dict(sorted(times.items(), key=lambda item: item[1]))
    return panels


def measured_on() -> str:
    machines = figures.read(DOCUMENTED / "machines.csv")
    (about,) = (row for row in machines if row["folder"] == PROCESSOR)
    kernels = f"torch {about['torch']}, kernels of commit {about['kernels of commit']}"
    return f"{about['processor']}, one thread, float32, {kernels}, {about['date']}"


def draw(panels: dict[str, dict[str, float]], file: Path) -> None:
    """A few bars for the README. The file has the numbers as text, too."""
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 5), layout="constrained",
        height_ratios=[len(times) for times in panels.values()],
    )  # fmt: skip
    colors = {"nn.LSTM": LSTM, "nn.GRU": GRU, "LLTM": OURS}
    for axis, (title, times) in zip(axes, panels.items(), strict=True):
        for name, ratio in times.items():
            color = next((colors[word] for word in colors if name.startswith(word)), PLAIN)
            bar = axis.barh(name, ratio, color=color)
            axis.bar_label(bar, [f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"], padding=4)
        axis.axvline(1, color=OURS, linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10, loc="left")
        axis.invert_yaxis()
        axis.margins(x=0.1)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(length=0, labelbottom=False)
    figure.suptitle("Times as much as the LLTM of lltm_ops takes (shorter is better)", fontsize=11)
    figure.supxlabel(measured_on(), x=0.01, ha="left", fontsize=8, color="0.4")
    figure.savefig(file, dpi=200, metadata={"Description": json.dumps(panels)})


if __name__ == "__main__":
    draw(panels(), figures.ROOT / "docs" / "images" / "how_fast.png")
