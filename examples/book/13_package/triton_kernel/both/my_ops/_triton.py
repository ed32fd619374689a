"""The kernels for GPUs, in Triton, which compiles them at their first calls."""

import os

import torch
import triton
import triton.language as tl

# Triton's interpreter, which tests use where there is no GPU, takes the tensors of the CPU.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
BLOCK = 1024


@triton.jit
def load(pointer, i, inside):
    """Half types are computed in float32, and rounded once, when they are stored."""
    x = tl.load(pointer + i, inside)
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def forward(gate, value, result, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    x = load(gate, i, inside)
    tl.store(result + i, x / (1 + tl.exp(-x)) * load(value, i, inside), inside)


@triton.jit
def backward(grad, gate, value, d_gate, d_value, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    x, g = load(gate, i, inside), load(grad, i, inside)
    s = 1 / (1 + tl.exp(-x))
    tl.store(d_gate + i, s * (1 + x * (1 - s)) * load(value, i, inside) * g, inside)
    tl.store(d_value + i, x * s * g, inside)


def launch(kernel, inputs, results):
    size = results[0].numel()
    # Kernels take what is contiguous, and Triton launches them on the current device.
    with torch.cuda.device_of(results[0]):
        kernel[(triton.cdiv(size, BLOCK),)](
            *(tensor.contiguous() for tensor in inputs), *results, size, BLOCK
        )


def register(op, kernel):
    """Registers a kernel with the dispatcher, as a library in CUDA would."""
    overload = getattr(torch.ops.my_ops, op).default

    def call(*inputs):
        # Checks and new results are what the operator has for fake tensors.
        results = overload.redispatch(META, *inputs)
        launch(kernel, inputs, results if isinstance(results, tuple) else (results,))
        return results

    torch.library.register_kernel(f"my_ops::{op}", DEVICE, call)
