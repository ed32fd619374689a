"""What a sequence costs by its length: padded and packed, compared with nn.LSTM.

Microseconds for a row, that is a step of one sequence, from short sequences to long ones; packed,
the sequences have lengths up to the longest in equal steps. Writes lengths.csv.
"""

from __future__ import annotations

import itertools

import figures
import timing
import torch
from contest import options, show
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm_ops

# Longer packs are not timed with nn.LSTM: its time grows with the square, to seconds a call.
LSTM_PACKED_STEPS = 640
BATCH = 16
SIZE = 128  # of input and state
LENGTHS = [10, 20, 40, 80, 160, 320, 640, 1250, 2500, 4000]


def output_rows(layer: nn.Module, input: Tensor | PackedSequence) -> Tensor:
    output = layer(input)[0]
    return output.data if isinstance(output, PackedSequence) else output.flatten(0, 1)


def input_of(form: str, length: int) -> Tensor | PackedSequence:
    if form == "padded":
        return torch.randn(length, BATCH, SIZE)
    lengths = [max(1, length * (i + 1) // BATCH) for i in reversed(range(BATCH))]
    return pack_sequence([torch.randn(steps, SIZE) for steps in lengths])


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    args = parser.parse_args()
    timing.settle_allocator()
    about = figures.describe(rounds=args.rounds, batch=BATCH, size=SIZE)
    layers = {"lltm_ops": lltm_ops.LLTM(SIZE, SIZE), "LSTM": nn.LSTM(SIZE, SIZE)}
    rows = []
    kinds = itertools.product(("padded", "packed"), timing.KINDS[:2])
    cases = list(itertools.product(args.threads, args.lengths, kinds))
    for threads, length, (form, what) in tqdm(cases, desc="timing"):
        torch.set_num_threads(threads)
        input = input_of(form, length)
        with torch.no_grad():
            grads = (torch.randn_like(output_rows(layers["lltm_ops"], input)),)
        with torch.set_grad_enabled(what == "training"):
            calls = timing.calls(what, layers, output_rows, (input,), grads)
            if (form, what) == ("packed", "training") and length > LSTM_PACKED_STEPS:
                del calls["LSTM"]
            times = timing.medians(calls, args.rounds)
        per_row = {name: time / len(grads[0]) for name, time in times.items()}
        rows.append({"threads": threads, "length": length, "form": form, "what": what} | per_row)
        show(rows[-1])
        figures.write(args.output / "lengths.csv", about, rows)


if __name__ == "__main__":
    main()
