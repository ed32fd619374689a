"""Runs a case, and checks all that is promised of its results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import composite
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

import lltm_ops

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
class Statistics:
    """What comparing elements with the reference showed."""

    elements: int = 0
    undecided: int = 0
    # The largest error, in units of its bound.
    worst: float = 0.0


def run_case(case: Case, statistics: Statistics, threads_matter: bool = False) -> None:
    """Raises Fault.

    threads_matter: products come from the BLAS, whose rounding depends on how they are divided.
    """
    if case.call == "LLTMCell":
        check_cell(case, statistics)
    elif case.call == "LLTM":
        check_layer(case, statistics)
    else:
        check_operator(case, statistics, threads_matter)


@contextlib.contextmanager
def setting(case: Case, threads: int | None = None) -> Iterator[None]:
    """For what is tested; the reference runs on one thread."""
    torch.set_num_threads(case.threads if threads is None else threads)
    try:
        with torch.backends.mkldnn.flags(enabled=case.onednn, allow_tf32=None):
            yield
    finally:
        torch.set_num_threads(1)


def maker_of(case: Case) -> Maker:
    return Maker(getattr(torch, case.dtype), case.values, list(case.layouts), case.seed)


def arithmetic_of(case: Case) -> reference.Arithmetic:
    return reference.Arithmetic(getattr(torch, case.dtype), case.composite)


# -- Sequences -------------------------------------------------------------------------------------


def batch_sizes(case: Case) -> list[int]:
    lengths = (case.time,) * case.batch if case.lengths is None else case.lengths
    return [sum(length > t for length in lengths) for t in range(case.time)]


def rows_of(case: Case) -> tuple[int, ...]:
    """The sizes of a sequence but the last, where time comes first."""
    if case.form == "unbatched":
        return (case.time,)
    return (case.time, case.batch) if case.lengths is None else (sum(case.lengths),)


def as_rows(case: Case, tensor: Tensor) -> Tensor:
    if case.form == "batch_first":
        tensor = tensor.transpose(0, 1)
    return tensor.flatten(0, len(rows_of(case)) - 1)


def as_given(case: Case, rows: Bounded) -> Bounded:
    given = rows.map(lambda t: t.unflatten(0, rows_of(case)))
    return given.map(lambda t: t.transpose(0, 1)) if case.form == "batch_first" else given


# -- Operators -------------------------------------------------------------------------------------


def arguments_of(case: Case, make: Maker) -> list[Any]:
    f, s = case.features, case.state
    is_sequence = case.call.startswith(("sequence", "_sequence"))
    rows = rows_of(case) if is_sequence else (case.batch,)
    input = make.tensor("input", *rows, f)
    weights = make.tensor("weights", 3 * s, s + f)
    if case.call.endswith("backward"):
        arguments = [make.tensor("grad", *rows, s) for _ in range(2)]
        if is_sequence:
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
    if case.call.endswith("backward"):
        arguments.append(list(case.output_mask))
    return arguments


def expected_of(case: Case, arguments: list[Any]) -> list[Bounded]:
    of = arithmetic_of(case)
    if case.call in ("forward", "_forward_with_gates"):
        return list(reference.forward(of, *map(exactly, arguments)))
    if case.call == "backward":
        return list(reference.backward(of, *map(exactly, arguments[:7])))
    is_backward = case.call == "sequence_backward"
    tensors, resets = arguments[: 8 if is_backward else 5], arguments[10 if is_backward else 7]
    of_rows = 6 if is_backward else 1
    exact = [exactly(as_rows(case, t)) for t in tensors[:of_rows]]
    exact += map(exactly, tensors[of_rows:])
    resets = None if resets is None else as_rows(case, resets)
    run = reference.Run(batch_sizes(case), case.reverse, resets)
    if is_backward:
        d_input, *others = reference.sequence_backward(of, run, *exact)
        return [as_given(case, d_input), *others]
    return [as_given(case, result) for result in reference.sequence_forward(of, run, *exact)]


def call_operator(
    case: Case, name: str, arguments: list[Any], threads: int | None = None
) -> list[Tensor | None]:
    op = getattr(torch.ops.lltm, name)
    with torch.no_grad(), setting(case, threads):
        return list((composite(op) if case.composite else op)(*arguments))


def check_operator(case: Case, statistics: Statistics, threads_matter: bool) -> None:
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
        check_value(case, statistics, name, tensor, bounded)
    check_same("repeated", results, call_operator(case, case.call, arguments))
    check_unchanged(make)
    if case.call in ("forward", "sequence_forward"):
        twin = f"_{case.call}_with_gates"
        check_same("with gates", results, call_operator(case, twin, arguments)[:2])
    if case.composite:
        return
    copies = [
        a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a
        for a in arguments
    ]
    check_same("strides", results, call_operator(case, case.call, copies))
    if not threads_matter and case.onednn:
        other = 1 + case.threads % 4
        check_same("threads", results, call_operator(case, case.call, arguments, other))


# -- Modules ---------------------------------------------------------------------------------------


def tensors_of(
    case: Case, make: Maker, module: torch.nn.Module, input: tuple[int, ...], **states: Any
) -> dict[str, Tensor]:
    """Input, parameters and states, of these sizes, by name. The module gets the parameters.

    They require gradients if any result is differentiated.
    """
    parameters = dict(module.named_parameters())
    named = {"input": make.tensor("input", *input)}
    for name, parameter in parameters.items():
        named[name] = make.tensor(name.split("_")[0], *parameter.shape)
    for name, sizes in states.items():
        if case.gives_hx:
            named[name] = make.tensor("state", *sizes)
    if case.special is not None:
        make.put_special(case.special, list(named.values()))
    requires_grad = any(case.differentiated)
    for name, tensor in named.items():
        named[name] = tensor.detach().requires_grad_(requires_grad)
        if name in parameters:
            named[name] = torch.nn.Parameter(named[name], requires_grad)
            setattr(module, name, named[name])
    return named


def gradients(
    case: Case, make: Maker, outputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(the gradients of outputs, zeros for those that are not differentiated; those of leaves)."""
    grads = [make.tensor("grad", *output.shape) for output in outputs]
    make.watch()
    used = [d for d, _ in zip(case.differentiated, outputs, strict=False)]
    used = used if any(used) else [True] * len(outputs)
    grads = [g if is_used else torch.zeros_like(g) for g, is_used in zip(grads, used, strict=True)]
    roots = [i for i, output in enumerate(outputs) if used[i] and output.requires_grad]
    if not roots:
        return grads, [None] * len(leaves)
    with setting(case):
        results = torch.autograd.grad(
            [outputs[i] for i in roots], leaves, [grads[i] for i in roots], allow_unused=True
        )
    return grads, list(results)


def check_gradients(
    case: Case,
    statistics: Statistics,
    names: Sequence[str],
    actual: Sequence[Tensor | None],
    expected: Sequence[Bounded],
) -> None:
    for name, tensor, exact in zip(names, actual, expected, strict=True):
        if tensor is not None:
            check_value(case, statistics, f"gradient of {name}", tensor, exact)
        elif exact.value.any() or exact.error.any():
            raise Fault("gradient", f"{name} has none")


def check_cell(case: Case, statistics: Statistics) -> None:
    make = maker_of(case)
    unbatched = case.form == "unbatched"
    batch = () if unbatched else (case.batch,)
    f, s = case.features, case.state
    module = lltm_ops.LLTMCell(f, s, bias=case.bias, dtype=make.dtype)
    named = tensors_of(case, make, module, (*batch, f), h=(*batch, s), c=(*batch, s))
    hx = (named["h"], named["c"]) if case.gives_hx else None
    make.watch()

    def call() -> tuple[Tensor, Tensor]:
        with setting(case):
            return module(named["input"], hx)

    def rows(tensor: Tensor) -> Bounded:
        return exactly(tensor[None] if unbatched else tensor)

    def as_given(exact: Bounded) -> Bounded:
        return exact[0] if unbatched else exact

    outputs = call()
    check_unchanged(make)
    check_fresh(make, outputs)
    of, weights = arithmetic_of(case), exactly(module.weights)
    zeros = torch.zeros(*batch, s, dtype=make.dtype)
    h, c = hx if hx is not None else (zeros, zeros)
    bias = named.get("bias", torch.zeros(3 * s, dtype=make.dtype))
    exact_input, exact_h, exact_c = map(rows, (named["input"], h, c))
    new_h, new_c, gates = reference.forward(
        of, exact_input, weights, exactly(bias), exact_h, exact_c
    )
    check_value(case, statistics, "h", outputs[0], as_given(new_h))
    check_value(case, statistics, "c", outputs[1], as_given(new_c))
    if not unbatched:
        with setting(case):
            same = torch.ops.lltm.forward(named["input"], module.weights, bias, h, c)
        check_same("operator", outputs, same)
    with torch.no_grad():
        check_same("inference", outputs, call())
    if not any(case.differentiated):
        return
    grads, results = gradients(case, make, outputs, list(named.values()))
    check_unchanged(make)
    d_input, d_weights, d_bias, d_h, d_c = reference.backward(
        of, *map(rows, grads), new_c, gates, exact_input, weights, exact_h
    )
    expected = {"weights": d_weights, "bias": d_bias, "input": as_given(d_input)}
    expected |= {"h": as_given(d_h), "c": as_given(d_c)}
    check_gradients(case, statistics, list(named), results, [expected[name] for name in named])


class LayerCall:
    """A layer and its arguments."""

    def __init__(self, case: Case, make: Maker):
        self.case = case
        self.module = lltm_ops.LLTM(
            case.features,
            case.state,
            case.layers,
            bias=case.bias,
            batch_first=case.form == "batch_first",
            bidirectional=case.bidirectional,
            dtype=make.dtype,
            return_cells=case.return_cells,
        )
        batch = () if case.form == "unbatched" else (case.batch,)
        state = (case.layers * (2 if case.bidirectional else 1), *batch, case.state)
        rows = rows_of(case)[::-1] if case.form == "batch_first" else rows_of(case)
        self.named = tensors_of(
            case, make, self.module, (*rows, case.features), h_0=state, c_0=state
        )
        self.resets = make.booleans(*rows) if case.resets else None
        self.batch_sizes = None if case.lengths is None else make.integers(batch_sizes(case))
        # Packed sequences begin with the longest.
        lengths = torch.tensor([-length for length in case.lengths or (0,) * case.batch])
        self.order = torch.argsort(lengths, stable=True)

    def __call__(self) -> list[Tensor]:
        """output, h_n, c_n and perhaps cells."""
        case, input = self.case, self.named["input"]
        hx = (self.named["h_0"], self.named["c_0"]) if case.gives_hx else None
        if case.form == "packed":
            is_sorted = torch.equal(self.order, torch.arange(case.batch))
            order = () if is_sorted else (self.order, torch.argsort(self.order))
            packed = PackedSequence(input, self.batch_sizes, *order)
            output, state, *cells = self.module(packed, hx, self.resets)
            return [output.data, *state, *(c.data for c in cells)]
        more = (self.batch_sizes,) if case.form == "batch_sizes" else ()
        output, state, *cells = self.module(input, hx, self.resets, *more)
        return [output, *state, *cells]

    def rows(self, tensor: Tensor) -> Bounded:
        return exactly(as_rows(self.case, tensor))

    def state(self, tensor: Tensor) -> Bounded:
        if self.case.form == "unbatched":
            return exactly(tensor.unsqueeze(1))
        return exactly(tensor[:, self.order])

    def state_as_given(self, exact: Bounded) -> Bounded:
        if self.case.form == "unbatched":
            return exact[:, 0]
        return exact[:, torch.argsort(self.order)]

    def reference(self) -> reference.Layers:
        case = self.case
        sizes = batch_sizes(case)
        resets = None if self.resets is None else as_rows(case, self.resets)
        runs = [reference.Run(sizes, False, resets)]
        if case.bidirectional:
            backwards = None
            if resets is not None:
                # An episode that begins at a step ends, and backwards begins, at the one before.
                backwards = torch.zeros_like(resets)
                for (_, rows), (n, following) in itertools.pairwise(runs[0].steps()):
                    backwards[rows][:n] = resets[following]
            runs.append(reference.Run(sizes, True, backwards))
        no_bias = torch.zeros(3 * case.state)
        parameters = [
            (
                exactly(self.named[f"weights_{name}"]),
                exactly(self.named.get(f"bias_{name}", no_bias)),
            )
            for layer in range(case.layers)
            for name in (f"l{layer}", f"l{layer}_reverse")[: len(runs)]
        ]
        return reference.Layers(arithmetic_of(case), runs, parameters)


def check_layer(case: Case, statistics: Statistics) -> None:
    make = maker_of(case)
    call = LayerCall(case, make)
    make.watch()
    with setting(case):
        outputs = call()
    check_unchanged(make)
    check_fresh(make, outputs)
    layers = call.reference()
    size = (len(layers.parameters), case.batch, case.state)
    h_0, c_0 = (
        call.state(call.named[name]) if case.gives_hx else reference.zeros(*size)
        for name in ("h_0", "c_0")
    )
    output, h_n, c_n, cells = layers.forward(call.rows(call.named["input"]), h_0, c_0)
    expected = {"output": as_given(case, output), "h_n": call.state_as_given(h_n)}
    expected |= {"c_n": call.state_as_given(c_n), "cells": as_given(case, cells)}
    for result, (name, exact) in zip(outputs, expected.items(), strict=False):
        check_value(case, statistics, name, result, exact)
    with torch.no_grad(), setting(case):
        check_same("inference", outputs, call())
    if not any(case.differentiated):
        return
    grads, results = gradients(case, make, outputs, list(call.named.values()))
    check_unchanged(make)
    if len(grads) == 3:
        grads.append(torch.zeros_like(grads[0]))
    d_input, d_parameters, d_h_0, d_c_0 = layers.backward(
        call.rows(grads[0]), call.state(grads[1]), call.state(grads[2]), call.rows(grads[3])
    )
    exact = [as_given(case, d_input)]
    for d_weights, d_bias in d_parameters:
        exact += [d_weights, d_bias] if case.bias else [d_weights]
    if case.gives_hx:
        exact += [call.state_as_given(d_h_0), call.state_as_given(d_c_0)]
    check_gradients(case, statistics, list(call.named), results, exact)


# -- Checks ----------------------------------------------------------------------------------------


def check_value(
    case: Case, statistics: Statistics, name: str, tensor: Tensor, exact: Bounded
) -> None:
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
    statistics.elements += value.numel()
    statistics.undecided += int(undecided.sum())
    if not right.all():
        place = tuple((~right).nonzero()[0].tolist())
        raise Fault(
            "value",
            f"{name}{list(place)} of {int((~right).sum())} elements: expected "
            f"{exact.value[place].item()} within {exact.error[place].item():.3g}, but got "
            f"{value[place].item()}",
        )
    compared = ~(undecided | special) & (exact.error > 0)
    if compared.any():
        ratio = (difference[compared] / exact.error[compared]).max().item()
        statistics.worst = max(statistics.worst, ratio)


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
