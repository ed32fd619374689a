"""Shapes and derivatives of the operators. They are Python: the stable ABI has no autograd."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from my_ops import _library

_library.load()
ops = torch.ops.my_ops


def check_rows(op: str, dimensions: int) -> None:
    if dimensions == 0:
        raise RuntimeError(f"my_ops::{op}: expected at least one dimension, but got a scalar")


def check(op: str, scores: Tensor, mask: Tensor, **others: Tensor) -> None:
    """Says of fake tensors what the kernels say of real ones."""
    check_rows(op, scores.dim())
    for name, tensor in {"mask": mask, **others}.items():
        dtype = torch.bool if name == "mask" else scores.dtype
        if (tensor.dtype, tensor.device, tensor.shape) != (dtype, scores.device, scores.shape):
            expected = f"{name} to be {dtype}{list(scores.shape)} on {scores.device}, like scores"
            got = f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"
            raise RuntimeError(f"my_ops::{op}: expected {expected}, but got {got}")


# Shapes without data, for torch.compile.
@torch.library.register_fake("my_ops::masked_softmax_forward")
def _(scores, mask):
    check("masked_softmax_forward", scores, mask)
    return scores.new_empty(scores.shape)


@torch.library.register_fake("my_ops::masked_softmax_backward")
def _(grad, scores, mask):
    check("masked_softmax_backward", scores, mask, grad=grad)
    return scores.new_empty(scores.shape)


def batched(op: str, info, in_dims, inputs) -> list[Tensor]:
    """Makes a batch one more dimension in front: the operators go along the last one."""
    moved = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(inputs, in_dims, strict=True)
    ]
    check_rows(op, min(tensor.dim() for tensor in moved) - 1)  # a batch of scalars is no row
    return moved


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


def autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Casts as torch.autocast does, before the Function. register_autocast would cast inside of it,
    so that backward gets a grad of another dtype than the tensors that the Function saved."""
    device = inputs[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    cast = (torch.float32, torch.bfloat16, torch.float16)
    return tuple(tensor.to(dtype) if tensor.dtype in cast else tensor for tensor in inputs)


# torch.compile takes no Function with a jvp, and under torch.func it leaves any Function out: the
# gradients would be zeros. So it does not look into this call, but records what happens in it.
@torch.compiler.allow_in_graph
def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return MaskedSoftmax.apply(*autocast(scores, mask))
