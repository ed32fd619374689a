"""Prints the tables of docs/performance.md and docs/benchmarks/README.md, from the CSV files."""

from __future__ import annotations

from collections.abc import Iterator

from cell import SHAPES
from figures import DOCUMENTED, Row, read

PROCESSORS = ("xeon_amx", "zen4", "zen5")
THREADS = ("1", "2")
NO_TIMES = ("dtype", "threads", "shape", "what", "roof")
# The rows of a table by what stands above their columns.
Rows = Iterator[dict[str, str]]


def load(folder: str, name: str, **wanted: str) -> list[Row]:
    rows = read(DOCUMENTED / folder / f"{name}.csv")
    return [row for row in rows if wanted.items() <= row.items()]


def ratio(row: Row) -> float:
    """The best other's time over ours, which is the first."""
    ours, *others = (float(time) for name, time in row.items() if name not in NO_TIMES and time)
    return min(others) / ours


def summary() -> Rows:
    """The least and the most of the ratios, over the shapes that each processor has."""
    for folder in ("xeon_amx", "xeon_amx_avx2", "zen4", "zen4_avx2", "zen5"):
        page = f"[{folder}](benchmarks/{folder.removesuffix('_avx2')}/README.md)"
        for dtype in dict.fromkeys(row["dtype"] for row in load(folder, "cell")):
            steps = [row for row in load(folder, "cell", dtype=dtype) if row["shape"] in SHAPES]
            cells = {"processor": page, "dtype": dtype}
            for title, rows in ("step", steps), ("sequence", load(folder, "sequence", dtype=dtype)):
                for what in ("inference", "training"):
                    ratios = [ratio(row) for row in rows if row["what"].startswith(what)]
                    cells[f"{title}, {what}"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
            yield cells


def packed() -> Rows:
    """How many times as long nn.LSTM takes, at 640 steps."""
    for processor in PROCESSORS:
        for threads in THREADS:
            cells = {"processor": f"[{processor}]({processor}/lengths.csv)", "threads": threads}
            for row in load(processor, "lengths", length="640", threads=threads):
                ratio = float(row["LSTM"]) / float(row["lltm_ops"])
                cells[f"{row['form']}, {row['what']}"] = f"{ratio:.1f}"
            yield cells


def swept() -> Rows:
    """How many of the figures of each sweep are below 1."""
    for processor in PROCESSORS:
        for threads in THREADS:
            rows = load(processor, "sweep", threads=threads)
            kinds = [*rows[0]][len(("threads", "batch", "input", "state")) :]
            ratios = [float(row[what]) for row in rows for what in kinds]
            yield {
                "processor": f"[{processor}]({processor}/sweep.csv)",
                "threads": threads,
                "figures": str(len(ratios)),
                "below 1": str(sum(ratio < 1 for ratio in ratios)),
                "below 0.95": str(sum(ratio < 0.95 for ratio in ratios)),
                "the lowest": f"{min(ratios):.2f}",
            }


def markdown(rows: Rows) -> str:
    first, *others = rows
    lines = [[*first], *([*row.values()] for row in (first, *others))]
    header, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([header, "|" + "---|" * len(first), *body])


if __name__ == "__main__":
    for table in (summary(), packed(), swept()):
        print(markdown(table), end="\n\n")
