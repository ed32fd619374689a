"""The LLTM with its pointwise part in Triton."""

import os

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import linear

# Triton reads this at each @triton.jit. Its interpreter runs kernels on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 1024


@triton.jit
def load(pointer, inside):
    """Half types are computed in float32."""
    x = tl.load(pointer, inside)
    return x if x.dtype == tl.float64 else x.to(tl.float32)


# The interpreter has exp, but no tanh and no expm1. tl.sigmoid is ready only where triton was
# imported after TRITON_INTERPRET was set.
@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2 * sigmoid(2 * x) - 1


@triton.jit
def forward_kernel(p, old_cell, new_h, new_cell, gates, units, size, BLOCK: tl.constexpr):
    # A block of units at once: k, and all that is computed from it, are arrays.
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < units
    first = k // size * 3 * size + k % size
    i = sigmoid(load(p + first, inside))
    o = sigmoid(load(p + first + size, inside))
    g = load(p + first + 2 * size, inside)
    g = tl.where(g > 0, g, tl.exp(g) - 1)
    cell = load(old_cell + k, inside) + g * i
    tl.store(new_h + k, tanh(cell) * o, inside)
    tl.store(new_cell + k, cell, inside)
    tl.store(gates + first, i, inside)
    tl.store(gates + first + size, o, inside)
    tl.store(gates + first + 2 * size, g, inside)


@triton.jit
def backward_kernel(
    grad_h, grad_cell, new_cell, gates, d_p, d_old_cell, units, size, BLOCK: tl.constexpr
):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < units
    first = k // size * 3 * size + k % size
    i, o = load(gates + first, inside), load(gates + first + size, inside)
    g = load(gates + first + 2 * size, inside)
    d_h, t = load(grad_h + k, inside), tanh(load(new_cell + k, inside))
    d_cell = load(grad_cell + k, inside) + d_h * o * (1 - t * t)
    tl.store(d_old_cell + k, d_cell, inside)
    tl.store(d_p + first, d_cell * g * i * (1 - i), inside)
    tl.store(d_p + first + size, d_h * t * o * (1 - o), inside)
    tl.store(d_p + first + 2 * size, d_cell * i * tl.where(g > 0, 1, g + 1), inside)


def blocks(units: int) -> tuple[int]:
    return (triton.cdiv(units, BLOCK),)


INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
if INTERPRETED:
    # torch.compile cannot look into an interpreted kernel.
    define, wrap = torch.library.custom_op, lambda kernel: kernel
else:
    define, wrap = torch.library.triton_op, torch.library.wrap_triton


@define("lltm::pointwise", mutates_args=())
def pointwise(pre_activations: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p, cell = pre_activations.contiguous(), old_cell.contiguous()
    gates, new_h, new_cell = torch.empty_like(p), torch.empty_like(cell), torch.empty_like(cell)
    units, size = cell.numel(), cell.shape[1]
    wrap(forward_kernel)[blocks(units)](p, cell, new_h, new_cell, gates, units, size, BLOCK=BLOCK)
    return new_h, new_cell, gates


@define("lltm::pointwise_backward", mutates_args=())
def pointwise_backward(
    grad_h: Tensor, grad_cell: Tensor, new_cell: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    grad_h, grad_cell = grad_h.contiguous(), grad_cell.contiguous()
    d_p, d_old_cell = torch.empty_like(gates), torch.empty_like(new_cell)
    units, size = new_cell.numel(), new_cell.shape[1]
    wrap(backward_kernel)[blocks(units)](
        grad_h, grad_cell, new_cell, gates, d_p, d_old_cell, units, size, BLOCK=BLOCK
    )
    return d_p, d_old_cell


if INTERPRETED:  # the fake of a triton_op is its body

    @pointwise.register_fake
    def _(pre_activations, old_cell):
        new_h, new_cell = (old_cell.new_empty(old_cell.shape) for _ in range(2))
        return new_h, new_cell, pre_activations.new_empty(pre_activations.shape)

    @pointwise_backward.register_fake
    def _(grad_h, grad_cell, new_cell, gates):
        return torch.empty_like(gates), torch.empty_like(new_cell)


def setup_context(ctx, inputs, output):
    _, new_cell, gates = output
    ctx.mark_non_differentiable(gates)
    ctx.save_for_backward(new_cell, gates)


def backward(ctx, grad_h, grad_cell, _):
    return pointwise_backward(grad_h, grad_cell, *ctx.saved_tensors)


pointwise.register_autograd(backward, setup_context=setup_context)


def forward(input, weights, bias, old_h, old_cell):
    pre_activations = linear(torch.cat([old_h, input], 1), weights, bias)
    return pointwise(pre_activations, old_cell)[:2]


def print_graph() -> None:
    """The nodes that torch.compile hands to its compiler."""

    def compiler(module, _):
        print(*(node.target for node in module.graph.nodes if node.op == "call_function"), sep="\n")
        return module.forward

    shapes = (4, 3), (15, 8), (15,), (4, 5), (4, 5)
    inputs = [torch.ones(shape, device=DEVICE) for shape in shapes]
    torch.compile(forward, backend=aot_autograd(fw_compiler=compiler))(*inputs)


if __name__ == "__main__":
    print_graph()
