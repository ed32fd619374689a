"""What a sequence costs by its length, padded and packed, compared with nn.LSTM and nn.GRU.

Microseconds for a row, that is a step of one sequence, from short sequences to long ones; packed,
the sequences have lengths up to the longest in equal steps. nn.LSTM takes a pack in three ways,
which give the same output: as it is, by segments, and padded beforehand. Writes lengths.csv.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import figures
import timing
import torch
from contest import options, show
from torch import Tensor, nn
from torch.hub import tqdm  # stands in where tqdm is not installed
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import lltm_ops

# PyTorch's own train no longer packs here: their time grows with the square, to seconds a call.
LONGEST_TRAINED_PACK = 640
BATCH = 16
SIZE = 128  # of input and state
LENGTHS = [10, 20, 40, 80, 160, 320, 640, 1250, 2500, 4000]


def by_segments(lstm: Callable[..., Any], packed: PackedSequence) -> tuple[PackedSequence, Any]:
    """What ``lstm(packed)`` gives in one direction, by a padded call for each run of equal batches.

    Backward of a packed call fills a tensor as large as the whole input for each step.
    """
    outputs, ended, state = [], [], None
    batches, steps = packed.batch_sizes.unique_consecutive(return_counts=True)
    segments = packed.data.split((batches * steps).tolist())
    for rows, batch in zip(segments, batches.tolist(), strict=True):
        if state is not None:
            ended.append([tensor[:, batch:] for tensor in state])
            state = tuple(tensor[:, :batch].contiguous() for tensor in state)
        output, state = lstm(rows.unflatten(0, (-1, batch)), state)
        outputs.append(output.flatten(0, 1))
    h_n, c_n = (torch.cat(parts, 1) for parts in zip(state, *reversed(ended), strict=True))
    if packed.unsorted_indices is not None:
        h_n, c_n = h_n[:, packed.unsorted_indices], c_n[:, packed.unsorted_indices]
    return packed._replace(data=torch.cat(outputs)), (h_n, c_n)


class SegmentedLSTM(nn.LSTM):
    def forward(self, packed: PackedSequence) -> tuple[PackedSequence, Any]:
        return by_segments(super().forward, packed)


class PaddedLSTM(nn.LSTM):
    def forward(self, input: Tensor, kept: Tensor) -> Tensor:
        return super().forward(input)[0].flatten(0, 1).index_select(0, kept)


def padded(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """The batch, and which of its rows are not padding."""
    input, lengths = pad_packed_sequence(packed)
    return input, (torch.arange(len(input))[:, None] < lengths).flatten().nonzero().squeeze(1)


LAYERS = {"lltm_ops": lltm_ops.LLTM, "LSTM": nn.LSTM, "GRU": nn.GRU}
PACKED_LAYERS = {**LAYERS, "LSTM by segments": SegmentedLSTM, "LSTM padded": PaddedLSTM}


def output_rows(layer: nn.Module, input: Tensor | PackedSequence, *padded: Tensor) -> Tensor:
    if isinstance(layer, PaddedLSTM):
        return layer(*padded)
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
    layers = {name: make(SIZE, SIZE) for name, make in PACKED_LAYERS.items()}
    rows = []
    kinds = itertools.product(("padded", "packed"), timing.KINDS[:2])
    cases = list(itertools.product(args.threads, args.lengths, kinds))
    for threads, length, (form, what) in tqdm(cases, desc="timing"):
        torch.set_num_threads(threads)
        timed = layers if form == "packed" else {name: layers[name] for name in LAYERS}
        if (form, what) == ("packed", "training") and length > LONGEST_TRAINED_PACK:
            timed = {name: layer for name, layer in layers.items() if name not in ("LSTM", "GRU")}
        input = input_of(form, length)
        inputs = (input, *(padded(input) if form == "packed" else ()))
        with torch.no_grad():
            grads = (torch.randn_like(output_rows(layers["lltm_ops"], input)),)
        with torch.set_grad_enabled(what == "training"):
            calls = timing.calls(what, timed, output_rows, inputs, grads)
            times = timing.medians(calls, args.rounds)
        per_row = {name: time / len(grads[0]) for name, time in times.items()}
        rows.append({"threads": threads, "length": length, "form": form, "what": what} | per_row)
        show(rows[-1])
        figures.write(args.output / "lengths.csv", about, rows)


if __name__ == "__main__":
    main()
