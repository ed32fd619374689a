"""The function, and shapes and derivatives of its operators: the stable ABI has no autograd."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from my_ops import _arguments, _library

ops = _library.load()


def check(op: str, scores: Tensor, mask: Tensor, dimensions: int) -> None:
    _arguments.check_type(op, "scores", scores)
    if dimensions == 0:
        _arguments.refuse(op, "at least one dimension, but got a scalar")
    _arguments.check_like(op, "mask", mask, torch.bool, "scores", scores)


# Shapes without data, for torch.compile.
@torch.library.register_fake("my_ops::masked_softmax_forward")
def _(scores, mask):
    check("masked_softmax_forward", scores, mask, scores.dim())
    return scores.new_empty(scores.shape)


@torch.library.register_fake("my_ops::masked_softmax_backward")
def _(grad, scores, mask):
    check("masked_softmax_backward", scores, mask, scores.dim())
    _arguments.check_like("masked_softmax_backward", "grad", grad, scores.dtype, "scores", scores)
    return scores.new_empty(scores.shape)


def batched(op: str, *call) -> list[Tensor]:
    """With the batch in front: the operators go along the last dimension."""
    *grad, scores, mask = _arguments.batched(*call)
    check(op, scores, mask, scores.dim() - 1)  # a batch of scalars is no row
    return [*grad, scores, mask]


# torch.vmap of the operators alone. Without these lines PyTorch calls them in a loop.
for op in (ops.masked_softmax_forward, ops.masked_softmax_backward):

    @torch.library.register_vmap(op.default)
    def _(info, in_dims, *inputs, op=op):
        return op(*batched(op.__name__, info, in_dims, inputs)), 0


def derivative(vector: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """The vector times the Jacobian, which is symmetric, in operators that can be derived again."""
    weights = MaskedSoftmax.apply(scores.to(torch.promote_types(scores.dtype, torch.float32)), mask)
    product = weights * vector
    return (product - weights * product.sum(-1, keepdim=True)).to(scores.dtype)


class MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(scores, mask):
        return ops.masked_softmax_forward(scores, mask)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        # Under create_graph=True and torch.func the gradient may be differentiated again.
        recorded = torch.is_grad_enabled()
        function = derivative if recorded else ops.masked_softmax_backward
        return function(grad, *ctx.saved_tensors), None  # mask has no gradient

    @staticmethod
    def jvp(ctx, tangent, _):
        # PyTorch switches forward mode off in here: without this line, jvp of jvp would be wrong.
        with forward_ad._set_fwd_grad_enabled(True):
            # Without the tangents of this jvp, and with those of one around it.
            inputs = [forward_ad.unpack_dual(t, level=0).primal for t in ctx.saved_tensors]
            return derivative(tangent, *inputs)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return MaskedSoftmax.apply(*batched("masked_softmax", info, in_dims, inputs)), 0


# torch.compile takes no Function with a jvp, and under torch.func it leaves any Function out: the
# gradients would be zeros. So it does not look into this call, but records what happens in it.
@torch.compiler.allow_in_graph
def call(scores: Tensor, mask: Tensor) -> Tensor:
    inputs = _arguments.autocast(scores, mask)
    # The Function costs more than the kernel of a short call.
    recorded = _arguments.is_recorded(*inputs)
    return MaskedSoftmax.apply(*inputs) if recorded else ops.masked_softmax_forward(*inputs)


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """The softmax of the ``scores`` where ``mask`` is true, along the last dimension.

    Works with autograd of any order, ``torch.compile``, ``torch.func`` and ``torch.autocast``.

    Args:
        scores: of at least one dimension and any strides, float64, float32, bfloat16 or float16.
        mask: bool, of the shape and device of ``scores``: nothing is broadcast.

    Returns:
        A contiguous tensor like ``scores``, which is 0 where ``mask`` is false. Half types are
        computed in float32 and rounded once.

    Raises:
        RuntimeError: if the arguments do not fit; the sentence says which, and why.
    """
    return call(scores, mask)
