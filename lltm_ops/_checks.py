"""What the modules refuse before or after they call an operator, in the words of their users."""

import numbers
import operator
from typing import Any, List, Tuple  # noqa: UP035

import torch
from torch import Tensor


def size_as_int(owner: str, name: str, size: Any, least: int = 0) -> int:
    """Returns the size as an int. It may be an integer of any type, such as those of NumPy."""
    try:
        value = operator.index(size)
    except TypeError:
        value = None
    if value is None or isinstance(size, bool):
        raise TypeError(f"{owner}: expected {name} to be an integer, but got {_type_of(size)}")
    if value < least:
        raise ValueError(f"{owner}: expected {name} to be {least} or more, but got {value}")
    return value


def flag_as_bool(owner: str, name: str, flag: Any) -> bool:
    """Returns the flag as a bool. It may be one of NumPy."""
    if not isinstance(flag, bool) and getattr(flag, "dtype", None) != "bool":
        raise TypeError(f"{owner}: expected {name} to be a bool, but got {_type_of(flag)}")
    return bool(flag)


def check_probability(owner: str, name: str, probability: Any) -> None:
    is_number = isinstance(probability, numbers.Real) and not isinstance(probability, bool)
    if not is_number or not 0 <= probability <= 1:
        raise ValueError(
            f"{owner}: expected {name} to be a number between 0 and 1, but got {probability!r}"
        )


def check_tensor(owner: str, name: str, value: Tensor, expected: str = "a tensor") -> None:
    # TorchScript leaves this condition out, because there the value is always a tensor.
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner}: expected {name} to be {expected}, but got {_type_of(value)}")
    # The modules read sizes and reshape before they call an operator, whose own check would not be
    # reached: a nested tensor has no sizes, and a sparse one may have no views.
    if value.is_nested:
        raise RuntimeError(_not_dense(owner, name, "a nested tensor"))
    if value.layout != torch.strided:
        raise RuntimeError(_not_dense(owner, name, f"layout {value.layout}"))


def _not_dense(owner: str, name: str, found: str) -> str:
    return f"{owner}: expected {name} to be a dense tensor, but got {found}"


def fault_of_tensors(
    owner: str,
    of_input_dtype: type[Exception],
    weights: Tensor,
    input: Tensor,
    state: dict[str, Tensor],
) -> Exception | None:
    """Returns what an operator finds wrong with layout, device or dtype of input and state.

    The modules look where it costs nothing: while a graph is made, and after the operator has
    raised. The operator's words serve for resets and batch_sizes, which have the same names there.
    """
    for name, tensor in {"input": input, **state}.items():
        other, like = (weights, "the parameters") if tensor is input else (input, "input")
        if tensor.layout != torch.strided:
            return RuntimeError(_not_dense(owner, name, f"layout {tensor.layout}"))
        if tensor.device != other.device:
            return RuntimeError(
                f"{owner}: expected {name} to be on the device of {like}, {other.device}, "
                f"but got {tensor.device}"
            )
        if tensor.dtype != other.dtype and not _are_cast(tensor, other):
            return (of_input_dtype if tensor is input else RuntimeError)(
                f"{owner}: expected {name} to have the dtype of {like}, {other.dtype}, "
                f"but got {tensor.dtype}"
            )
    return None


def _are_cast(*tensors: Tensor) -> bool:
    """Whether autocast gives them one dtype."""
    device = tensors[0].device.type
    # is_autocast_available would tell that meta has no autocast, but Dynamo of torch 2.11 cannot
    # trace it.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return False
    return all(t.is_floating_point() and t.dtype != torch.float64 for t in tensors)


def check_resets(resets: Tensor, names: str, expected: List[int]) -> None:  # noqa: UP006
    if is_tracing():
        fit = resets.dim() == len(expected)
    elif torch.compiler.is_compiling():
        fit = may_have_shape(resets, expected)
    else:
        fit = list(resets.shape) == expected
    if not fit:
        raise RuntimeError(
            f"lltm_ops.LLTM: expected resets to have shape {names} = {expected}, "
            f"but got {list(resets.shape)}"
        )


def check_states(
    hx: Tuple[Tensor, Tensor],  # noqa: UP006
    expected: List[int],  # noqa: UP006
    batch_is_known: bool = True,
) -> None:
    h_0, c_0 = hx
    if is_tracing():
        # Sizes are tensors while tracing; the number of unbound tensors is an int.
        fit = len(h_0.unbind()) == expected[0] == len(c_0.unbind())
    elif torch.compiler.is_compiling():
        fit = may_have_shape(h_0, expected) and may_have_shape(c_0, expected)
    else:
        fit = list(h_0.shape) == expected == list(c_0.shape)
    if not fit:
        names = "batch, hidden_size" if len(expected) == 3 else "hidden_size"
        sizes = f"{expected}"
        if not batch_is_known:
            sizes = f"[{expected[0]}, batch, {expected[-1]}]"
        raise RuntimeError(
            "lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, "
            f"{names}] = {sizes}, but got {list(h_0.shape)} and {list(c_0.shape)}"
        )


def is_tracing() -> bool:
    """Whether torch.jit.trace runs. Sizes are tensors then, and become constants as ints."""
    return torch.jit.is_tracing()  # type: ignore


def in_a_graph() -> bool:
    """Whether a graph is made that must be right for other sizes, too."""
    return torch.compiler.is_compiling() or is_tracing()


def may_differ(size: int) -> bool:
    """Whether a graph is made that must be right for other values of this size, too."""
    if torch.compiler.is_compiling():
        return not _is_fixed(size)
    return is_tracing()


@torch.jit.unused
def _is_fixed(size: int) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size)


@torch.jit.unused
def may_have_shape(tensor: Tensor, shape: List[int]) -> bool:  # noqa: UP006
    """Whether a compiler, which may not know sizes, leaves it open that these are the tensor's."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return len(tensor.shape) == len(shape) and all(
        guard_or_true(size == other) for size, other in zip(tensor.shape, shape, strict=True)
    )


@torch.jit.unused
def refuse_hx(owner: str, names: str, hx: Any) -> None:
    found = _type_of(hx)
    if isinstance(hx, (tuple, list)):
        found = f"a {found} of {len(hx)}"
    raise TypeError(f"{owner}: expected hx to be a tuple {names} of two tensors, but got {found}")


def _type_of(value: Any) -> str:
    return "None" if value is None else type(value).__name__
