"""Writes docs/benchmarks/*/README.md from the CSV files beside them, and prints other tables.

Those are of docs/performance.md and of docs/benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import figures

FIGURES = figures.ROOT / "docs" / "benchmarks"
# Of the figures that were measured with the kernels of today.
COMMITS_OF_TODAY = {"93f31f1"}
PROCESSORS = ("xeon_amx", "zen4", "zen5")
CONTESTS = {
    "cell": ("One step", "batch x input x state"),
    "sequence": ("A whole sequence", "time x batch x input x state"),
}
OTHERS = {
    "lengths": "Microseconds for a row by the length of the sequences, padded and packed",
    "sweep": "Eager's time over ours by batch, input and state",
}
# The summary is of these, which were measured everywhere.
SHAPES = ("1x32x128", "16x32x128", "64x256x512", "256x1024x1024")
KEYS = ("dtype", "threads", "shape", "what")
Row = dict[str, str]


def load(folder: str, name: str) -> list[Row]:
    file = FIGURES / folder / f"{name}.csv"
    return figures.read(file)[1] if file.exists() else []


def folders() -> Iterator[str]:
    """Each processor, and where nothing of it used more than AVX2."""
    for processor in PROCESSORS:
        yield processor
        if (FIGURES / f"{processor}_avx2").exists():
            yield f"{processor}_avx2"


def times(row: Row) -> dict[str, float]:
    return {name: float(row[name]) for name in row if name not in (*KEYS, "roof") and row[name]}


def ratio(row: Row) -> float:
    """The best other's time over ours."""
    ours = times(row)
    return min(time for name, time in ours.items() if name != "lltm_ops") / ours["lltm_ops"]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows)]


def shown(microseconds: float | None) -> str:
    if microseconds is None:
        return ""
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def kernels(about: dict[str, str]) -> str:
    return "today's" if about["commit"] in COMMITS_OF_TODAY else "older"


def runs(*folders: str) -> list[list[str]]:
    """What files were measured on, and with which kernels."""
    found: dict[tuple[str, ...], list[str]] = {}
    for folder in folders:
        for file in sorted((FIGURES / folder).glob("*.csv")):
            about, _ = figures.read(file)
            machine = "; ".join(about[key] for key in ("machine", "caches") if key in about)
            run = (machine, about["torch"], about["commit"], about["date"], kernels(about))
            found.setdefault(run, []).append(f"[{file.stem}](../{folder}/{file.name})")
    return [[", ".join(files), *run] for run, files in found.items()]


def contest(folder: str, name: str, dtype: str) -> list[str]:
    """All contenders' microseconds, the best other's over ours, our share of the roof."""
    title, sizes = CONTESTS[name]
    rows = [row for row in load(folder, name) if row["dtype"] == dtype]
    if not rows:
        return []
    names = [key for key in rows[0] if key not in KEYS and any(row[key] for row in rows)]
    names.remove("roof")
    cells = []
    for row in rows:
        shape = row["shape"].replace("x", " x ")
        roof = f"{float(row['roof']):.0%}" if row["roof"] else ""
        ours = [shown(times(row).get(key)) for key in names]
        cells.append([shape, row["threads"], row["what"], *ours, f"{ratio(row):.2f}", roof])
    title += f", {dtype}" + (", AVX2 alone" if folder.endswith("_avx2") else "")
    header = [sizes, "threads", "what", *names, "ratio", "roof"]
    return ["", f"## {title}", "", *table(header, cells)]


RUNS = ["figures", "processor", "torch", "commit", "date", "kernels of the package"]


def page(processor: str) -> str:
    own = [folder for folder in folders() if folder.startswith(processor)]
    lines = [
        f"# {processor}",
        "",
        *table(RUNS, runs(*own)),
        "",
        "Times are in microseconds. [performance.md](../../performance.md) says what was measured,",
        "and how. `benchmarks/report.py` wrote this page.",
    ]
    for folder in own:
        for dtype in ("float32", "bfloat16"):
            for name in CONTESTS:
                lines += contest(folder, name, dtype)
    lines += ["", "## Not on this page", ""]
    lines += [f"- {title}: [{name}.csv]({name}.csv)" for name, title in OTHERS.items()]
    return "\n".join(lines) + "\n"


def gpu_page() -> str:
    lines = [
        "# h100",
        "",
        *table(RUNS, runs("h100")),
        "",
        "The kernels have changed since: the loop that waits for other blocks, sigmoid and tanh.",
        "A call is a sequence of 1024 steps with as many features as units, and the replay of a",
        "CUDA graph. Times are in microseconds a step. The ratio is the time of `nn.LSTM`, which",
        "has four gates to our three, over that of the recurrence.",
        "[cuda.md](../../cuda.md#figures) says what was measured. `benchmarks/report.py` wrote",
        "this page.",
    ]
    names = ["recurrence", "a kernel a step", "nn.LSTM"]
    for dtype in ("bfloat16", "float16"):
        cells = []
        for row in load("h100", "recurrence"):
            if row["dtype"] == dtype:
                values = [float(row[name]) for name in names]
                measured = [f"{value:.2f}" for value in (*values, values[2] / values[0])]
                cells.append([row["size"], row["batch"], row["what"], *measured])
        header = ["units", "batch", "what", *names, "ratio"]
        lines += ["", f"## {dtype}", "", *table(header, cells)]
    return "\n".join(lines) + "\n"


def summary() -> list[str]:
    """By processor and dtype the least and the most of the ratios, over shapes and threads."""
    cells = []
    for folder in folders():
        about, _ = figures.read(FIGURES / folder / "cell.csv")
        for dtype in ("float32", "bfloat16"):
            ranges = []
            for name in CONTESTS:
                rows = [row for row in load(folder, name) if row["dtype"] == dtype]
                if name == "cell":
                    rows = [row for row in rows if row["shape"] in SHAPES]
                for what in ("inference", "training"):
                    ratios = [ratio(row) for row in rows if row["what"].startswith(what)]
                    if ratios:
                        ranges.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
            if ranges:
                link = f"[{folder}](benchmarks/{folder.removesuffix('_avx2')}/README.md)"
                cells.append([link, dtype, *ranges, kernels(about)])
    header = ["processor", "dtype"]
    header += ["step, inference", "step, training", "sequence, inference", "sequence, training"]
    return table([*header, "kernels"], cells)


def packed() -> list[str]:
    """How many times as long nn.LSTM takes, at 640 steps."""
    cells = []
    for processor in PROCESSORS:
        rows = [row for row in load(processor, "lengths") if row["length"] == "640"]
        for threads in ("1", "2"):
            ratios = [
                f"{float(row['LSTM']) / float(row['lltm_ops']):.1f}"
                for row in rows
                if row["threads"] == threads
            ]
            cells.append([f"[{processor}]({processor}/lengths.csv)", threads, *ratios])
    kinds = [f"{row['form']}, {row['what']}" for row in rows[:4]]
    return table(["processor", "threads", *kinds], cells)


def swept() -> list[str]:
    """How many of the figures of each sweep are below 1."""
    cells = []
    for processor in PROCESSORS:
        rows = load(processor, "sweep")
        for threads in ("1", "2"):
            ratios = [
                float(value)
                for row in rows
                if row["threads"] == threads
                for key, value in row.items()
                if key not in ("threads", "batch", "input", "state")
            ]
            below = [str(sum(ratio < most for ratio in ratios)) for most in (1, 0.95)]
            link = f"[{processor}]({processor}/sweep.csv)"
            cells.append([link, threads, str(len(ratios)), *below, f"{min(ratios):.2f}"])
    return table(["processor", "threads", "figures", "below 1", "below 0.95", "the lowest"], cells)


def main() -> None:
    for processor in PROCESSORS:
        (FIGURES / processor / "README.md").write_text(page(processor))
    (FIGURES / "h100" / "README.md").write_text(gpu_page())
    for lines in (summary(), packed(), swept()):
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
