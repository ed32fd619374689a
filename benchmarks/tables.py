"""Prints the tables of docs/performance.md, from the CSV files."""

from __future__ import annotations

from collections.abc import Iterator

from cell import SHAPES
from figures import DOCUMENTED, Row, read

FOLDERS = ("zen3", "zen5")
NO_TIMES = ("dtype", "threads", "shape", "length", "form", "what")
# The rows of a table, by the titles of their columns.
Rows = Iterator[dict[str, str]]


def load(folder: str, name: str, **wanted: str) -> list[Row]:
    rows = read(DOCUMENTED / folder / f"{name}.csv")
    return [row for row in rows if wanted.items() <= row.items()]


def ratio(row: Row, name: str = "") -> float:
    """The other's time over ours, which is the first: the named one's, or else the best one's."""
    ours, *others = (float(time) for name, time in row.items() if name not in NO_TIMES and time)
    return (float(row[name]) if name else min(others)) / ours


def machines() -> Rows:
    for row in read(DOCUMENTED / "machines.csv"):
        folder = row.pop("folder")
        files = sorted((DOCUMENTED / folder).glob("*.csv"))
        links = (f"[{file.stem}](benchmarks/{folder}/{file.name})" for file in files)
        yield {**row, "figures": ", ".join(links)}


def summary() -> Rows:
    """The least and the most of the ratios, over the shapes that each processor has."""
    names = {row["folder"]: row["processor"] for row in read(DOCUMENTED / "machines.csv")}
    for folder in FOLDERS:
        for dtype in dict.fromkeys(row["dtype"] for row in load(folder, "cell")):
            steps = [row for row in load(folder, "cell", dtype=dtype) if row["shape"] in SHAPES]
            cells = {"processor": names[folder], "dtype": dtype}
            for title, rows in ("step", steps), ("sequence", load(folder, "sequence", dtype=dtype)):
                for what in ("inference", "training"):
                    ratios = [ratio(row) for row in rows if row["what"].startswith(what)]
                    cells[f"{title}, {what}"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
            yield cells


def compared() -> Rows:
    """The ranges over all folders."""
    for file, name, words in (
        (
            "cell",
            "",
            "one step, the fastest of: PyTorch eager, torch.compile, C++, `nn.LSTMCell`",
        ),
        ("sequence", "LSTM", "a sequence: `nn.LSTM`"),
        ("sequence", "GRU", "a sequence: `nn.GRU`"),
        ("sequence", "onnxruntime", "a sequence: onnxruntime's LSTM (inference)"),
    ):
        cells = {"compared with": words}
        for dtype in ("float32", "bfloat16"):
            rows = [row for folder in FOLDERS for row in load(folder, file, dtype=dtype)]
            # Some folders have more shapes of a step than others.
            rows = [row for row in rows if row["shape"] in SHAPES or file == "sequence"]
            ratios = [ratio(row, name) for row in rows if not name or row.get(name)]
            cells[dtype] = f"{min(ratios):.2f} to {max(ratios):.1f}" if ratios else ""
        yield cells


def packed() -> Rows:
    """How many times as long others take at 640 steps, on one thread."""
    for row in load("zen5", "lengths", length="640"):
        names = ("LSTM", "LSTM padded", "LSTM by segments", "GRU")
        ratios = {name: f"{ratio(row, name):.1f}" if row[name] else "" for name in names}
        yield {"batch": f"{row['form']}, {row['what']}", **ratios}


def markdown(rows: Rows) -> str:
    first, *others = rows
    lines = [[*first], *([*row.values()] for row in (first, *others))]
    header, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([header, "|" + "---|" * len(first), *body])


if __name__ == "__main__":
    for table in (compared(), machines(), summary(), packed()):
        print(markdown(table), end="\n\n")
