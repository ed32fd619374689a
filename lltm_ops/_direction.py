"""Runs one direction of a layer of :class:`lltm_ops.LLTM`: all its calls of the operators.

It runs by the operator of sequences or, with options that no operator computes, step by step.
TorchScript reads the annotations.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lltm_ops._checks import is_tracing
from lltm_ops._packed_rows import values_of
from lltm_ops.functional import _new_cell, _new_h


class Options(NamedTuple):
    """Arguments of the layer's constructor, and whether it trains."""

    input_size: int
    hidden_size: int
    num_layers: int
    bidirectional: bool
    bias: bool
    dropout: float
    variational_dropout: bool
    recurrent_dropout: float
    zoneout: float
    layer_norm: bool
    training: bool


def run_direction(
    options: Options,
    parameters: List[Tensor],
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    batch_sizes: Optional[Tensor],
    reverse: bool,
    resets: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns output, cells, h_n and c_n."""
    weights = parameters[0]
    bias = parameters[1] if options.bias else weights.new_zeros(3 * options.hidden_size)
    drops_out = options.training and options.recurrent_dropout > 0
    if not options.layer_norm and options.zoneout == 0 and not drops_out:
        output, cells, h_n, c_n = torch.ops.lltm.sequence_forward(
            input, weights, bias, h_0, c_0, batch_sizes, reverse, resets
        )
        return output, cells, h_n, c_n
    return run_step_by_step(
        input, weights, bias, h_0, c_0, batch_sizes, reverse, resets,
        options, parameters[-2:] if options.layer_norm else parameters[:0],
    )  # fmt: skip


def run_step_by_step(
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    h0: Tensor,
    c0: Tensor,
    batch_sizes: Optional[Tensor],
    reverse: bool,
    resets: Optional[Tensor],
    options: Options,
    scales: List[Tensor],
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs a sequence like ``lltm::sequence_forward``, whose arguments come first, with options.

    ``scales`` are empty without ``layer_norm``,
    else its weight and bias.
    """
    if batch_sizes is not None and is_tracing():
        raise RuntimeError(
            "lltm_ops.LLTM: expected no batch_sizes under torch.jit.trace, which would keep the "
            "lengths of its example, but layer_norm, zoneout and recurrent_dropout read them: "
            "trace a model whose LLTM is made by torch.jit.script"
        )
    # Calls without anything to compute, which only check: one has no steps, one no features.
    no_steps = None if batch_sizes is None else batch_sizes[:0]
    torch.ops.lltm.sequence_forward(input[:0], weights, bias, h0, c0, no_steps)
    torch.ops.lltm.sequence_forward(
        input[..., :0], weights[:0, :0], weights[0, :0],
        h0[:, :0], c0[:, :0], batch_sizes, reverse, resets,
    )  # fmt: skip
    if batch_sizes is None:
        sizes = [input.size(1)] * input.size(0)
        steps = list(input.unbind(0))
    else:
        sizes = values_of(batch_sizes, "layer_norm, zoneout and recurrent_dropout")
        steps = list(torch.split(input, sizes))
    if len(steps) == 0:
        # Its empty results have derivatives, which are zero.
        output, cells, h_n, c_n = torch.ops.lltm.sequence_forward(
            input, weights, bias, h0, c0, batch_sizes, reverse, resets
        )
        return output, cells, h_n, c_n
    resets_of_steps: List[Tensor] = []
    if resets is not None:
        resets_of_steps = list(torch.split(resets.flatten(), sizes))
    # Under autocast the dtypes may differ, and torch.cat refuses two half types.
    if h0.dtype != input.dtype:
        h0 = h0.float()
    if c0.dtype != input.dtype:
        c0 = c0.float()
    mask = F.dropout(torch.ones_like(h0), options.recurrent_dropout, options.training)
    h, cell = h0, c0
    outputs: List[Tensor] = []
    all_cells: List[Tensor] = []
    for i in range(len(steps)):
        step = len(steps) - 1 - i if reverse else i
        size = sizes[step]
        old_h, old_cell = h[:size], cell[:size]
        if resets is not None:
            reset = resets_of_steps[step].unsqueeze(1)
            old_h, old_cell = old_h.masked_fill(reset, 0), old_cell.masked_fill(reset, 0)
        recurrent = old_h * mask[:size]
        if len(scales) > 0:
            new_h, new_cell = _layer_norm_cell(
                steps[step], weights, bias, scales, recurrent, old_cell
            )
        else:
            new_h, new_cell = torch.ops.lltm.forward(
                steps[step], weights, bias, recurrent, old_cell
            )
        new_h = _zoned_out(old_h, new_h, options)
        new_cell = _zoned_out(old_cell, new_cell, options)
        outputs.append(new_h)
        all_cells.append(new_cell)
        h, cell = torch.cat([new_h, h[size:]]), torch.cat([new_cell, cell[size:]])
    if reverse:
        outputs.reverse()
        all_cells.reverse()
    if batch_sizes is None:
        output, cells = torch.stack(outputs), torch.stack(all_cells)
    else:
        output, cells = torch.cat(outputs), torch.cat(all_cells)
    return output, cells, h.to(output.dtype), cell.to(output.dtype)


def _zoned_out(old: Tensor, new: Tensor, options: Options) -> Tensor:
    if options.zoneout == 0:
        return new
    old = old.to(new.dtype)  # under autocast the initial state has another dtype
    if options.training:
        # In float32: half types cannot tell small probabilities apart.
        kept = torch.rand_like(new, dtype=torch.float32) < options.zoneout
        return torch.where(kept, old, new)
    return torch.lerp(new, old, options.zoneout)


def _layer_norm_cell(
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    scales: List[Tensor],
    old_h: Tensor,
    old_cell: Tensor,
) -> Tuple[Tensor, Tensor]:
    size = [old_h.size(1)]
    products = F.linear(torch.cat([old_h, input], 1), weights).chunk(3, 1)
    scale = scales[0].chunk(4)
    shift = bias.chunk(3)
    input_gate = F.layer_norm(products[0], size, scale[0], shift[0])
    output_gate = F.layer_norm(products[1], size, scale[1], shift[1])
    candidate = F.layer_norm(products[2], size, scale[2], shift[2])
    new_cell = _new_cell(input_gate, candidate, old_cell)
    new_h = _new_h(output_gate, F.layer_norm(new_cell, size, scale[3], scales[1]))
    # Autocast normalises in float32.
    return new_h.to(products[0].dtype), new_cell.to(products[0].dtype)
