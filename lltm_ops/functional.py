"""The operators as typed functions, and the same mathematics in plain PyTorch."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the LLTM cell: an LSTM without forget gate, with an ELU candidate.

    ::

        sums     = [old_h, input] @ weights.T + bias      in three chunks: input, output, candidate
        i, o, g  = sigmoid(sums[0]), sigmoid(sums[1]), elu(sums[2])
        new_cell = old_cell + g * i
        new_h    = tanh(new_cell) * o

    It is differentiable any number of times, and works under ``torch.compile``, ``torch.func``,
    forward-mode AD, autocast (which casts all arguments but float64) and in ``torch.jit.script``.

    Args:
        input: ``[batch, input_features]``. Batch and input_features may be 0.
        weights: ``[3 * state_size, state_size + input_features]``. Rows: input gate, output gate,
            candidate. The first ``state_size`` columns multiply ``old_h``, the rest ``input``.
        bias: ``[3 * state_size]``.
        old_h: hidden state, ``[batch, state_size]``.
        old_cell: cell state, ``[batch, state_size]``.

    All arguments are on one device and have one dtype: float64, float32, bfloat16 or float16. They
    may have any strides. Half types are summed, and their gates computed, in float32.

    Returns:
        ``(new_h, new_cell)``, each ``[batch, state_size]`` and contiguous.

    Raises:
        RuntimeError: if an argument is undefined, sparse, or of the wrong device, dtype or shape.

    Source: ``csrc/ops/library.cpp`` (schema), ``csrc/cpu/lltm_forward.cpp``,
    ``csrc/cuda/lltm_kernel.cu``. The same as ``torch.ops.lltm.forward``.
    """
    return torch.ops.lltm.forward(input, weights, bias, old_h, old_cell)  # type: ignore[no-any-return]


def backward(
    grad_h: Tensor | None,
    grad_cell: Tensor | None,
    new_cell: Tensor,
    gates: Tensor,
    input: Tensor,
    weights: Tensor,
    old_h: Tensor,
    output_mask: tuple[bool, bool, bool, bool, bool] = (True, True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Computes the gradients of one step. Autograd calls this, and so may a loop of your own.

    Args:
        grad_h, grad_cell: gradients of ``new_h`` and ``new_cell``, ``[batch, state_size]``.
            ``None`` means zeros.
        new_cell: as :func:`forward` returned it, ``[batch, state_size]``.
        gates: the activated gates ``[batch, 3 * state_size]``, the third output of
            ``torch.ops.lltm._forward_with_gates``.
        input, weights, old_h: as given to :func:`forward`.
        output_mask: which of the five gradients to compute.

    Returns:
        ``(d_input, d_weights, d_bias, d_old_h, d_old_cell)``: each has the shape of its argument
        and is contiguous, or is ``None`` if ``output_mask`` is false for it.

    Raises:
        RuntimeError: if an argument is of the wrong device, dtype or shape.
        NotImplementedError: if an argument is sparse.

    Source: ``csrc/ops/gate_math.h``, and the files of :func:`forward`. The same as
    ``torch.ops.lltm.backward``.
    """
    return torch.ops.lltm.backward(  # type: ignore[no-any-return]
        grad_h, grad_cell, new_cell, gates, input, weights, old_h, output_mask
    )


def sequence_forward(
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    h0: Tensor,
    c0: Tensor,
    batch_sizes: Optional[Tensor] = None,  # noqa: UP045
    reverse: bool = False,
    resets: Optional[Tensor] = None,  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs :func:`forward` for all steps of a sequence, in one operator.

    The description of :func:`forward` holds here, too. :class:`lltm_ops.LLTM` is the layer.

    Args:
        input: ``[time, batch, input_features]``; or, with ``batch_sizes``, packed
            ``[sum(batch_sizes), input_features]``. All sizes may be 0.
        weights, bias: as for :func:`forward`.
        h0, c0: the state before the first step, ``[batch, state_size]``.
        batch_sizes: as in a :class:`torch.nn.utils.rnn.PackedSequence`, for each step the number
            of sequences that have it: int64 ``[time]`` on the CPU, never increasing, the first
            of them ``batch``.
        reverse: if true, from the last step to the first.
        resets: bool, ``[time, batch]``; or, with ``batch_sizes``, packed ``[sum(batch_sizes)]``.
            Where true, the step begins with zeros instead of the state of the step before it, and
            no gradient passes.

    Returns:
        ``(output, cells, h_n, c_n)``, all contiguous. ``output`` and ``cells`` are the hidden and
        the cell state after each step, ``[time, batch, state_size]``; or, with ``batch_sizes``,
        packed ``[sum(batch_sizes), state_size]``. ``h_n`` and ``c_n`` are those after the step that
        each sequence runs last, ``[batch, state_size]``. Without steps they are ``h0`` and ``c0``.

    Raises:
        RuntimeError: if an argument is undefined, sparse, or of the wrong device, dtype, shape, or
            if ``batch_sizes`` do not belong to ``input`` and ``h0``.

    Source: ``csrc/ops/library.cpp`` (schema), ``csrc/cpu/lltm_sequence_forward.cpp``,
    ``csrc/cuda/lltm_sequence_kernel.cu``. The same as ``torch.ops.lltm.sequence_forward``.
    """
    return torch.ops.lltm.sequence_forward(  # type: ignore[no-any-return]
        input, weights, bias, h0, c0, batch_sizes, reverse, resets
    )


def sequence_backward(
    grad_output: Tensor | None,
    grad_cells: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    output: Tensor,
    cells: Tensor,
    gates: Tensor,
    input: Tensor,
    weights: Tensor,
    h0: Tensor,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    resets: Tensor | None = None,
    output_mask: tuple[bool, bool, bool, bool, bool] = (True, True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Computes the gradients of a sequence. Autograd calls this.

    Args:
        grad_output, grad_cells, grad_h_n, grad_c_n: gradients of the results of
            :func:`sequence_forward`, with the same sizes. ``None`` means zeros.
        output, cells: as :func:`sequence_forward` returned them.
        gates: the activated gates of all steps, the last output of
            ``torch.ops.lltm._sequence_forward_with_gates``: of the sizes of ``output``, with
            ``3 * state_size`` for ``state_size``.
        input, weights, h0, batch_sizes, reverse, resets: as given to :func:`sequence_forward`.
        output_mask: which of the five gradients to compute.

    Returns:
        ``(d_input, d_weights, d_bias, d_h0, d_c0)``: each has the shape of its argument and is
        contiguous, or is ``None`` if ``output_mask`` is false for it.

    Raises:
        RuntimeError, NotImplementedError: as :func:`backward`.

    Source: the files of :func:`sequence_forward`. The same as
    ``torch.ops.lltm.sequence_backward``.
    """
    return torch.ops.lltm.sequence_backward(  # type: ignore[no-any-return]
        grad_output,
        grad_cells,
        grad_h_n,
        grad_c_n,
        output,
        cells,
        gates,
        input,
        weights,
        h0,
        batch_sizes,
        reverse,
        resets,
        output_mask,
    )


def reference(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes :func:`forward` in plain PyTorch, for tests and benchmarks.

    Arguments and results are those of :func:`forward`. Wrong arguments raise PyTorch's own errors.
    """
    sums = F.linear(torch.cat([old_h, input], dim=1), weights, bias)
    input_gate, output_gate, candidate = sums.chunk(3, dim=1)
    new_cell = _new_cell(input_gate, candidate, old_cell)
    return _new_h(output_gate, new_cell), new_cell


def _new_cell(input_gate: Tensor, candidate: Tensor, old_cell: Tensor) -> Tensor:
    return old_cell + F.elu(candidate) * torch.sigmoid(input_gate)


def _new_h(output_gate: Tensor, new_cell: Tensor) -> Tensor:
    return torch.tanh(new_cell) * torch.sigmoid(output_gate)
