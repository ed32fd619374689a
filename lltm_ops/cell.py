"""The LLTM cell as a module, called like :class:`torch.nn.LSTMCell`."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils import parametrize

from lltm_ops._checks import (
    check_tensor,
    fault_of_tensors,
    flag_as_bool,
    may_have_shape,
    refuse_hx,
    size_as_int,
)
from lltm_ops._leaf_module import LeafModule
from lltm_ops._library import load

# Looked up once, because the lookups would take 3 % of a small call.
_forward = load().forward


class LLTMCell(LeafModule):
    """One step of an LLTM: an LSTM without forget gate, with an ELU candidate.

    Args:
        input_size: features of the input.
        hidden_size: size of the hidden and of the cell state.
        bias: if false, there is no bias.
        device: of the parameters.
        dtype: of the parameters: float64, float32, bfloat16 or float16.

    Inputs: ``input, hx=(h, c)``
        ``input`` is ``[batch, input_size]`` or ``[input_size]``. ``h`` and ``c`` are
        ``[batch, hidden_size]`` or ``[hidden_size]``, and are zeros by default.

    Outputs: ``(h', c')``, shaped like ``h`` and ``c``.

    Attributes:
        weights: ``[3 * hidden_size, hidden_size + input_size]``. Rows: input gate, output gate,
            candidate. The first ``hidden_size`` columns multiply ``h``, the rest ``input``.
        bias: ``[3 * hidden_size]`` or ``None``.

    Both are drawn uniformly from ``[-1 / sqrt(hidden_size), 1 / sqrt(hidden_size)]``.
    A checkpoint of the tutorial's LLTM, whose bias may be ``[1, 3 * hidden_size]``, loads as it is.

    Raises:
        TypeError: for sizes that are not integers, and arguments of a call that are not tensors.
        ValueError: from the constructor, for negative sizes; from the call, for input or state of
            neither 1 nor 2 dimensions.
        RuntimeError: from the call, for tensors of other sizes, and as :func:`lltm_ops.forward`.

    Example::

        >>> cell = lltm_ops.LLTMCell(10, 20)
        >>> h, c = cell(torch.randn(3, 10))
        >>> h, c = cell(torch.randn(3, 10), (h, c))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = size_as_int("lltm_ops.LLTMCell", "input_size", input_size)
        self.hidden_size = size_as_int("lltm_ops.LLTMCell", "hidden_size", hidden_size)
        bias = flag_as_bool("lltm_ops.LLTMCell", "bias", bias)
        rows, columns = 3 * self.hidden_size, self.hidden_size + self.input_size
        self.weights = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew."""
        bound = 1.0 / math.sqrt(self.hidden_size) if self.hidden_size > 0 else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    # TorchScript reads these annotations, and knows neither tuple[] nor "|" on old Pythons.
    def forward(
        self,
        input: Tensor,
        hx: Optional[Tuple[Tensor, Tensor]] = None,  # noqa: UP006, UP045
    ) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        # The checks are inline and compare numbers, because a small call takes as long as a few
        # calls of Python.
        if not isinstance(input, Tensor) or input.is_nested:
            check_tensor("lltm_ops.LLTMCell", "input", input)
        sizes = input.shape
        batched = len(sizes) == 2
        # Under torch.jit.trace sizes are tensors, and the operator compares them.
        are_numbers = len(sizes) == 0 or not isinstance(sizes[-1], Tensor)
        if not (batched or len(sizes) == 1) or (are_numbers and sizes[-1] != self.input_size):
            _refuse_input(input, self.input_size)
        if hx is None:
            zeros = input.new_zeros(list(sizes[:-1]) + [self.hidden_size])  # noqa: RUF005
            h, c = zeros, zeros
        else:
            if not isinstance(hx, (tuple, list)) or len(hx) != 2:
                refuse_hx("lltm_ops.LLTMCell", "(h, c)", hx)
            h, c = hx
            if not (isinstance(h, Tensor) and isinstance(c, Tensor)) or h.is_nested or c.is_nested:
                check_tensor("lltm_ops.LLTMCell", "h", h)
                check_tensor("lltm_ops.LLTMCell", "c", c)
            h_sizes, c_sizes = h.shape, c.shape
            fit = len(h_sizes) == len(sizes) == len(c_sizes)
            if fit and are_numbers:
                fit = h_sizes[-1] == self.hidden_size == c_sizes[-1]
            if batched and fit and are_numbers:
                if is_compiling():
                    shape = [sizes[0], self.hidden_size]
                    fit = may_have_shape(h, shape) and may_have_shape(c, shape)
                else:
                    fit = h_sizes[0] == sizes[0] == c_sizes[0]
            if not fit:
                _refuse_state(input, h, c, self.hidden_size)
        if not batched:
            input, h, c = input.unsqueeze(0), h.unsqueeze(0), c.unsqueeze(0)
        # Each is read once, because to read a parametrized parameter computes it.
        weights, bias = self.weights, self.bias
        if bias is None:
            bias = weights.new_zeros(3 * self.hidden_size)
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            new_h, new_cell = _forward(input, weights, bias, h, c)
        else:
            new_h, new_cell = _run_or_explain(input, weights, bias, h, c)
        if not batched:
            new_h, new_cell = new_h.squeeze(0), new_cell.squeeze(0)
        return new_h, new_cell

    def extra_repr(self) -> str:
        # A parametrized parameter is not read: to print a module must not change its buffers.
        has_bias = parametrize.is_parametrized(self, "bias") or self.bias is not None
        bias = "" if has_bias else ", bias=False"
        return f"{self.input_size}, {self.hidden_size}{bias}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + "bias"
        bias = state_dict.get(key)
        if isinstance(bias, Tensor) and bias.shape == (1, 3 * self.hidden_size):
            state_dict[key] = bias.squeeze(0)
        super()._load_from_state_dict(state_dict, prefix, *args)


# These are functions, so that no attribute of a subclass can take the place of one.
def _run_or_explain(
    input: Tensor, weights: Tensor, bias: Tensor, h: Tensor, c: Tensor
) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """The operator, whose faults are told in the names that the user of the cell knows."""
    if is_compiling():
        fault = _fault(input, weights, h, c)
        if fault is not None:
            raise fault
        return _forward(input, weights, bias, h, c)  # type: ignore[no-any-return]
    try:
        return _forward(input, weights, bias, h, c)  # type: ignore[no-any-return]
    except RuntimeError:
        fault = _fault(input, weights, h, c)
        if fault is not None:
            raise fault from None
        raise


def _fault(input: Tensor, weights: Tensor, h: Tensor, c: Tensor) -> Any:
    return fault_of_tensors("lltm_ops.LLTMCell", RuntimeError, weights, input, {"h": h, "c": c})


def _refuse_input(input: Tensor, input_size: int) -> None:
    if input.dim() != 1 and input.dim() != 2:
        raise ValueError(
            "lltm_ops.LLTMCell: expected input to have 1 dimension [input_size] or 2 with a "
            f"batch, but got {input.dim()}"
        )
    raise RuntimeError(
        f"lltm_ops.LLTMCell: expected input to have input_size = {input_size} features, "
        f"but got {input.size(-1)}"
    )


def _refuse_state(input: Tensor, h: Tensor, c: Tensor, hidden_size: int) -> None:
    names = "[batch, hidden_size]" if input.dim() == 2 else "[hidden_size]"
    expected = list(input.shape[:-1]) + [hidden_size]  # noqa: RUF005
    words = (
        f"lltm_ops.LLTMCell: expected h and c to have shape {names} = {expected}, "
        f"but got {list(h.shape)} and {list(c.shape)}"
    )
    if min(h.dim(), c.dim()) < 1 or max(h.dim(), c.dim()) > 2:
        raise ValueError(words)  # as nn.LSTMCell does
    raise RuntimeError(words)
