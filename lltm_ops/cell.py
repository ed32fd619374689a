"""The LLTM cell as a module, called like :class:`torch.nn.LSTMCell`."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lltm_ops._checks import check_hx, check_tensor, explain_missing_keys, flag_as_bool, size_as_int
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
        ValueError: from the constructor, for negative sizes; from the call, for input of neither 1
            nor 2 dimensions.
        RuntimeError: from the call, as :func:`lltm_ops.forward`, in its names: ``old_h`` is ``h``.

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
        check_tensor("lltm_ops.LLTMCell", "input", input)
        batched = input.dim() == 2
        if not batched and input.dim() != 1:
            raise ValueError(
                "lltm_ops.LLTMCell: expected input to have 1 dimension [input_size] or 2 with a "
                f"batch, but got {input.dim()}"
            )
        if hx is None:
            zeros = input.new_zeros(list(input.shape[:-1]) + [self.hidden_size])  # noqa: RUF005
            h, c = zeros, zeros
        else:
            check_hx("lltm_ops.LLTMCell", ("h", "c"), hx, input.dim())
            h, c = hx
        if not batched:
            input, h, c = input.unsqueeze(0), h.unsqueeze(0), c.unsqueeze(0)
        # Each is read once, because to read a parametrized parameter computes it.
        weights, bias = self.weights, self.bias
        if bias is None:
            bias = weights.new_zeros(3 * self.hidden_size)
        new_h, new_cell = _forward(input, weights, bias, h, c)
        if not batched:
            new_h, new_cell = new_h.squeeze(0), new_cell.squeeze(0)
        return new_h, new_cell

    def extra_repr(self) -> str:
        # A parametrized parameter is not read: to print a module must not change its buffers.
        has_bias = parametrize.is_parametrized(self, "bias") or self.bias is not None
        bias = "" if has_bias else ", bias=False"
        return f"{self.input_size}, {self.hidden_size}{bias}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        key = prefix + "bias"
        bias = state_dict.get(key)
        if isinstance(bias, Tensor) and bias.shape == (1, 3 * self.hidden_size):
            state_dict[key] = bias.squeeze(0)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *args
        )
        explain_missing_keys(state_dict, missing_keys, prefix + "weights", prefix + "weight_ih")
