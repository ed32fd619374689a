"""The function, and shapes and derivatives of its operators: the stable ABI has no autograd."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from my_ops import _arguments, _library

ops = _library.load()


def check(op: str, name: str, tensor: Tensor, lengths: Tensor, batches: int = 0) -> None:
    """Says of fake tensors what the kernels say of real ones, but for what the lengths are."""
    _arguments.check_type(op, name, tensor)
    dimensions = tensor.dim() - batches
    if dimensions < 2:
        _arguments.refuse(op, f"{name} of at least two dimensions, but got {dimensions}")
    fits = (torch.int64, tensor.device, tensor.dim() - 1, tensor.shape[:-2])
    if (lengths.dtype, lengths.device, lengths.dim(), lengths.shape[:-1]) != fits:
        expected = f"lengths to be int64 and like {name}, without its last two sizes, then segments"
        got = f"{lengths.dtype}{list(lengths.shape)} on {lengths.device}"
        _arguments.refuse(op, f"{expected}, but got {got}")


# Shapes without data, for torch.compile.
@torch.library.register_fake("my_ops::segment_sum_forward")
def _(values, lengths, decay):
    check("segment_sum_forward", "values", values, lengths)
    return values.new_empty((*lengths.shape, values.shape[-1]))


@torch.library.register_fake("my_ops::segment_sum_backward")
def _(grad, lengths, decay, rows):
    op = "segment_sum_backward"
    check(op, "grad", grad, lengths)
    if grad.shape[-2] != lengths.shape[-1]:
        _arguments.refuse(op, f"grad to have a row for each segment, but got {grad.shape[-2]}")
    return grad.new_empty((*grad.shape[:-2], rows, grad.shape[-1]))


def batched(op: str, name: str, *call) -> list:
    """With the batch in front: the operators take any dimensions before their own."""
    tensor, lengths, *numbers = _arguments.batched(*call)
    check(op, name, tensor, lengths, batches=1)
    return [tensor, lengths, *numbers]


# torch.vmap of the operators alone. Without these lines PyTorch calls them in a loop.
for op, name in ((ops.segment_sum_forward, "values"), (ops.segment_sum_backward, "grad")):

    @torch.library.register_vmap(op.default)
    def _(info, in_dims, *inputs, op=op, name=name):
        return op(*batched(op.__name__, name, info, in_dims, inputs)), 0


class SegmentSum(torch.autograd.Function):
    """Linear in the values. So its derivative is itself, and that of its transpose, backward's
    operator, is the transpose. The transpose of that is the sum again."""

    @staticmethod
    def forward(tensor, lengths, decay, rows, is_transpose):
        if is_transpose:
            return ops.segment_sum_backward(tensor, lengths, decay, rows)
        return ops.segment_sum_forward(tensor, lengths, decay)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, lengths, *ctx.numbers = inputs  # save_for_backward takes tensors only
        ctx.save_for_backward(lengths)
        ctx.save_for_forward(lengths)

    @staticmethod
    def backward(ctx, grad):
        (lengths,), (decay, rows, is_transpose) = ctx.saved_tensors, ctx.numbers
        d_values = SegmentSum.apply(grad, lengths, decay, rows, not is_transpose)
        return d_values, None, None, None, None  # lengths and numbers have no gradients

    @staticmethod
    def jvp(ctx, tangent, *_):
        # PyTorch switches forward mode off in here. A Function does not mind, but with operators of
        # PyTorch in its place, jvp of jvp would be wrong without this line.
        with forward_ad._set_fwd_grad_enabled(True):
            return SegmentSum.apply(tangent, *ctx.saved_tensors, *ctx.numbers)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        name = "grad" if inputs[-1] else "values"
        return SegmentSum.apply(*batched("segment_sum", name, info, in_dims, inputs)), 0


# torch.compile takes no Function with a jvp, and under torch.func it leaves any Function out: the
# gradients would be zeros. So it does not look into this call, but records what happens in it.
@torch.compiler.allow_in_graph
def call(values: Tensor, lengths: Tensor, decay: float) -> Tensor:
    (values,) = _arguments.autocast(values)
    # The Function costs more than the kernel of a short call.
    if _arguments.is_recorded(values):
        check("segment_sum", "values", values, lengths)
        return SegmentSum.apply(values, lengths, decay, values.shape[-2], False)
    return ops.segment_sum_forward(values, lengths, decay)


def segment_sum(values: Tensor, lengths: Tensor, decay: float = 1.0) -> Tensor:
    """The sums of the rows of each segment. A row counts ``decay`` times as much as the next one.

    Works with autograd of any order, ``torch.compile``, ``torch.func`` and ``torch.autocast``.

    Args:
        values: ``[..., rows, columns]`` of any strides, float64, float32, bfloat16 or float16.
        lengths: int64 ``[..., segments]``, of at least 0: how many rows each segment has. Their
            sum is the number of rows, in each example.
        decay: has no gradient.

    Returns:
        A contiguous tensor ``[..., segments, columns]``, which is 0 for a segment of no rows. Half
        types are computed in float32 and rounded once.

    Raises:
        RuntimeError: if the arguments do not fit; the sentence says which, and why.
    """
    return call(values, lengths, decay)
