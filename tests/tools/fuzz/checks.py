"""Runs a case, and checks all that is promised of its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

import lltm_ops

from . import reference
from .arguments import Maker
from .cases import Case
from .reference import Bounded, exactly

# A device that this build has no kernels for: its entry of the dispatch table is the composite one.
COMPOSITE = torch._C.DispatchKeySet(torch._C.DispatchKey.XPU)


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


# -- Packing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """The rows of packed data have these places in [time, batch]."""

    batch_sizes: list[int]
    places: tuple[Tensor, Tensor]
    order: Tensor  # of the sequences, the longest first

    @staticmethod
    def of(lengths: Sequence[int], time: int) -> Packing:
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        places = [(t, row) for t in range(time) for row in order if lengths[row] > t]
        sizes = [sum(length > t for length in lengths) for t in range(time)]
        steps, rows = (torch.tensor([p[i] for p in places], dtype=torch.int64) for i in (0, 1))
        return Packing(sizes, (steps, rows), torch.tensor(order, dtype=torch.int64))

    def padded(self, rows: Tensor, time: int) -> Tensor:
        shape = (time, len(self.order), *rows.shape[1:])
        padded = torch.zeros(shape, dtype=rows.dtype)
        padded[self.places] = rows
        return padded


def rows_of(case: Case) -> tuple[int, ...]:
    """The sizes of a sequence but the last."""
    return (case.time, case.batch) if case.lengths is None else (sum(case.lengths),)


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
        packed = case.lengths is not None
        sizes = Packing.of(case.lengths, case.time).batch_sizes if packed else []
        arguments.append(make.integers(sizes) if packed else None)
        arguments.append(case.reverse)
        arguments.append(make.booleans(*rows) if case.resets else None)
    if case.call.endswith("backward"):
        arguments.append(list(case.output_mask))
    return arguments


def expected_of(case: Case, arguments: list[Any]) -> list[Bounded]:
    of = arithmetic_of(case)
    if case.call in ("forward", "_forward_with_gates"):
        results = reference.forward(of, *map(exactly, arguments))
        return list(results[: 2 if case.call == "forward" else 3])
    if case.call == "backward":
        return list(reference.backward(of, *map(exactly, arguments[:7])))
    return expected_of_sequence(of, case, arguments)


def expected_of_sequence(
    of: reference.Arithmetic, case: Case, arguments: list[Any]
) -> list[Bounded]:
    packing = None if case.lengths is None else Packing.of(case.lengths, case.time)

    def padded(rows: Tensor) -> Tensor:
        return rows if packing is None else packing.padded(rows, case.time)

    def as_given(result: Bounded) -> Bounded:
        return result if packing is None else result[packing.places]

    is_backward = case.call == "sequence_backward"
    count = 8 if is_backward else 5
    resets = arguments[count + 2]
    lengths = case.lengths if packing is not None else (case.time,) * case.batch
    run = reference.Run(
        case.time,
        torch.tensor(lengths, dtype=torch.int64),
        case.reverse,
        None if resets is None else padded(resets),
    )
    if is_backward:
        *with_rows, weights, h0 = arguments[:8]
        results = reference.sequence_backward(
            of, run, *(exactly(padded(t)) for t in with_rows), exactly(weights), exactly(h0)
        )
        return [as_given(results[0]), *results[1:]]
    input, *others = arguments[:5]
    results = reference.sequence_forward(of, run, exactly(padded(input)), *map(exactly, others))
    return [as_given(result) for result in results[: 2 if case.call == "sequence_forward" else 3]]


def call_operator(
    case: Case, name: str, arguments: list[Any], threads: int | None = None
) -> list[Tensor | None]:
    op = getattr(torch.ops.lltm, name).default
    with torch.no_grad(), setting(case, threads):
        results = op.redispatch(COMPOSITE, *arguments) if case.composite else op(*arguments)
    return list(results)


def check_operator(case: Case, statistics: Statistics, threads_matter: bool) -> None:
    make = maker_of(case)
    arguments = arguments_of(case, make)
    make.watch()
    expected = expected_of(case, arguments)
    results = call_operator(case, case.call, arguments)
    check_unchanged(make)
    mask = case.output_mask if case.call.endswith("backward") else (True,) * len(expected)
    if [result is not None for result in results] != list(mask):
        raise Fault("mask", f"expected {mask}, but got {[r is not None for r in results]}")
    names = [f"result {i}" for i, wanted in enumerate(mask) if wanted]
    tensors = [result for result in results if result is not None]
    wanted = [e for e, is_wanted in zip(expected, mask, strict=True) if is_wanted]
    for name, tensor in zip(names, tensors, strict=True):
        if not tensor.is_contiguous():
            raise Fault("contiguous", f"{name} has strides {tensor.stride()}")
    check_fresh(make, tensors)
    check_meta(case, arguments, results)
    check_values(case, names, tensors, wanted, statistics)
    again = call_operator(case, case.call, arguments)
    check_same("repeated", results, again)
    check_unchanged(make)
    twin = {
        "forward": "_forward_with_gates",
        "sequence_forward": "_sequence_forward_with_gates",
    }.get(case.call)
    if twin is not None:
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
    pairs = [
        (output, grad)
        for output, grad, is_used in zip(outputs, grads, used, strict=True)
        if is_used and output.requires_grad
    ]
    grads = [g if is_used else torch.zeros_like(g) for g, is_used in zip(grads, used, strict=True)]
    if not pairs:
        return grads, [None] * len(leaves)
    with setting(case):
        results = torch.autograd.grad(
            [output for output, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True
        )
    return grads, list(results)


def check_gradients(
    case: Case,
    names: Sequence[str],
    actual: Sequence[Tensor | None],
    expected: Sequence[Bounded],
    statistics: Statistics,
) -> None:
    for name, tensor, exact in zip(names, actual, expected, strict=True):
        if tensor is None:
            if exact.value.any() or exact.error.any():
                raise Fault("gradient", f"{name} has none")
        else:
            check_values(case, [f"gradient of {name}"], [tensor], [exact], statistics)


def check_cell(case: Case, statistics: Statistics) -> None:
    make = maker_of(case)
    batch = () if case.form == "unbatched" else (case.batch,)
    f, s = case.features, case.state
    module = lltm_ops.LLTMCell(f, s, bias=case.bias, dtype=make.dtype)
    named = tensors_of(case, make, module, (*batch, f), h=(*batch, s), c=(*batch, s))
    hx = (named["h"], named["c"]) if case.gives_hx else None
    make.watch()

    def call() -> tuple[Tensor, Tensor]:
        with setting(case):
            return module(named["input"], hx)

    outputs = call()
    check_unchanged(make)
    check_fresh(make, outputs)
    of = arithmetic_of(case)
    zeros = torch.zeros(*batch, s, dtype=make.dtype)
    h, c = hx if hx is not None else (zeros, zeros)
    bias = named.get("bias", torch.zeros(3 * s, dtype=make.dtype))
    rows = [exactly(t.reshape(case.batch, t.shape[-1])) for t in (named["input"], h, c)]
    exact_h, exact_cell, gates = reference.forward(
        of, rows[0], exactly(module.weights), exactly(bias), rows[1], rows[2]
    )
    shaped = [e.map(lambda t: t.reshape(*batch, s)) for e in (exact_h, exact_cell)]
    check_values(case, ["h", "c"], outputs, shaped, statistics)
    if case.form != "unbatched":
        with setting(case):
            same = torch.ops.lltm.forward(named["input"], module.weights, bias, h, c)
        check_same("operator", outputs, same)
    with torch.no_grad():
        check_same("inference", outputs, call())
    if not any(case.differentiated):
        return
    grads, results = gradients(case, make, outputs, list(named.values()))
    check_unchanged(make)
    expected = reference.backward(
        of,
        *(exactly(g).map(lambda t: t.reshape(case.batch, s)) for g in grads),
        exact_cell,
        gates,
        rows[0],
        exactly(module.weights),
        rows[1],
    )
    by_name = dict(zip(("input", "weights", "bias", "h", "c"), expected, strict=True))
    check_gradients(
        case,
        list(named),
        results,
        [by_name[n].map(lambda t, n=n: t.reshape(named[n].shape)) for n in named],
        statistics,
    )


class LayerCall:
    """A layer, its arguments, and how they and the results lie in [time, batch]."""

    def __init__(self, case: Case, make: Maker):
        self.case = case
        self.packing = None if case.lengths is None else Packing.of(case.lengths, case.time)
        directions = 2 if case.bidirectional else 1
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
        state = (case.layers * directions, *batch, case.state)
        input = (*self._rows(), case.features)
        self.named = tensors_of(case, make, self.module, input, h_0=state, c_0=state)
        self.resets = make.booleans(*self._rows()) if case.resets else None
        self.batch_sizes = None if self.packing is None else make.integers(self.packing.batch_sizes)

    def _rows(self) -> tuple[int, ...]:
        case = self.case
        rows = {"batch_first": (case.batch, case.time), "unbatched": (case.time,)}
        return rows.get(case.form, rows_of(case))

    def __call__(self) -> list[Tensor]:
        """output, h_n, c_n and perhaps cells."""
        case, input = self.case, self.named["input"]
        hx = (self.named["h_0"], self.named["c_0"]) if case.gives_hx else None
        if case.form == "packed":
            is_sorted = list(case.lengths) == sorted(case.lengths, reverse=True)
            order = None if is_sorted else self.packing.order
            inverse = None if is_sorted else torch.argsort(self.packing.order)
            packed = PackedSequence(input, self.batch_sizes, order, inverse)
            output, state, *cells = self.module(packed, hx, self.resets)
            return [output.data, *state, *(c.data for c in cells)]
        if case.form == "batch_sizes":
            output, state, *cells = self.module(input, hx, self.resets, self.batch_sizes)
        else:
            output, state, *cells = self.module(input, hx, self.resets)
        return [output, *state, *cells]

    def exact(self, tensor: Tensor) -> Bounded:
        """What has a row for each of input, [time, batch, ...]."""
        if self.case.form == "batch_first":
            tensor = tensor.transpose(0, 1)
        if self.case.form == "unbatched":
            tensor = tensor.unsqueeze(1)
        if self.packing is not None:
            tensor = self.packing.padded(tensor, self.case.time)
        return exactly(tensor)

    def as_given(self, exact: Bounded) -> Bounded:
        if self.case.form == "batch_first":
            return exact.map(lambda t: t.transpose(0, 1))
        if self.case.form == "unbatched":
            return exact.map(lambda t: t.squeeze(1))
        return exact if self.packing is None else exact[self.packing.places]

    def state(self, tensor: Tensor) -> Bounded:
        return exactly(tensor.unsqueeze(1) if self.case.form == "unbatched" else tensor)

    def state_as_given(self, exact: Bounded) -> Bounded:
        return exact.map(lambda t: t.squeeze(1)) if self.case.form == "unbatched" else exact

    def reference(self) -> reference.Layers:
        case = self.case
        lengths = (case.time,) * case.batch if case.lengths is None else case.lengths
        lengths = torch.tensor(lengths, dtype=torch.int64)
        resets = None
        if self.resets is not None:
            resets = self.exact(self.resets.to(torch.float64)).value != 0
        runs = [reference.Run(case.time, lengths, False, resets)]
        if case.bidirectional:
            backwards = None
            if resets is not None:
                # An episode that begins at a step ends, and backwards begins, at the one before.
                backwards = torch.zeros_like(resets)
                for t in range(case.time - 1):
                    backwards[t] = resets[t + 1] & (lengths > t + 1)
            runs.append(reference.Run(case.time, lengths, True, backwards))
        parameters = []
        for layer in range(case.layers):
            for direction in ("", "_reverse")[: len(runs)]:
                weights = exactly(self.named[f"weights_l{layer}{direction}"])
                bias = (
                    exactly(self.named[f"bias_l{layer}{direction}"])
                    if case.bias
                    else reference.zeros(3 * case.state)
                )
                parameters.append((weights, bias))
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
    exact = layers.forward(call.exact(call.named["input"]), h_0, c_0)
    expected = [
        call.as_given(exact[0]),
        *(call.state_as_given(state) for state in exact[1:3]),
        call.as_given(exact[3]),
    ]
    names = ["output", "h_n", "c_n", "cells"]
    check_values(case, names[: len(outputs)], outputs, expected[: len(outputs)], statistics)
    with torch.no_grad(), setting(case):
        check_same("inference", outputs, call())
    one = case.layers == 1 and not case.bidirectional
    if one and case.form == "padded" and case.time > 0:
        check_one_layer(call, outputs)
    if not any(case.differentiated):
        return
    grads, results = gradients(case, make, outputs, list(call.named.values()))
    check_unchanged(make)
    if len(grads) == 3:
        grads.append(torch.zeros_like(grads[0]))
    d_input, d_parameters, d_h_0, d_c_0 = layers.backward(
        call.exact(grads[0]), call.state(grads[1]), call.state(grads[2]), call.exact(grads[3])
    )
    expected = [call.as_given(d_input)]
    for d_weights, d_bias in d_parameters:
        expected += [d_weights, d_bias] if case.bias else [d_weights]
    if case.gives_hx:
        expected += [call.state_as_given(d_h_0), call.state_as_given(d_c_0)]
    check_gradients(case, list(call.named), results, expected, statistics)


def check_one_layer(call: LayerCall, outputs: list[Tensor]) -> None:
    """It is the operator."""
    case, named = call.case, call.named
    zeros = torch.zeros(1, case.batch, case.state, dtype=outputs[0].dtype)
    bias = named["bias_l0"] if case.bias else outputs[0].new_zeros(3 * case.state)
    with setting(case):
        output, cells = torch.ops.lltm.sequence_forward(
            named["input"], named["weights_l0"], bias,
            named.get("h_0", zeros)[0], named.get("c_0", zeros)[0], None, False, call.resets,
        )  # fmt: skip
    same = [output, output[-1:], cells[-1:], cells]
    check_same("operator", outputs, same[: len(outputs)])


# -- Checks ----------------------------------------------------------------------------------------


def check_values(
    case: Case,
    names: Sequence[str],
    actual: Sequence[Tensor],
    expected: Sequence[Bounded],
    statistics: Statistics,
) -> None:
    for name, tensor, exact in zip(names, actual, expected, strict=True):
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
        if (meta is None) != (real is None):
            raise Fault("meta", f"result {i} is {meta}, and on the device {real}")
        if meta is None or real is None:
            continue
        # All are contiguous: strides where the size is 1 mean nothing, and may differ.
        described = [(t.dtype, tuple(t.shape), t.is_contiguous()) for t in (meta, real)]
        if described[0] != described[1]:
            raise Fault("meta", f"result {i} is {described[0]}, on the device {described[1]}")
