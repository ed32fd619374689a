"""Lets the sequence operators take batch_sizes, which are on the CPU, with fake CUDA tensors.

Fake tensors infer the device of the results from the arguments, and want them all on one.
PyTorch's public function for that, ``register_fake``, excludes the Meta kernels of C++, which
programs without Python need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode


def register() -> None:
    """Needs the operators to be loaded. A second import of the package calls it again."""
    for name in ("sequence_forward", "_sequence_forward_with_gates", "sequence_backward"):
        op = getattr(torch.ops.lltm, name).default
        if op not in op_implementations_dict:
            register_op_impl(op)(_without_other_devices)


def _without_other_devices(mode: FakeTensorMode, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    input, batch_sizes = arguments["input"], arguments.get("batch_sizes")
    if batch_sizes is None or batch_sizes.device == input.device:
        return NotImplemented  # as any other operator
    with mode:
        arguments["batch_sizes"] = torch.empty_like(batch_sizes, device=input.device)
        return op(**arguments)
