"""The kernels for GPUs, in Triton, which compiles them at their first calls."""

import os

import torch
import triton
import triton.language as tl

# Triton's interpreter, which tests use where there is no GPU, takes the tensors of the CPU.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


@triton.jit
def row(columns, BLOCK: tl.constexpr):
    """The elements of this program's row, and which of the block are inside of it."""
    column = tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64) * columns + column, column < columns


@triton.jit
def load(pointer, i, inside):
    """Half types are computed in float32, and rounded once, when they are stored."""
    x = tl.load(pointer + i, inside, 0)
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def weights(scores, mask, i, inside):
    """The softmax of the scores where mask is true, and 0 elsewhere."""
    x = tl.where(tl.load(mask + i, inside, 0), load(scores, i, inside), -float("inf"))
    largest = tl.max(x, 0)
    exps = tl.exp(x - tl.where(largest == -float("inf"), 0, largest))
    total = tl.sum(exps, 0)
    return exps / tl.where(total == 0, 1, total)  # 0 if no score counts


@triton.jit
def forward(scores, mask, result, columns, BLOCK: tl.constexpr):
    i, inside = row(columns, BLOCK)
    tl.store(result + i, weights(scores, mask, i, inside), inside)


@triton.jit
def backward(grad, scores, mask, d_scores, columns, BLOCK: tl.constexpr):
    i, inside = row(columns, BLOCK)
    weight, g = weights(scores, mask, i, inside), load(grad, i, inside)
    tl.store(d_scores + i, weight * (g - tl.sum(weight * g, 0)), inside)


def launch(kernel, inputs, result):
    """A program for each row, which is one block."""
    columns = max(result.shape[-1], 1)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 256, 1), 16)
    # Kernels take what is contiguous, and Triton launches them on the current device.
    with torch.cuda.device_of(result):
        kernel[(result.numel() // columns,)](
            *(tensor.contiguous() for tensor in inputs), result, columns, block, num_warps=warps
        )


def register(op, kernel):
    """Registers a kernel with the dispatcher, as a library in CUDA would."""
    overload = getattr(torch.ops.my_ops, op).default

    def call(*inputs):
        # Checks and the new result are what the operator has for fake tensors.
        result = overload.redispatch(META, *inputs)
        launch(kernel, inputs, result)
        return result

    torch.library.register_kernel(f"my_ops::{op}", DEVICE, call)
