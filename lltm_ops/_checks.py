"""What the modules refuse before or after they call an operator, in the words of their users."""

import numbers
import operator
from typing import Any, Tuple  # noqa: UP035

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
    """For what the modules read or reshape before an operator can refuse it."""
    # TorchScript leaves this condition out, because there the value is always a tensor.
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner}: expected {name} to be {expected}, but got {_type_of(value)}")
    if value.is_nested or value.layout != torch.strided:
        found = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise RuntimeError(f"{owner}: expected {name} to be a dense tensor, but got {found}")


def check_hx(
    owner: str,
    names: Tuple[str, str],  # noqa: UP006
    hx: Tuple[Tensor, Tensor],  # noqa: UP006
    dims: int,
) -> None:
    if not isinstance(hx, (tuple, list)) or len(hx) != 2:
        _refuse_hx(owner, names, hx)
    check_tensor(owner, names[0], hx[0])
    check_tensor(owner, names[1], hx[1])
    if hx[0].dim() != dims or hx[1].dim() != dims:
        raise RuntimeError(
            f"{owner}: expected {names[0]} and {names[1]} to have {dims} dimensions for this "
            f"input, but got {hx[0].dim()} and {hx[1].dim()}"
        )


@torch.jit.unused
def _refuse_hx(owner: str, names: Tuple[str, str], hx: Any) -> None:  # noqa: UP006
    found = f"a {_type_of(hx)} of {len(hx)}" if isinstance(hx, (tuple, list)) else _type_of(hx)
    raise TypeError(
        f"{owner}: expected hx to be a tuple ({', '.join(names)}) of two tensors, but got {found}"
    )


class _MissingInLSTM(str):
    """A missing key that says why in the message of load_state_dict, and else is any other key.

    To append to error_msgs would raise with strict=False, too: a module is not told of it.
    """

    def __format__(self, _: str) -> str:
        return f"{self!s} (the weights of nn.LSTM or nn.GRU cannot become those of an LLTM)"


def explain_missing_keys(
    state_dict: dict[str, Any], missing_keys: list[str], ours: str, theirs: str
) -> None:
    """Says why a checkpoint of nn.LSTM, which has the key theirs, does not have ours."""
    if theirs in state_dict:
        missing_keys[:] = [_MissingInLSTM(key) if key == ours else key for key in missing_keys]


def is_tracing() -> bool:
    """Whether torch.jit.trace runs. Sizes are tensors then, and become constants as ints."""
    return torch.jit.is_tracing()  # type: ignore


def in_a_graph() -> bool:
    """Whether a graph is made that must be right for other sizes, too."""
    return torch.compiler.is_compiling() or is_tracing()


def _type_of(value: Any) -> str:
    return "None" if value is None else type(value).__name__
