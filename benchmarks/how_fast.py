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


def panels() -> dict[str, dict[str, float]]:
    """Titles of the README's panels, and below each how many times as much as ours others take."""
    panels = {}
    for title, file, wanted, names in PANELS:
        row = next(r for r in figures.read(DOCUMENTED / file) if wanted.items() <= r.items())
        ours = float(row["lltm_ops"])
        panels[title] = {shown: round(float(row[name]) / ours, 3) for name, shown in names.items()}
    return panels


def draw(panels: dict[str, dict[str, float]], file: Path) -> None:
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


if __name__ == "__main__":
    draw(panels(), figures.ROOT / "docs" / "images" / "how_fast.png")
