"""What operators do with arguments beside their mathematics: they check, batch and cast them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse(op: str, expected: str) -> None:
    raise RuntimeError(f"my_ops::{op}: expected {expected}")


def check_type(op: str, name: str, tensor: Tensor) -> None:
    """Says of fake tensors what the kernels say of real ones."""
    dtype = getattr(tensor, "dtype", None)  # an operator may get None for a tensor
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        refuse(op, f"{name} to be float64, float32, bfloat16 or float16, but got {dtype}")


def check_like(op: str, name: str, tensor: Tensor, dtype, like_name: str, like: Tensor) -> None:
    if (tensor.dtype, tensor.device, tensor.shape) != (dtype, like.device, like.shape):
        expected = f"{name} to be {dtype}{list(like.shape)} on {like.device}, like {like_name}"
        got = f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"
        refuse(op, f"{expected}, but got {got}")


def is_recorded(*tensors: Tensor) -> bool:
    """Whether autograd or a transform follows what is computed of them."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    followed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return recorded or followed


def batched(info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """Makes a batch one more dimension in front, of all tensors; numbers stay as they are."""

    def moved(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    return [moved(x, dim) for x, dim in zip(inputs, in_dims, strict=True)]


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as torch.autocast does, before the Function. register_autocast would cast inside of it,
    so that backward gets a grad of another dtype than the tensors that the Function saved."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    cast = (torch.float32, torch.bfloat16, torch.float16)
    return tuple(tensor.to(dtype) if tensor.dtype in cast else tensor for tensor in tensors)
