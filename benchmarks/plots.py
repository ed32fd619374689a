"""The pictures of a benchmark's figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "lltm_ops": "tab:red",
    "eager": "tab:blue",
    "compile": "tab:orange",
    "C++": "tab:green",
    "LSTMCell": "tab:gray",
    "cell in a loop": "tab:purple",
    "eager loop": "tab:blue",
    "LSTM": "tab:gray",
    "GRU": "tab:olive",
    "onnxruntime": "tab:brown",
}


def plot_contest(run: dict[str, Any], file: Path) -> None:
    """Bars of each contender's time over ours; below, for the CPU, our rates under the roofs."""
    threads = sorted({row["threads"] for row in run["rows"]})
    has_roofs = any("share_of_roof" in row for row in run["rows"])
    figure, axes = plt.subplots(
        1 + has_roofs,
        len(threads),
        figsize=(6.5 * len(threads), 4.2 * (1 + has_roofs)),
        squeeze=False,
        layout="constrained",
    )
    for column, count in enumerate(threads):
        rows = [row for row in run["rows"] if row["threads"] == count]
        plot_bars(axes[0][column], rows)
        if has_roofs:
            plot_roofs(axes[1][column], rows)
        plural = "s" if count > 1 else ""
        axes[0][column].set_title(f"{count} thread{plural}" if has_roofs else run["machine"])
    figure.suptitle(f"{run['title']}, {run['dtype']}, {run['machine']}, torch {run['torch']}")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def plot_bars(axis: Any, rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["microseconds"])
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [
            row["microseconds"].get(name, 0) / row["microseconds"]["lltm_ops"] for row in rows
        ]
        places = [row + (i - (len(names) - 1) / 2) * width for row in range(len(rows))]
        axis.bar(places, heights, width, label=name, color=COLORS[name])
    labels = [f"{row['shape'].replace(' ', '')}\n{row['what']}" for row in rows]
    axis.set_xticks(range(len(rows)), labels, rotation=45, ha="right", fontsize=8)
    axis.set_ylabel("time, over that of lltm_ops")
    axis.axhline(1, color="black", linewidth=0.5)
    rows_of_legend = 1 if len(names) <= 5 else 2
    axis.legend(fontsize=8, ncols=-(-len(names) // rows_of_legend), loc="upper right")
    axis.set_ylim(top=axis.get_ylim()[1] * (1 + 0.15 * rows_of_legend))


def plot_roofs(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Rates by the whole time of a call; the shares in the legend are of what is beyond it."""
    rows = [row for row in rows if row["what"] == "inference"]
    rate = rows[0]["gflop_per_second_at_best"]
    peer = list(rows[0]["microseconds"])[1]
    intensities = [2 ** (i / 8) for i in range(-16, 80)]
    for row in rows:
        width = row["gigabytes_per_second_at_best"]
        flop, size = row["flop"], row["weight_bytes"]
        line = axis.plot(
            intensities, [min(rate, width * i) for i in intensities], linewidth=0.8, alpha=0.7
        )
        reached = {name: flop / time * 1e-3 for name, time in row["microseconds"].items()}
        label = f"{row['shape'].replace(' ', '')}: {width:.0f} GB/s, {row['share_of_roof']:.0%}"
        color = line[0].get_color()
        axis.plot(flop / size, reached["lltm_ops"], "o", color=color, label=label)
        axis.plot(flop / size, reached[peer], "x", color=color)
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte of the weights", ylabel="GFLOP/s")
    axis.set_title(
        f"inference: lltm_ops (dots) and {peer} (crosses) under the roofs, {rate:.0f} GFLOP/s",
        fontsize=9,
    )
    axis.legend(fontsize=8, loc="lower right")


def plot_recurrence(run: dict[str, Any], file: Path) -> None:
    """Bars of microseconds a step; a panel for inference and one for training."""
    kinds = {"inference": [], "training": []}
    for row in run["rows"]:
        if "microseconds_per_step" in row:
            kinds[row["what"]].append(row)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, (what, rows) in zip(axes, kinds.items(), strict=True):
        names = ["recurrence", "a kernel a step", "nn.LSTM"]
        for i, name in enumerate(names):
            heights = [row["microseconds_per_step"].get(name, 0) for row in rows]
            places = [row + (i - 1) * 0.27 for row in range(len(rows))]
            bars = axis.bar(places, heights, 0.27, label=name)
            axis.bar_label(bars, fmt="%.1f", fontsize=7)
        labels = [f"{row['size']} units\nbatch {row['batch']}" for row in rows]
        axis.set_xticks(range(len(rows)), labels, fontsize=8)
        axis.set(title=what, ylabel="microseconds a step")
        axis.legend(fontsize=8)
    figure.suptitle(f"A sequence of {run['time']} steps, {run['dtype']}, {run['machine']}")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def plot_glance(panels: dict[str, dict[str, float]], processor: str, file: Path) -> None:
    """A few bars for the README: times of training over ours. The file has them as text, too."""
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(8, 3.8),
        sharex=True,
        layout="constrained",
        height_ratios=[len(times) for times in panels.values()],
    )
    for axis, (title, times) in zip(axes, panels.items(), strict=True):
        ours, *others = times
        bars = axis.barh([*times], [*times.values()], color=["tab:red", *len(others) * ["silver"]])
        axis.bar_label(bars, fmt="%.2f", padding=4)
        axis.axvline(times[ours], color="tab:red", linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10, loc="left")
        axis.invert_yaxis()
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(length=0, labelbottom=False)
    axes[0].margins(x=0.1)
    figure.suptitle(
        f"Time to train over ours, float32, one thread, {processor}: shorter is faster",
        fontsize=10,
    )
    figure.savefig(file, dpi=100, metadata={"Description": json.dumps(panels)})
    plt.close(figure)


def plot_sweep(run: dict[str, Any], file: Path) -> None:
    """A map of batch by state for each number of input features: eager's time over ours."""
    from matplotlib.colors import TwoSlopeNorm

    rows = run["rows"]
    batches, inputs, states = (
        sorted({row[key] for row in rows}) for key in ("batch", "input", "state")
    )
    kinds = list(dict.fromkeys(row["what"] for row in rows))
    figure, axes = plt.subplots(
        len(kinds),
        len(inputs),
        figsize=(3.2 * len(inputs), 3.4 * len(kinds)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    norm = TwoSlopeNorm(1.0, 0.5, 6.0)
    for line, what in enumerate(kinds):
        for column, size in enumerate(inputs):
            ratios = {
                (row["batch"], row["state"]): row["ratio"]
                for row in rows
                if row["what"] == what and row["input"] == size
            }
            values = [[ratios[batch, state] for state in states] for batch in batches]
            axis = axes[line][column]
            image = axis.imshow(values, origin="lower", cmap="RdYlGn", norm=norm, aspect="auto")
            for i, j in ((i, j) for i in range(len(batches)) for j in range(len(states))):
                axis.text(j, i, f"{values[i][j]:.1f}", ha="center", va="center", fontsize=7)
            axis.set_xticks(range(len(states)), states, rotation=45)
            axis.set_yticks(range(len(batches)), batches)
            axis.set_title(f"{what}, input {size}", fontsize=9)
            if line == len(kinds) - 1:
                axis.set_xlabel("state")
            if column == 0:
                axis.set_ylabel("batch")
    figure.colorbar(image, ax=axes, shrink=0.6, label="eager's time over ours")
    plural = "s" if run["threads"] > 1 else ""
    figure.suptitle(
        f"Eager PyTorch over lltm_ops, {run['dtype']}, {run['threads']} thread{plural}, "
        f"{run['machine']}"
    )
    figure.savefig(file, dpi=100)
    plt.close(figure)


def plot_lengths(run: dict[str, Any], file: Path) -> None:
    """Time for a row by the length of the sequences, padded and packed."""
    from matplotlib.ticker import LogLocator

    kinds = sorted({(row["threads"], row["what"]) for row in run["rows"]})
    figure, axes = plt.subplots(
        len(kinds) // 2, 2, figsize=(11, 1 + 1.7 * len(kinds)), layout="constrained", squeeze=False
    )
    for axis, kind in zip(axes.flat, kinds, strict=True):
        of_kind = [row for row in run["rows"] if (row["threads"], row["what"]) == kind]
        for name in of_kind[0]["microseconds"]:
            for form, style in (("padded", "o-"), ("packed", "x--")):
                rows = [row for row in of_kind if row["form"] == form]
                rows = [row for row in rows if name in row["microseconds"]]
                axis.plot(
                    [row["length"] for row in rows],
                    [row["microseconds"][name] for row in rows],
                    style,
                    color=COLORS[name],
                    label=f"{name}, {form}",
                )
        axis.set(xscale="log", xlabel="steps of the longest sequence")
        axis.set(yscale="log", ylabel="microseconds for a row")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        threads, what = kind
        axis.set_title(f"{what}, {threads} thread{'s' if threads > 1 else ''}", fontsize=9)
    axes[0, 0].legend(fontsize=8)
    figure.suptitle(
        f"Batch {run['batch']}, input and state {run['size']}, {run['dtype']}, {run['machine']}",
        fontsize=9,
    )
    figure.savefig(file, dpi=100)
    plt.close(figure)
