"""Formulas for FlopCounterMode, which count only products, like those of PyTorch's operators."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula


def register() -> None:
    """Needs the operators to be loaded. A second import of the package calls it again."""
    for kind in ("", "sequence_"):
        for name in (f"{kind}forward", f"_{kind}forward_with_gates", f"{kind}backward"):
            op = getattr(torch.ops.lltm, name)
            if op not in flop_registry:
                names = [argument.name for argument in op.default._schema.arguments]
                formula = _flops_backward if name.endswith("backward") else _flops_forward
                register_flop_formula(op)(partial(formula, names))


# FlopCounterMode passes shapes in place of tensors.
def _flops_forward(names: list[str], *given: Any, **named: Any) -> Any:
    arguments = dict(zip(names, given, strict=False)) | named
    return 2 * math.prod(arguments["input"][:-1]) * math.prod(arguments["weights"])


def _flops_backward(names: list[str], *given: Any, **named: Any) -> Any:
    arguments = dict(zip(names, given, strict=False)) | named
    rows, (gates, features) = math.prod(arguments["input"][:-1]), arguments["weights"]
    of_sequence = "h0" in names
    state_size = arguments["h0" if of_sequence else "old_h"][-1]
    d_input, d_weights, _, d_h, _ = arguments.get("output_mask", (True,) * 5)
    columns = (
        (features - state_size) * d_input
        + features * d_weights
        # The steps of a sequence always need the gradients of their old h.
        + state_size * (d_h or of_sequence)
    )
    return 2 * rows * gates * columns
