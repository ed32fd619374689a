"""PyTorch operators."""

from torch import Tensor

from my_ops import _autograd

__all__ = ["swiglu"]


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """``silu(gate) * value``, element by element.

    Works with autograd of any order, ``torch.compile``, ``torch.func`` and ``torch.autocast``.

    Args:
        gate: of any shape and strides, float64, float32, bfloat16 or float16.
        value: of the shape, dtype and device of ``gate``: nothing is broadcast.

    Returns:
        A contiguous tensor like ``gate``. Half types are computed in float32 and rounded once.

    Raises:
        RuntimeError: if the arguments do not fit; the sentence says which, and why.
    """
    return _autograd.swiglu(gate, value)
