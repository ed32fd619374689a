"""Runs the layers and directions of :class:`lltm_ops.LLTM`, with the time first or packed.

These are functions, not methods, so that no attribute of a subclass can take the place of one.
TorchScript reads the annotations.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lltm_ops._direction import Options, run_direction
from lltm_ops._packed_rows import batch_of, reversed_resets, sequence_of_row


def states_per_call(options: Options) -> int:
    return 2 * options.num_layers if options.bidirectional else options.num_layers


def run_layers(
    options: Options,
    parameters: List[Tensor],
    input: Tensor,
    hx: Optional[Tuple[Tensor, Tensor]],
    batch_sizes: Optional[Tensor],
    resets: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns output and cells of the last layer, and h_n and c_n of all."""
    h_0, c_0 = _initial_states(options, input, batch_sizes) if hx is None else hx
    # A trace keeps the number of what it unbinds, and would let h_0[i] pass with more states.
    h_0s, c_0s = h_0.unbind(), c_0.unbind()
    states = states_per_call(options)
    if len(h_0s) != states or len(c_0s) != states:
        raise RuntimeError(
            "lltm_ops.LLTM: expected h_0 and c_0 to begin with a dimension of num_layers * "
            f"directions = {states}, but got {len(h_0s)} and {len(c_0s)}"
        )
    directions = 2 if options.bidirectional else 1
    each = len(parameters) // states
    # Computed after the first direction has run, whose operator checks resets and batch_sizes.
    resets_of_reverse: Optional[Tensor] = None
    last_h: List[Tensor] = []
    last_c: List[Tensor] = []
    output, cells = input, input
    for layer in range(options.num_layers):
        if layer > 0:
            input = _dropped_out(options, output, h_0.size(1), batch_sizes)
        outputs: List[Tensor] = []
        all_cells: List[Tensor] = []
        for direction in range(directions):
            i = layer * directions + direction
            reverse = direction == 1
            if reverse and resets is not None and resets_of_reverse is None:
                resets_of_reverse = reversed_resets(resets, batch_sizes)
            output, cells, h_n, c_n = run_direction(
                options, parameters[i * each : (i + 1) * each],
                input, h_0s[i], c_0s[i], batch_sizes, reverse,
                resets_of_reverse if reverse else resets,
            )  # fmt: skip
            outputs.append(output)
            all_cells.append(cells)
            last_h.append(h_n)
            last_c.append(c_n)
        if directions == 2:
            output, cells = torch.cat(outputs, -1), torch.cat(all_cells, -1)
    return output, cells, torch.stack(last_h), torch.stack(last_c)


def _initial_states(
    options: Options, input: Tensor, batch_sizes: Optional[Tensor]
) -> Tuple[Tensor, Tensor]:
    batch = input.size(1) if batch_sizes is None else batch_of(batch_sizes, input)
    zeros = input.new_zeros([states_per_call(options), batch, options.hidden_size])
    return zeros, zeros


def _dropped_out(
    options: Options,
    input: Tensor,
    batch: int,
    batch_sizes: Optional[Tensor],
) -> Tensor:
    if not options.variational_dropout:
        return F.dropout(input, options.dropout, options.training)
    mask = input.new_ones([batch, input.size(-1)])
    mask = F.dropout(mask, options.dropout, options.training)
    if batch_sizes is not None:
        mask = mask.index_select(0, sequence_of_row(batch_sizes, input.size(0)).to(mask.device))
    return input * mask
