"""Shapes and derivatives of the operators. They are Python: the stable ABI has no autograd."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from my_ops import _library

_library.load()
ops = torch.ops.my_ops


def check(op: str, gate: Tensor, **others: Tensor) -> None:
    """Says of fake tensors what the kernels say of real ones."""
    for name, tensor in others.items():
        if (tensor.dtype, tensor.device, tensor.shape) != (gate.dtype, gate.device, gate.shape):
            like, got = (f"{t.dtype}{list(t.shape)} on {t.device}" for t in (gate, tensor))
            expected = f"{name} to be like gate, {like}"
            raise RuntimeError(f"my_ops::{op}: expected {expected}, but got {got}")


# Shapes without data, for torch.compile.
@torch.library.register_fake("my_ops::swiglu_forward")
def _(gate, value):
    check("swiglu_forward", gate, value=value)
    return gate.new_empty(gate.shape)


@torch.library.register_fake("my_ops::swiglu_backward")
def _(grad, gate, value):
    check("swiglu_backward", gate, grad=grad, value=value)
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def batched(info, in_dims, inputs) -> list[Tensor]:
    """A batch is one more dimension: the operators go element by element."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(inputs, in_dims, strict=True)
    ]


# torch.vmap of the operators alone. Without these lines PyTorch calls them in a loop.
@torch.library.register_vmap("my_ops::swiglu_forward")
def _(info, in_dims, *inputs):
    return ops.swiglu_forward(*batched(info, in_dims, inputs)), 0


@torch.library.register_vmap("my_ops::swiglu_backward")
def _(info, in_dims, *inputs):
    return ops.swiglu_backward(*batched(info, in_dims, inputs)), (0, 0)


def partial_derivatives(gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Derives the result by gate and by value, in operators that PyTorch can derive further."""
    gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
    s = gate.sigmoid()
    return s * (1 + gate * (1 - s)) * value, gate * s


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(gate, value):
        return ops.swiglu_forward(gate, value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        if not torch.is_grad_enabled():
            return ops.swiglu_backward(grad, *ctx.saved_tensors)
        # Under create_graph=True and torch.func: the gradients may be differentiated again.
        partials = partial_derivatives(*ctx.saved_tensors)
        return tuple((partial * grad).to(grad.dtype) for partial in partials)

    @staticmethod
    def jvp(ctx, *tangents):
        # PyTorch switches forward mode off in here: without this line, jvp of jvp would be wrong.
        with forward_ad._set_fwd_grad_enabled(True):
            # Without the tangents of this jvp, and with those of one around it.
            inputs = [forward_ad.unpack_dual(t, level=0).primal for t in ctx.saved_tensors]
            terms = zip(partial_derivatives(*inputs), tangents, strict=True)
            return sum(partial * tangent for partial, tangent in terms).to(inputs[0].dtype)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return SwiGLU.apply(*batched(info, in_dims, inputs)), 0


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
def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    return SwiGLU.apply(*autocast(gate, value))
