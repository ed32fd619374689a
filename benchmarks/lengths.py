"""What a sequence costs by its length: padded and packed, beside nn.LSTM.

Microseconds for a row, that is a step of one sequence, from short sequences to long ones; packed,
the sequences have lengths up to the longest in equal steps. Writes a JSON file and a picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import timing
import torch
from torch import nn
from torch.hub import tqdm  # stands in where tqdm is not installed
from torch.nn.utils.rnn import pack_sequence

import lltm_ops

LENGTHS = [10, 20, 40, 80, 160, 320, 640, 1250, 2500, 4000]


def measure_length(length: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for padded and one for packed input."""
    layers = {
        "lltm_ops": lltm_ops.LLTM(args.size, args.size),
        "LSTM": nn.LSTM(args.size, args.size),
    }
    padded = torch.randn(length, args.batch, args.size)
    lengths = [max(1, length * (i + 1) // args.batch) for i in reversed(range(args.batch))]
    packed = pack_sequence([torch.randn(steps, args.size) for steps in lengths])
    rows = []
    for form, input, count in (
        ("padded", padded, length * args.batch),
        ("packed", packed, sum(lengths)),
    ):
        functions = {
            name: lambda layer=layer, input=input: layer(input) for name, layer in layers.items()
        }
        with torch.no_grad():
            times = timing.medians(functions, args.rounds)
        per_row = {name: time * 1e6 / count for name, time in times.items()}
        rows.append({"length": length, "form": form, "rows": count, "microseconds": per_row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=128, help="of input and state")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    timing.settle_allocator()
    rows = []
    for length in tqdm(args.lengths, desc="timing", unit="length"):
        rows += measure_length(length, args)
    for row in rows:
        times = ", ".join(f"{name} {time:.3f} us" for name, time in row["microseconds"].items())
        print(f"{row['length']:5} steps, {row['form']}: {times} for a row")
    described = timing.describe("cpu", "float32") | {
        "threads": args.threads, "batch": args.batch, "size": args.size, "rows": rows,
    }  # fmt: skip
    timing.save(described, "plot_lengths", args.output / "lengths_cpu_float32.json")


if __name__ == "__main__":
    main()
