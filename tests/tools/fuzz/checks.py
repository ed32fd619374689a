"""Runs a case, and checks all that is promised of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import NUMBERS, composite, names_of
from torch import Tensor

from . import reference
from .arguments import Maker
from .cases import Case
from .reference import Bounded, exactly


class Fault(AssertionError):
    """A promise that was broken, and how."""

    def __init__(self, check: str, message: str):
        super().__init__(f"{check}: {message}")
        self.check = check


@dataclass
class Outcome:
    """How many cases ran, what comparing their elements showed, and what was wrong."""

    cases: int = 0
    elements: int = 0
    undecided: int = 0
    failure: str = ""

    def add(self, other: Outcome) -> None:
        self.cases += other.cases
        self.elements += other.elements
        self.undecided += other.undecided
        self.failure = self.failure or other.failure


# These tensors of sequences have a row for each row of the input.
OF_ROWS = ("grad_output", "grad_cells", "output", "cells", "gates", "input")


def maker_of(case: Case) -> Maker:
    return Maker(getattr(torch, case.dtype), case.values, list(case.layouts), case.seed)


def batch_sizes(case: Case) -> list[int]:
    lengths = (case.time,) * case.batch if case.lengths is None else case.lengths
    return [sum(length > t for length in lengths) for t in range(case.time)]


def rows_of(case: Case) -> tuple[int, ...]:
    """The sizes of a sequence but the last."""
    return (case.time, case.batch) if case.lengths is None else (sum(case.lengths),)


def as_rows(case: Case, tensor: Tensor) -> Tensor:
    return tensor.flatten(0, len(rows_of(case)) - 1)


def as_given(case: Case, rows: Bounded) -> Bounded:
    return rows.map(lambda t: t.unflatten(0, rows_of(case)))


def arguments_of(case: Case, make: Maker) -> list[Any]:
    f, s = case.features, case.state
    is_sequence = case.call.startswith(("sequence", "_sequence"))
    rows = rows_of(case) if is_sequence else (case.batch,)
    input = make.tensor("input", *rows, f)
    weights = make.tensor("weights", 3 * s, s + f)
    if case.call.endswith("backward"):
        arguments = [make.tensor("grad", *rows, s) for _ in range(2)]
        if is_sequence:
            arguments += [make.tensor("grad", case.batch, s) for _ in range(2)]
            arguments.append(make.tensor("state", *rows, s))
        arguments += [make.tensor("state", *rows, s), make.tensor("gates", *rows, 3 * s)]
        arguments += [input, weights, make.tensor("state", case.batch, s)]
    else:
        arguments = [input, weights, make.tensor("bias", 3 * s)]
        arguments += [make.tensor("state", case.batch, s) for _ in range(2)]
    if case.special is not None:
        make.put_special(case.special, arguments)
    if is_sequence:
        sizes = None if case.lengths is None else make.integers(batch_sizes(case))
        arguments += [sizes, case.reverse, make.booleans(*rows) if case.resets else None]
    arguments += NUMBERS
    if case.call.endswith("backward"):
        arguments.append(list(case.output_mask))
    return arguments


def expected_of(case: Case, arguments: list[Any]) -> list[Bounded]:
    of = reference.Arithmetic(getattr(torch, case.dtype), *NUMBERS)
    if case.call in ("forward", "_forward_with_gates"):
        return list(reference.forward(of, *map(exactly, arguments[:5])))
    if case.call == "backward":
        return list(reference.backward(of, *map(exactly, arguments[:7])))
    given = dict(zip(names_of(case.call), arguments, strict=False))
    resets = given["resets"]
    exact = [
        exactly(as_rows(case, t) if name in OF_ROWS else t)
        for name, t in given.items()
        if isinstance(t, Tensor) and t.is_floating_point()
    ]
    resets = None if resets is None else as_rows(case, resets)
    run = reference.Run(batch_sizes(case), case.reverse, resets)
    if case.call == "sequence_backward":
        d_input, *others = reference.sequence_backward(of, run, *exact)
        return [as_given(case, d_input), *others]
    output, cells, h_n, c_n, gates = reference.sequence_forward(of, run, *exact)
    results = [as_given(case, output), as_given(case, cells), h_n, c_n, as_given(case, gates)]
    return results[: len(results) - (case.call == "sequence_forward")]


def call_operator(
    case: Case, name: str, arguments: list[Any], threads: int | None = None
) -> list[Tensor | None]:
    op = getattr(torch.ops.lltm, name)
    torch.set_num_threads(threads or case.threads)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=case.onednn, allow_tf32=None):
        results = (composite(op) if case.composite else op)(*arguments)
    torch.set_num_threads(1)  # for the reference
    return list(results)


def run_case(case: Case, outcome: Outcome) -> None:
    """Raises Fault."""
    make = maker_of(case)
    arguments = arguments_of(case, make)
    make.watch()
    expected = expected_of(case, arguments)
    results = call_operator(case, case.call, arguments)
    check_unchanged(make)
    mask = case.output_mask if case.call.endswith("backward") else (True,) * len(results)
    if [result is not None for result in results] != list(mask):
        raise Fault("mask", f"expected {mask}, but got {[r is not None for r in results]}")
    wanted = {f"result {i}": result for i, result in enumerate(results) if result is not None}
    for name, tensor in wanted.items():
        if not tensor.is_contiguous():
            raise Fault("contiguous", f"{name} has strides {tensor.stride()}")
    check_fresh(make, list(wanted.values()))
    check_meta(case, arguments, results)
    # The reference returns gates, too, which an operator may keep to itself.
    exact = [e for e, is_wanted in zip(expected, mask, strict=False) if is_wanted]
    for (name, tensor), bounded in zip(wanted.items(), exact, strict=True):
        check_value(case, outcome, name, tensor, bounded)
    check_same("repeated", results, call_operator(case, case.call, arguments))
    check_unchanged(make)
    if case.call in ("forward", "sequence_forward") and not case.composite:
        twin = f"_{case.call}_with_gates"
        check_same("with gates", results, call_operator(case, twin, arguments)[:-1])
    if case.composite:
        return
    copies = [
        a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a
        for a in arguments
    ]
    check_same("strides", results, call_operator(case, case.call, copies))
    other = 1 + case.threads % 4
    check_same("threads", results, call_operator(case, case.call, arguments, other))


def check_value(case: Case, outcome: Outcome, name: str, tensor: Tensor, exact: Bounded) -> None:
    if tensor.dtype != getattr(torch, case.dtype):
        raise Fault("dtype", f"{name} has {tensor.dtype}")
    if tensor.shape != exact.value.shape:
        raise Fault("shape", f"{name}: expected {exact.value.shape}, but got {tensor.shape}")
    value = tensor.detach().to(torch.float64)
    undecided = exact.undecided
    special = ~exact.value.isfinite()
    difference = (value - exact.value).abs()
    # Bounds are rounded, too.
    within = difference <= exact.error * (1 + 1e-6)
    same_special = (value == exact.value) | (value.isnan() & exact.value.isnan())
    right = undecided | torch.where(special, same_special, within)
    outcome.elements += value.numel()
    outcome.undecided += int(undecided.sum())
    if not right.all():
        place = tuple((~right).nonzero()[0].tolist())
        raise Fault(
            "value",
            f"{name}{list(place)} of {int((~right).sum())} elements: expected "
            f"{exact.value[place].item()} within {exact.error[place].item():.3g}, but got "
            f"{value[place].item()}",
        )


def check_same(check: str, first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> None:
    """Bit by bit, but that nan may be any."""
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        if a is None or b is None:
            if a is not b:
                raise Fault(check, f"result {i} is None once")
            continue
        a, b = a.detach(), b.detach()
        same = (a == b) & (a.signbit() == b.signbit())
        same = same | (a.isnan() & b.isnan())
        if a.shape != b.shape or not same.all():
            place = tuple((~same).nonzero()[0].tolist())
            raise Fault(
                check, f"result {i}{list(place)} is {a[place].item()}, and then {b[place].item()}"
            )


def check_unchanged(make: Maker) -> None:
    if make.changed():
        raise Fault("unchanged", "an argument, or the storage around it, was written to")


def check_fresh(make: Maker, results: Sequence[Tensor]) -> None:
    def extent(tensor: Tensor) -> tuple[int, int]:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    extents = [extent(storage) for storage, _ in make.storages]
    for i, result in enumerate(results):
        if result.numel() == 0:
            continue
        begin, end = extent(result)
        if any(begin < other_end and other_begin < end for other_begin, other_end in extents):
            raise Fault("fresh", f"result {i} shares memory with an argument or another result")
        extents.append((begin, end))


def check_meta(case: Case, arguments: list[Any], results: Sequence[Tensor | None]) -> None:
    def to_meta(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        return torch.empty_strided(
            argument.shape, argument.stride(), dtype=argument.dtype, device="meta"
        )

    op: Callable[..., Any] = getattr(torch.ops.lltm, case.call)
    for i, (meta, real) in enumerate(zip(op(*map(to_meta, arguments)), results, strict=True)):
        # All are contiguous: strides where the size is 1 mean nothing, and may differ.
        described = [
            None if t is None else (t.dtype, tuple(t.shape), t.is_contiguous())
            for t in (meta, real)
        ]
        if described[0] != described[1]:
            raise Fault("meta", f"result {i} is {described[0]}, on the device {described[1]}")
