"""What examples/train_distributed.py loses when it runs on many processes of this machine.

Each process has one thread of a CPU. The runs take turns, so that a quiet moment is nobody's alone.
Beside them run as many processes that do not know of each other: what those lose is lost by the
machine, not by communication. Writes a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_distributed.py"
RESULT = re.compile(r"([\d.]+) ms per step \(median\), ([\d,]+) bytes of gradients")
TIMEOUT = 600


@dataclass
class Run:
    """The example, perhaps started several times at once; rows of the batch are of each process."""

    name: str
    processes: int
    rows: int
    strategy: str = "ddp"
    copies: int = 1

    def milliseconds(self, args: argparse.Namespace) -> tuple[float, int]:
        """The median step of the slowest copy, and bytes of gradients."""
        with tempfile.TemporaryDirectory() as scratch:
            started = [self._start(f"{scratch}/{copy}", args) for copy in range(self.copies)]
            return max(finish(process) for process in started)

    def _start(self, output: str, args: argparse.Namespace) -> subprocess.Popen[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        options = {
            "output": output,
            "strategy": self.strategy,
            "batch-size": self.rows * self.processes,
            "steps": args.steps,
            "save-every": args.steps,
            "hidden-size": args.hidden_size,
            "threads": 1,
            "device": "cpu",
        }
        return subprocess.Popen(
            [*launcher, f"--nproc-per-node={self.processes}", str(EXAMPLE)]
            + [f"--{name}={value}" for name, value in options.items()],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def finish(process: subprocess.Popen[str]) -> tuple[float, int]:
    try:
        printed, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    result = RESULT.search(printed)
    if process.returncode != 0 or result is None:
        sys.exit(printed)
    return float(result[1]), int(result[2].replace(",", ""))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    count, rows = args.processes, args.rows
    runs = [
        Run("1 process", 1, rows),
        Run(f"{count} processes apart", 1, rows, copies=count),
        Run(f"{count} processes, DDP", count, rows),
        Run(f"{count} processes, FSDP2", count, rows, "fsdp"),
        Run(f"{count} processes, DDP, the batch of one", count, rows // count),
    ]
    times: dict[str, list[float]] = {run.name: [] for run in runs}
    gradients = 0
    for _ in range(args.rounds):
        for run in runs:
            milliseconds, gradients = run.milliseconds(args)
            times[run.name].append(milliseconds)
    alone = statistics.median(times["1 process"]) / rows
    results = [
        {
            "run": run.name,
            "rows": run.rows,
            "milliseconds": times[run.name],
            "efficiency": alone * run.rows / statistics.median(times[run.name]),
        }
        for run in runs
    ]
    return {"torch": torch.__version__, "bytes_of_gradients": gradients, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32, help="of the batch, for each process")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--rounds", type=int, default=5, help="of all runs")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling"), metavar="DIR")
    args = parser.parse_args()
    measured = measure(args)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "scaling.json").write_text(json.dumps(measured, indent=1) + "\n")
    print(f"{measured['bytes_of_gradients']:,} bytes of gradients; ms of a step, median and range:")
    for result in measured["results"]:
        times = result["milliseconds"]
        print(
            f"{result['run']:36}{result['rows']:4} rows each {statistics.median(times):8.1f}"
            f" ({min(times):.1f} to {max(times):.1f}){result['efficiency']:8.0%}"
        )
    print("efficiency: rows per second and process, over those of 1 process.")


if __name__ == "__main__":
    main()
