"""What fake tensors need beside the Meta kernels of C++, which programs without Python use.

PyTorch's public function for that, ``register_fake``, would exclude those kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode


def register() -> None:
    """Needs the operators to be loaded. A second import of the package calls it again."""
    implementations: dict[str, Callable[..., Any]] = {
        "sequence_forward": _without_other_devices,
        "_sequence_forward_with_gates": _without_other_devices,
        "sequence_backward": _without_other_devices,
        "_values_of_batch_sizes": _values_of_batch_sizes,
    }
    for name, implementation in implementations.items():
        op = getattr(torch.ops.lltm, name).default
        if op not in op_implementations_dict:
            register_op_impl(op)(implementation)


def _without_other_devices(mode: FakeTensorMode, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Lets batch_sizes, which are on the CPU, go with fake CUDA tensors.

    Fake tensors infer the device of the results from the arguments, and want them all on one.
    """
    names = [argument.name for argument in op._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    input, batch_sizes = arguments["input"], arguments.get("batch_sizes")
    if batch_sizes is None or batch_sizes.device == input.device:
        return NotImplemented  # as any other operator
    with mode:
        arguments["batch_sizes"] = torch.empty_like(batch_sizes, device=input.device)
        return op(**arguments)


class _WithoutValues(DataDependentOutputException):
    """Dynamo breaks its graph at this exception of PyTorch's, whose words are only an operator."""

    def __init__(self, op: OpOverload, words: str) -> None:
        super().__init__(op)
        self._words = words

    def __str__(self) -> str:
        return self._words


def _values_of_batch_sizes(
    _mode: FakeTensorMode, op: OpOverload, batch_sizes: Tensor, caller: str, purpose: str
) -> list[int]:
    constant = getattr(batch_sizes, "constant", None)  # of a literal in what is traced
    if constant is not None:
        return constant.tolist()  # type: ignore[no-any-return]
    try:
        meta = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
        return op.redispatch(meta, batch_sizes, caller, purpose)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise _WithoutValues(op, str(error)) from None
