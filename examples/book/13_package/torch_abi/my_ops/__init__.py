"""PyTorch operators. Importing this makes ``torch.ops.my_ops`` live."""

import torch
from torch import Tensor

from my_ops import _library

_library.load()

__all__ = ["swiglu"]


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """``silu(gate) * value``, element by element.

    Works with autograd of any order, ``torch.compile``, ``torch.func`` and ``torch.jit.script``
    (which ends with Python 3.13).

    Args:
        gate: of any shape and strides, float64, float32, bfloat16 or float16.
        value: of the shape, dtype and device of ``gate``: nothing is broadcast.

    Returns:
        A contiguous tensor like ``gate``. Half types are computed in float32 and rounded once.

    Raises:
        RuntimeError: if the arguments do not fit; the sentence says which, and why.
    """
    return torch.ops.my_ops.swiglu(gate, value)
