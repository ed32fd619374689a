"""Finds the sequence and the step of each row of packed data.

Uses operators that TorchScript, torch.export, ONNX and DTensor support, without loops over steps.
"""

from __future__ import annotations

from typing import List, Optional  # noqa: UP035  # TorchScript knows no list[] on old Pythons

import torch
from torch import Tensor

from lltm_ops._checks import is_tracing


def batch_of(batch_sizes: Tensor, input: Tensor) -> int:
    """The number of packed sequences. It is never more than the rows of input.

    The operator refuses batch_sizes and inputs that are wrong in any other way.
    """
    if batch_sizes.device.type == "meta":
        raise RuntimeError("lltm_ops.LLTM: expected batch_sizes to be on the CPU, but got meta")
    if is_tracing():
        # The trace keeps a size as one, but an int as a constant.
        return input[: batch_sizes[:1].sum()].size(0)
    is_list_of_sizes = batch_sizes.dim() == 1 and batch_sizes.dtype == torch.int64
    if not is_list_of_sizes or batch_sizes.size(0) == 0 or input.dim() != 2:
        return 0
    if torch.jit.is_scripting() or torch.compiler.is_compiling():  # type: ignore[attr-defined]
        return int(batch_sizes[0].clamp(0, input.size(0)))
    first = values_of(batch_sizes, "the batch size of hx, which is None")[0]
    return max(0, min(first, input.size(0)))


def values_of(batch_sizes: Tensor, purpose: str) -> List[int]:  # noqa: UP006
    """Returns batch_sizes as numbers. A tracer refuses to, unless they are constant in its graph.

    Its message names the purpose.
    """
    if torch.jit.is_scripting() or torch.compiler.is_compiling():  # type: ignore[attr-defined]
        # One by one: int() may become a symbol, and tolist() would not.
        return [int(size) for size in batch_sizes.unbind()]
    read = torch.ops.lltm._values_of_batch_sizes
    return read(batch_sizes, "lltm_ops.LLTM", purpose)  # type: ignore[no-any-return]


def reversed_resets(resets: Tensor, batch_sizes: Optional[Tensor]) -> Tensor:
    """The resets for the reverse direction: each step takes that of the step after it.

    An episode ends at the step before the next reset, and in reverse it begins there.
    """
    if batch_sizes is None:
        return torch.constant_pad_nd(resets, [0, 0, 0, 1]).narrow(0, 1, resets.size(0))
    rows = resets.size(0)
    ends = batch_sizes.cumsum(0)
    steps = _step_of_row(ends, rows)
    next_rows = _range(ends, rows) + batch_sizes.index_select(0, steps)
    ends_of_next = torch.constant_pad_nd(ends, [0, 1]).index_select(0, steps + 1)
    # A sequence that does not go on takes the added last row, which is not reset.
    next_rows = next_rows.masked_fill(next_rows >= ends_of_next, rows)
    return torch.constant_pad_nd(resets, [0, 1]).index_select(0, next_rows.to(resets.device))


def sequence_of_row(batch_sizes: Tensor, rows: int) -> Tensor:
    """Which sequence each row of packed data belongs to."""
    ends = batch_sizes.cumsum(0)
    starts = (ends - batch_sizes).index_select(0, _step_of_row(ends, rows))
    return _range(ends, rows) - starts


def _step_of_row(ends: Tensor, rows: int) -> Tensor:
    """Which step each row of packed data belongs to, from where the steps end."""
    # torch.bucketize would not do: torch.onnx.export fixes it to the export's number of steps.
    ended = ends.new_zeros([rows + 1]).scatter_add(0, ends, torch.ones_like(ends))
    return ended.cumsum(0).narrow(0, 0, rows)


def _range(like: Tensor, end: int) -> Tensor:
    """Returns torch.arange(end), a DTensor if like is one: it does not mix with plain ones."""
    return like.new_ones([end]).cumsum(0) - 1
