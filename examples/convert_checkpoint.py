"""Converts a checkpoint of the C++ extension tutorial's LLTM to the names of LLTM or LLTMCell.

The tutorial's module has parameters ``weights`` and ``bias``. Wherever a state_dict has the two,
under any prefix, they become those of ``lltm_ops.LLTM`` (``weights_l0``, ``bias_l0``) or, with
``--to cell``, of ``lltm_ops.LLTMCell`` (the same names, the bias with one dimension). Everything
else is kept as it is.
"""

import argparse
import copy
import io
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUFFIXES = {"cell": "", "layer": "_l0"}


class UsageError(Exception):
    """Something the user gave cannot be used: the message says what, in one sentence."""


def read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:
        raise UsageError(
            f"{path} is not a file that torch.load reads with weights_only=True: expected a "
            "state_dict, written by torch.save(model.state_dict(), ...)"
        ) from error
    if not isinstance(state, dict):
        raise UsageError(f"{path}: expected a state_dict, but got {type(state).__name__}")
    for name, value in state.items():
        named = isinstance(name, str)
        if not named or not (isinstance(value, Tensor) or name.endswith("_extra_state")):
            raise UsageError(
                f"{path}: expected a state_dict, which maps names to tensors, but got "
                f"{type(value).__name__} for {name!r}"
            )
    return state


def what_hinders(weights: Tensor, bias: Tensor) -> str:
    """Why these cannot be the parameters of an LLTM; empty if they can."""
    for name, tensor in (("weights", weights), ("bias", bias)):
        dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
        if not (dense and tensor.is_floating_point() and tensor.dtype == weights.dtype):
            expected = "weights and bias that are dense, of one floating point dtype"
            return f"expected {expected}, but got {name} of {tensor.dtype} and {tensor.layout}"
    if (
        weights.dim() != 2
        or weights.size(0) == 0
        or weights.size(0) % 3
        or weights.size(1) < weights.size(0) // 3
    ):
        expected = "weights of shape [3 * state_size, state_size + input_features]"
        return f"expected {expected}, but got {list(weights.shape)}"
    rows = weights.size(0)
    if bias.shape not in ((rows,), (1, rows)):
        return f"expected bias of shape [{rows}] or [1, {rows}], but got {list(bias.shape)}"
    return ""


def prefixes_of_lltms(state: dict[str, Any], path: Path, asked: list[str] | None) -> list[str]:
    """Those asked for, which have to be LLTMs; if none were, those that can be LLTMs."""
    suffix = "weights"
    candidates = [name[: -len(suffix)] for name in state if name.rpartition(".")[2] == suffix]
    candidates = [prefix for prefix in candidates if f"{prefix}bias" in state]
    reasons = {p: what_hinders(state[f"{p}weights"], state[f"{p}bias"]) for p in candidates}
    for prefix in asked or []:
        if prefix not in reasons:
            raise UsageError(
                f"{path}: expected {prefix}weights and {prefix}bias, but got such names only "
                f"with the prefixes {list(reasons)}"
            )
        if reasons[prefix]:
            raise UsageError(f"{path}: for --prefix {prefix!r}, {reasons[prefix]}")
    found = asked or [prefix for prefix, reason in reasons.items() if not reason]
    if not found:
        raise UsageError(
            f"{path} holds no LLTM: "
            + (next(iter(reasons.values()), "") or "expected parameters named weights and bias")
        )
    return found


def new_names(
    state: dict[str, Any], path: Path, to: str, asked: list[str] | None = None
) -> dict[str, str]:
    """What the parameters of the LLTMs are to be called."""
    names = {}
    for prefix in prefixes_of_lltms(state, path, asked):
        for name in ("weights", "bias"):
            names[f"{prefix}{name}"] = f"{prefix}{name}{SUFFIXES[to]}"
    for old, new in names.items():
        if new != old and new in state:
            raise UsageError(f"{path}: {old} would become {new}, which is there already")
    return names


def converted(state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The state_dict under its new names, in the same order."""
    result = copy.copy(state)  # with the versions of its modules, an attribute
    result.clear()
    for name, value in state.items():
        is_bias = name in names and name.endswith("bias")
        result[names.get(name, name)] = value.flatten() if is_bias else value
    return result


def write(state: dict[str, Any], path: Path) -> None:
    """Only where there is no file, so that the one that was read cannot be lost."""
    data = io.BytesIO()
    torch.save(state, data)
    try:
        with path.open("xb") as file:
            try:
                file.write(data.getbuffer())
                file.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError as error:
        raise UsageError(f"{path} exists already: expected the name of a new file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write {path}: {reason}") from error


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", help="a state_dict, as torch.save wrote it", type=Path)
    parser.add_argument("output", help="a new file", type=Path)
    parser.add_argument("--to", help="whose names (%(default)s)", choices=SUFFIXES, default="layer")
    parser.add_argument(
        "--prefix",
        help="of an LLTM's parameters, as in rnn.weights; if not given, all LLTMs are converted",
        metavar="rnn.",
        action="append",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = command_line()
    args = parser.parse_args(argv)
    try:
        state = read(args.input)
        names = new_names(state, args.input, args.to, args.prefix)
        result = converted(state, names)
        write(result, args.output)
    except UsageError as error:
        parser.error(str(error))
    for old, new in names.items():
        print(f"{old} {list(state[old].shape)} -> {new} {list(result[new].shape)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
