"""Writes README.md into folders of figures, one folder a processor: the tables and the pictures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent.parent / "docs" / "benchmarks"
CONTESTS = {
    "cell_cpu_float32": "One step, float32",
    "cell_cpu_bfloat16": "One step, bfloat16",
    "sequence_cpu_float32": "A whole sequence, float32",
    "sequence_cpu_bfloat16": "A whole sequence, bfloat16",
    "more_shapes_cpu_float32": "One step at more shapes, float32",
}
PICTURES = {
    "lengths_cpu_float32": "Time for a row by the length of the sequences",
    "sweep_cpu_float32_1_thread": "Eager's time over ours by batch, input and state, one thread",
    "sweep_cpu_float32_2_threads": "Eager's time over ours by batch, input and state, two threads",
}
RECURRENCES = ("recurrence_cuda_bfloat16", "recurrence_cuda_float16")
# What the README shows: of which processor, from which file, one shape of it, and what a newcomer
# calls its contenders.
GLANCED = FIGURES / "zen4"
GLANCE = {
    "cell_cpu_float32": (
        "64 x 256 x 512",
        "One step: 64 rows, 256 features, 512 units",
        {
            "lltm_ops": "LLTMCell of this package",
            "eager": "its formulas in plain PyTorch",
            "compile": "the same under torch.compile",
            "C++": "the same in C++, as tutorials teach it",
            "LSTMCell": "nn.LSTMCell",
        },
    ),
    "sequence_cpu_float32": (
        "128 x 16 x 128 x 128",
        "A sequence: 128 steps, 16 rows, 128 features, 128 units",
        {
            "lltm_ops": "LLTM of this package",
            "LSTM": "nn.LSTM",
            "GRU": "nn.GRU",
            "eager loop": "LLTM in plain PyTorch, in a loop",
        },
    ),
}


def load(folder: Path, name: str) -> dict[str, Any] | None:
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def processors() -> list[Path]:
    return sorted(file.parent for file in FIGURES.glob("*/cell_cpu_float32.json"))


def gpus() -> list[Path]:
    return sorted({file.parent for file in FIGURES.glob("*/recurrence_cuda_*.json")})


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(microseconds: float | None) -> str:
    if microseconds is None:
        return ""
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def table(run: dict[str, Any]) -> list[str]:
    """Microseconds of all contenders, the best other's over ours, our share of the roof."""
    rows = run["rows"]
    names = list(rows[0]["microseconds"])
    of_cell = rows[0]["shape"].count("x") == 2
    shape = "batch x input x state" if of_cell else "time x batch x input x state"
    header = [shape, "threads", "what", *names, "ratio", "roof"]
    lines = [line(header), line(["---"] * len(header)).replace(" ", "")]
    for row in rows:
        times = [shown(row["microseconds"].get(name)) for name in names]
        roof = f"{row['share_of_roof']:.0%}" if "share_of_roof" in row else ""
        first = [row["shape"], str(row["threads"]), row["what"]]
        lines.append(line([*first, *times, f"{row['ratio']:.2f}", roof]))
    return lines


def page(folder: Path) -> str:
    runs = {name: load(folder, name) for name in (*CONTESTS, *PICTURES)}
    first = runs["cell_cpu_float32"]
    caches = f" ({first['caches']})" if "caches" in first else ""
    lines = [
        f"# {folder.name}",
        "",
        f"{first['machine']}{caches}; torch {first['torch']}.",
        "[performance.md](../../performance.md) says what was measured, and how. Times are in",
        "microseconds. `benchmarks/report.py` wrote this page.",
    ]
    for name, title in (CONTESTS | PICTURES).items():
        if runs[name] is None:
            continue
        lines += ["", f"## {title}", ""]
        if (folder / f"{name}.png").exists():
            lines += [f"![{title}]({name}.png)"]
        if name in CONTESTS:
            lines += ["", *table(runs[name])]
    return "\n".join(lines) + "\n"


def gpu_page(folder: Path) -> str:
    runs = {name: load(folder, name) for name in RECURRENCES}
    first = runs["recurrence_cuda_bfloat16"]
    lines = [
        f"# {folder.name}",
        "",
        f"{first['machine']}; torch {first['torch']}. A call is a sequence of {first['time']}",
        "steps with as many features as units, and the replay of a CUDA graph. Times are in",
        "microseconds a step. The ratio is that of `nn.LSTM`, which has four gates to three, to",
        "the recurrence. [cuda.md](../../cuda.md#figures) says what was measured.",
        "`benchmarks/report.py` wrote this page.",
    ]
    for name, run in runs.items():
        if run is None:
            continue
        lines += [
            "",
            f"## {run['dtype']}",
            "",
            f"![Times of a step, {run['dtype']}]({name}.png)",
            "",
        ]
        names = ["recurrence", "a kernel a step", "nn.LSTM"]
        header = ["units", "batch", "what", *names, "ratio"]
        lines += [line(header), line(["---"] * len(header)).replace(" ", "")]
        for row in run["rows"]:
            times = row["microseconds_per_step"]
            cells = [str(row["size"]), str(row["batch"]), row["what"]]
            cells += [f"{times[name]:.2f}" for name in names]
            lines.append(line([*cells, f"{times['nn.LSTM'] / times['recurrence']:.2f}"]))
    return "\n".join(lines) + "\n"


def summary(folders: list[Path]) -> list[str]:
    """By processor and dtype the least and the most of the ratios, over shapes and threads."""
    header = ["processor", "dtype"]
    header += ["step, inference", "step, training", "sequence, inference", "sequence, training"]
    lines = [line(header), line(["---"] * len(header)).replace(" ", "")]
    for folder in folders:
        for dtype in ("float32", "bfloat16"):
            if load(folder, f"cell_cpu_{dtype}") is None:
                continue
            cells = [f"[{folder.name}](benchmarks/{folder.name}/README.md)", dtype]
            for name in ("cell", "sequence"):
                run = load(folder, f"{name}_cpu_{dtype}")
                for what in ("inference", "training"):
                    rows = run["rows"] if run else []
                    ratios = [row["ratio"] for row in rows if row["what"].startswith(what)]
                    cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "")
            lines.append(line(cells))
    return lines


def glance() -> dict[str, dict[str, float]]:
    """Titles of the README's picture, and below each the contenders' times over ours."""
    panels = {}
    for file, (shape, title, names) in GLANCE.items():
        wanted = {"shape": shape, "threads": 1, "what": "training"}
        rows = load(GLANCED, file)["rows"]
        times = next(row["microseconds"] for row in rows if wanted.items() <= row.items())
        panels[title] = {shown: times[name] / times["lltm_ops"] for name, shown in names.items()}
    return panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=processors())
    parser.add_argument("--glance", type=Path, metavar="FILE", help="draw the README's picture")
    args = parser.parse_args()
    if args.glance:
        import plots

        machine = load(GLANCED, next(iter(GLANCE)))["machine"]
        processor = ", ".join(machine.split(", ")[:3])
        plots.plot_glance(glance(), f"{processor} ({GLANCED.name})", args.glance)
        return
    for folder in args.folders:
        (folder / "README.md").write_text(page(folder))
    for folder in gpus():
        (folder / "README.md").write_text(gpu_page(folder))
    print("\n".join(summary(processors())))


if __name__ == "__main__":
    main()
