"""The LLTM on the stable ABI: the kernels in C++, and all else in Python."""

import torch
from build_library import build
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import elu, linear

# The headers then offer only what torch 2.11 has, which each later torch keeps.
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
build(
    "12_stable_abi/lltm_stable.cpp",
    flags=("-march=native", "-fno-math-errno", "-fno-trapping-math", TARGET),
    name="book_stable",
)
ops = torch.ops.lltm_stable


# Sizes without numbers, for torch.compile.
@torch.library.register_fake("lltm_stable::forward")
def _(input, weights, bias, old_h, old_cell):
    new_h, new_cell = (input.new_empty(old_h.shape) for _ in range(2))
    return new_h, new_cell, input.new_empty(len(old_h), len(weights))


@torch.library.register_fake("lltm_stable::backward")
def _(grad_h, grad_cell, new_cell, gates, input, weights, old_h):
    bias = weights.new_empty(len(weights))
    return tuple(t.new_empty(t.shape) for t in (input, weights, bias, old_h, new_cell))


def formula(input, weights, bias, old_h, old_cell):
    """A step out of PyTorch's operators, each of which has derivatives of every order."""
    i, o, g = linear(torch.cat([old_h, input], 1), weights, bias).chunk(3, 1)
    i, o, g = i.sigmoid(), o.sigmoid(), elu(g)
    new_cell = old_cell + g * i
    return new_cell.tanh() * o, new_cell, torch.cat([i, o, g], 1)


def gradients(inputs):
    """Turns gradients of new_h and new_cell into those of the inputs, by the formula."""
    return torch.func.vjp(lambda *inputs: formula(*inputs)[:2], *inputs)[1]


class LLTM(torch.autograd.Function):
    @staticmethod
    def forward(*inputs):
        return ops.forward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, new_cell, gates = output
        ctx.mark_non_differentiable(gates)
        ctx.save_for_backward(*inputs, new_cell, gates)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad_h, grad_cell, _):
        *inputs, new_cell, gates = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody may differentiate this gradient
            return gradients(inputs)((grad_h, grad_cell))
        input, weights, _, old_h, _ = inputs
        return ops.backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h)

    @staticmethod
    def jvp(ctx, *tangents):
        # PyTorch switches forward mode off in here: without this line, jvp of jvp would be wrong.
        with forward_ad._set_fwd_grad_enabled(True):
            # Without the tangents of this jvp, and with those of one around it.
            inputs = [forward_ad.unpack_dual(t, level=0).primal for t in ctx.saved_tensors]
            zeros = torch.zeros_like(inputs[4])
            # Gradients are linear in those of the results, so their own derivative is the jvp.
            _, jvp = torch.func.vjp(gradients(inputs), (zeros, zeros))
            (new_tangents,) = jvp(tangents)
            return *new_tangents, None

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return torch.vmap(formula, in_dims)(*inputs), (0, 0, 0)


def autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Casts before the Function: autograd records it, and casts the gradients back."""
    device = inputs[0].device.type
    if not torch.is_autocast_enabled(device):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in inputs)


# torch.compile takes no Function with a jvp, and a compiled torch.func.jvp would pass over it. So
# torch.compile does not look into this call, but records what happens in it.
@torch.compiler.allow_in_graph
def apply(*inputs):
    return LLTM.apply(*autocast(*inputs))


def forward(input, weights, bias, old_h, old_cell):
    return apply(input, weights, bias, old_h, old_cell)[:2]
