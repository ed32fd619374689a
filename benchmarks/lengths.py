"""What a sequence costs by its length: padded and packed, beside nn.LSTM.

Microseconds for a row, that is a step of one sequence, from short sequences to long ones; packed,
the sequences have lengths up to the longest in equal steps. Writes a JSON file and a picture.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import contest
import timing
import torch
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm_ops

# Longer packs are not timed with nn.LSTM: its time grows with the square, to seconds a call.
LSTM_PACKED_STEPS = 640
LENGTHS = [10, 20, 40, 80, 160, 320, 640, 1250, 2500, 4000]


def output_rows(layer: nn.Module, input: Tensor | PackedSequence) -> Tensor:
    output = layer(input)[0]
    return output.data if isinstance(output, PackedSequence) else output.flatten(0, 1)


def measure_length(length: int, args: argparse.Namespace, progress: tqdm) -> list[dict[str, Any]]:
    """Rows for padded and for packed input, in inference and in training."""
    layers = {
        "lltm_ops": lltm_ops.LLTM(args.size, args.size),
        "LSTM": nn.LSTM(args.size, args.size),
    }
    lengths = [max(1, length * (i + 1) // args.batch) for i in reversed(range(args.batch))]
    inputs = {
        "padded": torch.randn(length, args.batch, args.size),
        "packed": pack_sequence([torch.randn(steps, args.size) for steps in lengths]),
    }
    rows = []
    for form, input in inputs.items():
        with torch.no_grad():
            grads = (torch.randn_like(output_rows(layers["lltm_ops"], input)),)
        for what in ("inference", "training"):
            with torch.set_grad_enabled(what == "training"):
                functions = contest.functions(what, layers, output_rows, (input,), grads)
                if (form, what) == ("packed", "training") and length > LSTM_PACKED_STEPS:
                    del functions["LSTM"]
                times = timing.medians(functions, args.rounds)
            count = len(grads[0])
            per_row = {name: time * 1e6 / count for name, time in times.items()}
            rows.append(
                {"length": length, "form": form, "rows": count, "what": what}
                | {"threads": torch.get_num_threads(), "microseconds": per_row}
            )
            progress.update(1)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=128, help="of input and state")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    args = parser.parse_args()
    timing.settle_allocator()
    rows = []
    with tqdm(total=4 * len(args.threads) * len(args.lengths), desc="timing") as progress:
        for threads in args.threads:
            torch.set_num_threads(threads)
            for length in args.lengths:
                rows += measure_length(length, args, progress)
    for row in rows:
        times = ", ".join(f"{name} {time:.3f} us" for name, time in row["microseconds"].items())
        print(
            f"{row['length']:5} steps, {row['form']}, {row['what']}, {row['threads']} threads: "
            f"{times} for a row"
        )
    described = timing.describe("cpu", "float32") | {
        "batch": args.batch, "size": args.size, "rows": rows,
    }  # fmt: skip
    timing.save(described, "plot_lengths", args.output / "lengths_cpu_float32.json")


if __name__ == "__main__":
    main()
