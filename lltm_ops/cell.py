"""The LLTM cell as a module, called like :class:`torch.nn.LSTMCell`."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor, nn


class LLTMCell(nn.Module):
    """One step of an LLTM: an LSTM without forget gate, with an ELU candidate.

    Args:
        input_size: features of the input.
        hidden_size: size of the hidden and of the cell state.
        bias: if false, there is no bias.
        device: of the parameters.
        dtype: of the parameters: float64, float32, bfloat16 or float16.

    Inputs: ``input, hx=(h, c)``
        ``input`` is ``[batch, input_size]`` or ``[input_size]``; ``h`` and ``c`` are
        ``[batch, hidden_size]`` or ``[hidden_size]`` and default to zeros.

    Outputs: ``(h', c')``, shaped like ``h`` and ``c``.

    Attributes:
        weights: ``[3 * hidden_size, hidden_size + input_size]``. Rows: input gate, output gate,
            candidate. The first ``hidden_size`` columns multiply ``h``, the rest ``input``.
        bias: ``[3 * hidden_size]`` or ``None``.

    Both are drawn uniformly from ``[-1 / sqrt(hidden_size), 1 / sqrt(hidden_size)]``.
    A checkpoint of the tutorial's LLTM, whose bias may be ``[1, 3 * hidden_size]``, loads as it is.

    Raises:
        RuntimeError: from the call, as :func:`lltm_ops.forward`.

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
        self.input_size = input_size
        self.hidden_size = hidden_size
        rows = 3 * hidden_size
        self.weights = nn.Parameter(
            torch.empty(rows, hidden_size + input_size, device=device, dtype=dtype)
        )
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
        if hx is None:
            zeros = input.new_zeros(list(input.shape[:-1]) + [self.hidden_size])  # noqa: RUF005
            hx = (zeros, zeros)
        h, c = hx
        batched = input.dim() != 1
        if not batched:
            input, h, c = input.unsqueeze(0), h.unsqueeze(0), c.unsqueeze(0)
        bias = self.bias
        if bias is None:
            bias = self.weights.new_zeros(3 * self.hidden_size)
        new_h, new_cell = torch.ops.lltm.forward(input, self.weights, bias, h, c)
        if not batched:
            new_h, new_cell = new_h.squeeze(0), new_cell.squeeze(0)
        return new_h, new_cell

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"{self.input_size}, {self.hidden_size}{bias}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + "bias"
        bias = state_dict.get(key)
        if isinstance(bias, Tensor) and bias.shape == (1, 3 * self.hidden_size):
            state_dict[key] = bias.squeeze(0)
        super()._load_from_state_dict(state_dict, prefix, *args)
