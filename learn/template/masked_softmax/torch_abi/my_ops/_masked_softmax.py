"""The function: all else is in C++."""

import torch
from torch import Tensor

from my_ops import _library

_library.load()


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """The softmax of the ``scores`` where ``mask`` is true, along the last dimension.

    Works with autograd of any order, ``torch.compile``, ``torch.func`` and ``torch.jit.script``
    (which ends with Python 3.13).

    Args:
        scores: of at least one dimension and any strides, float64, float32, bfloat16 or float16.
        mask: bool, of the shape and device of ``scores``: nothing is broadcast.

    Returns:
        A contiguous tensor like ``scores``, which is 0 where ``mask`` is false. Half types are
        computed in float32 and rounded once.

    Raises:
        RuntimeError: if the arguments do not fit; the sentence says which, and why.
    """
    return torch.ops.my_ops.masked_softmax(scores, mask)
