"""Tables of figures: CSV files, each with a JSON file that describes the run.

GitHub shows a CSV file as a table unless it has comments.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import torch

import lltm_ops

OUTPUT = Path("build/benchmarks")
ROOT = Path(__file__).parent.parent
DOCUMENTED = ROOT / "docs" / "benchmarks"
Row = dict[str, str]


def machine(device: str) -> str:
    """What the processor calls itself."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    said = {name.strip(): value.strip() for name, _, value in lines}
    name = said.get("model name", platform.processor())
    if "cpu family" in said:
        name += f", family {said['cpu family']}, model {said['model']}"
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    except FileNotFoundError:
        described = ""  # without git, as on a new system
    return described.strip() or "unknown"


def describe(device: str = "cpu", **more: Any) -> dict[str, str]:
    """The run: on what, and of which version."""
    info = lltm_ops.build_info()
    about = {"machine": machine(device)}
    about |= {name: info[name] for name in ("torch", "compiler", "cuda")}
    about |= {"commit": commit(), "date": str(date.today())}
    return about | {name: str(value) for name, value in more.items()}


def write(file: Path, about: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """All of the file or nothing, so it can be written again after each row, in case one fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("w", newline="") as stream:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            values = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(values)
    unfinished.replace(file)
    file.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


def read(file: Path) -> list[Row]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))
