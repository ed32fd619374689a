"""The LLTM in float64, where each number comes with a bound on the error that a kernel may make.

Written from the formulas in docs/operators.md; it uses nothing of the package, and nothing of the
other tests. The bounds are those of running error analysis (Higham, Accuracy and Stability of
Numerical Algorithms, chapter 3): each operation adds what rounding its result may cost, and passes
on what the errors of its operands may make of it. So no tolerance is chosen by hand, except how
exact a gate function has to be (FUNCTION_ULPS).

A number is in one of three states:

- value finite, error finite: a kernel is right if it is within the error of the value;
- value inf or nan, error 0: a kernel is right if it gives the same;
- error inf: undecided. Whether a kernel overflows, or multiplies an infinity with zero, depends on
  the order of its sums or on a rounding. Nothing is asked of it.

A sequence is the rows of all its steps, one step after the other, as in a PackedSequence.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A gate function returns its exact value within so many units in the last place of opmath.
FUNCTION_ULPS = 4
# The reference rounds, too.
OWN_UNIT = 2.0**-53


@dataclass(frozen=True)
class Format:
    """A floating-point format: what is lost when a number is rounded to it."""

    unit: float  # half of the distance from 1 to the next number
    subnormal: float  # the smallest number
    normal: float  # the smallest one with all digits
    largest: float

    @staticmethod
    def of(dtype: torch.dtype) -> Format:
        info = torch.finfo(dtype)
        return Format(info.eps / 2, info.smallest_normal * info.eps, info.smallest_normal, info.max)


class Bounded:
    """A tensor of float64, and a bound on the error of each element."""

    __slots__ = ("error", "plain", "value")

    def __init__(self, value: Tensor, error: Tensor | None = None, plain: bool | None = None):
        self.value = value
        self.error = torch.zeros_like(value) if error is None else error
        # No element is infinite, nan or undecided: the rules for these cost time.
        self.plain = bool((value + self.error).isfinite().all()) if plain is None else plain

    def map(self, function: Callable[[Tensor], Tensor]) -> Bounded:
        """function moves elements, and computes nothing."""
        return Bounded(function(self.value), function(self.error), self.plain or None)

    def __getitem__(self, index: object) -> Bounded:
        return self.map(lambda tensor: tensor[index])

    @property
    def T(self) -> Bounded:
        return self.map(lambda tensor: tensor.T)

    @property
    def undecided(self) -> Tensor:
        return self.error.isinf()

    @property
    def regular(self) -> Tensor:
        return self.value.isfinite() & self.error.isfinite()

    @property
    def perhaps_zero(self) -> Tensor:
        """Or of the other sign; not those that are zero for sure."""
        return (self.value.abs() <= self.error) & (self.error > 0)


def exactly(tensor: Tensor) -> Bounded:
    return Bounded(tensor.detach().to(torch.float64))


def zeros(*sizes: int) -> Bounded:
    return Bounded(torch.zeros(sizes, dtype=torch.float64), plain=True)


def cat(tensors: Sequence[Bounded], dim: int = 0) -> Bounded:
    return Bounded(
        torch.cat([t.value for t in tensors], dim), torch.cat([t.error for t in tensors], dim)
    )


@dataclass(frozen=True)
class Arithmetic:
    """What rounds where, in kernels for a dtype.

    Kernels compute in opmath, and round only results. Those of the CPU multiply bfloat16 natively,
    which rounds the gradients of gates.
    """

    dtype: torch.dtype

    @property
    def opmath(self) -> Format:
        double = self.dtype == torch.float64
        return Format.of(torch.float64 if double else torch.float32)

    @property
    def results(self) -> Format:
        return Format.of(self.dtype)

    def store(self, a: Bounded) -> Bounded:
        """Rounds to what a result is, and the h that the next step begins with."""
        return a if self.results == self.opmath else self._round(a, self.results)

    def factor(self, a: Bounded) -> Bounded:
        """Rounds the gradients of gates to what the products take."""
        rounds = self.dtype == torch.bfloat16
        return self._round(a, self.results if rounds else self.opmath)

    def add(self, a: Bounded, b: Bounded) -> Bounded:
        value, error = a.value + b.value, a.error + b.error
        if a.plain and b.plain:
            return self._round(Bounded(value, error, True), self.opmath)
        special = (a.value.isnan() | b.value.isnan()) | a.value.isinf() | b.value.isinf()
        undecided = (a.undecided | b.undecided) & ~(a.value.isnan() | b.value.isnan())
        return self._with_specials(value, error, special, undecided, overflows=True)

    def multiply(self, a: Bounded, b: Bounded) -> Bounded:
        value = a.value * b.value
        error = a.value.abs() * b.error + b.value.abs() * a.error + a.error * b.error
        # What overflows here need not in the fused multiply-add that it is part of.
        if a.plain and b.plain:
            return self._round(Bounded(value, error, True), self.opmath, overflows=False)
        nan = a.value.isnan() | b.value.isnan()
        special = nan | a.value.isinf() | b.value.isinf()
        undecided = a.undecided | b.undecided
        undecided = undecided | (a.value.isinf() & b.perhaps_zero)
        undecided = undecided | (b.value.isinf() & a.perhaps_zero)
        return self._with_specials(value, error, special, undecided & ~nan, overflows=False)

    def one_minus(self, a: Bounded) -> Bounded:
        one = Bounded(torch.ones_like(a.value), plain=True)
        return self.add(one, Bounded(-a.value, a.error, a.plain))

    def sigmoid(self, a: Bounded) -> Bounded:
        nearest = (a.value.abs() - a.error).clamp_min(0)
        slope = torch.sigmoid(nearest) * torch.sigmoid(-nearest)
        return self._function(a, torch.sigmoid, slope)

    def tanh(self, a: Bounded) -> Bounded:
        nearest = (a.value.abs() - a.error).clamp_min(0)
        slope = 4 * torch.sigmoid(2 * nearest) * torch.sigmoid(-2 * nearest)
        return self._function(a, torch.tanh, slope)

    def elu(self, a: Bounded) -> Bounded:
        slope = torch.exp((a.value + a.error).clamp_max(0))
        return self._function(a, lambda x: torch.where(x > 0, x, torch.expm1(x)), slope)

    def elu_derivative(self, elu: Bounded) -> Bounded:
        """By its result; continuous, also at 0."""
        return self._unary(elu, lambda x: torch.where(x > 0, 1.0, x + 1), elu.error)

    def product(self, a: Bounded, b: Bounded) -> Bounded:
        """a [M, K] @ b [N, K].T, summed in opmath, in any order."""
        a, b = self._flushed(a), self._flushed(b)
        terms = a.value.shape[1]
        roundings = (terms + 2) * (self.opmath.unit + OWN_UNIT)
        gamma = roundings / (1 - roundings)
        of_infinities = None
        if not (a.plain and b.plain):
            of_infinities = _sum_of_infinities(a, b)
            a, b = (x.map(lambda t, x=x: torch.where(x.regular, t, 0.0)) for x in (a, b))
        value = a.value @ b.value.T
        magnitude = (a.value.abs() + a.error) @ (b.value.abs() + b.error).T
        propagated = a.error @ b.value.abs().T
        if b.error.any():
            propagated = propagated + (a.value.abs() + a.error) @ b.error.T
        lost = self.opmath.normal if self._flushes else self.opmath.subnormal
        error = propagated + gamma * magnitude + (terms + 2) * lost
        # Some partial sum may overflow.
        overflows = ~(magnitude < self.opmath.largest * (1 - gamma))
        if of_infinities is None and not overflows.any():
            return Bounded(value, error, True)
        result = _undecided_where(overflows, Bounded(value, error))
        if of_infinities is None:
            return result
        special, undecided = of_infinities
        result = _undecided_where(undecided, result)
        known = special != 0
        value = torch.where(known, special, result.value)
        error = torch.where(known & (~undecided | special.isnan()), 0.0, result.error)
        # An infinity beside a sum that may overflow to the other one.
        return _undecided_where(overflows & special.isinf(), Bounded(value, error))

    @property
    def _flushes(self) -> bool:
        """The instructions for bfloat16 neither take nor give numbers without all digits."""
        return self.dtype == torch.bfloat16

    def _flushed(self, a: Bounded) -> Bounded:
        if not self._flushes:
            return a
        small = (a.value.abs() < self.opmath.normal) & (a.value != 0) & ~a.undecided
        if not small.any():
            return a
        return Bounded(a.value, torch.where(small, a.error + a.value.abs(), a.error))

    def _function(self, a: Bounded, function: Callable[[Tensor], Tensor], slope: Tensor) -> Bounded:
        value = function(a.value)
        error = 2 * FUNCTION_ULPS * self.opmath.unit * value.abs() + self.opmath.normal
        # At infinity the limit is expected.
        error = torch.where(a.value.isfinite(), slope * a.error + error, a.error)
        return self._unary(a, function, error)

    def _unary(self, a: Bounded, function: Callable[[Tensor], Tensor], error: Tensor) -> Bounded:
        value = function(a.value)
        if a.plain:
            return self._round(Bounded(value, error, True), self.opmath)
        special = ~a.value.isfinite()
        return self._with_specials(value, error, special, a.undecided, overflows=True)

    def _with_specials(
        self, value: Tensor, error: Tensor, special: Tensor, undecided: Tensor, overflows: bool
    ) -> Bounded:
        """An operation where not all operands are finite: those results are special as they are."""
        keep = ~(special | undecided)
        regular = Bounded(torch.where(keep, value, 0.0), torch.where(keep, error, 0.0))
        regular = self._round(regular, self.opmath, overflows)
        value = torch.where(special, value, regular.value)
        error = torch.where(special, 0.0, regular.error)
        return _undecided_where(undecided, Bounded(value, error))

    def _round(self, a: Bounded, to: Format, overflows: bool = True) -> Bounded:
        """overflows: what is too large for sure becomes infinite for sure."""
        size = a.value.abs() + a.error
        error = a.error + (to.unit + OWN_UNIT) * size + to.subnormal
        if a.plain and bool((size + error < to.largest).all()):
            return Bounded(a.value, error, True)
        settled = ~a.value.isfinite() & ~a.undecided
        finite = a.value.isfinite() & a.error.isfinite()
        perhaps = ~settled & ~(size + error < to.largest)
        surely = (a.value.abs() - error > to.largest) & finite if overflows else perhaps & False
        # float64 overflows in the reference itself.
        value = torch.where(surely, a.value.sign() * torch.inf, a.value)
        if a.plain and overflows:
            surely = surely | a.value.isinf()
        error = torch.where(settled | surely, 0.0, error)
        return _undecided_where(perhaps & ~surely, Bounded(value, error))


def _undecided_where(where: Tensor, a: Bounded) -> Bounded:
    # A value of 0: no rule must take it for infinite or nan.
    return Bounded(torch.where(where, 0.0, a.value), torch.where(where, torch.inf, a.error))


def _sum_of_infinities(a: Bounded, b: Bounded) -> tuple[Tensor, Tensor]:
    """What infinities and nan make of a @ b.T: (inf, -inf, nan, or 0 for nothing), undecided."""

    def meet(x: list[Tensor], y: list[Tensor]) -> Tensor:
        """Says where a sum has a term of an x of one factor and a y of the other."""
        x, y = ([t.to(torch.float64) for t in of_each] for of_each in (x, y))
        return x[0] @ y[1].T + y[0] @ x[1].T > 0

    both = (a, b)
    up, down = ([x.value == infinity for x in both] for infinity in (torch.inf, -torch.inf))
    infinite = [x.value.isinf() for x in both]
    positive, negative = [x.value > 0 for x in both], [x.value < 0 for x in both]
    zero = [(x.value == 0) & ~x.undecided & ~x.perhaps_zero for x in both]
    unsure = [x.perhaps_zero & ~x.undecided for x in both]
    anything = [torch.ones_like(x.value) for x in both]
    sums_up = meet(up, positive) | meet(down, negative)
    sums_down = meet(up, negative) | meet(down, positive)
    undecided = meet([x.undecided for x in both], anything) | meet(infinite, unsure)
    nan = meet([x.value.isnan() for x in both], anything) | meet(infinite, zero)
    # An infinity whose other factor may be of the other sign was no certain infinity.
    nan = nan | (sums_up & sums_down & ~undecided)
    special = torch.zeros_like(nan, dtype=torch.float64)
    special = torch.where(sums_up, torch.inf, special)
    special = torch.where(sums_down, -torch.inf, special)
    special = torch.where(undecided, 0.0, special)
    special = torch.where(nan, torch.nan, special)
    return special, undecided & ~nan


def gate_parts(gates: Bounded) -> tuple[Bounded, Bounded, Bounded]:
    size = gates.value.shape[-1] // 3
    return gates[..., :size], gates[..., size : 2 * size], gates[..., 2 * size :]


def _linear(of: Arithmetic, x: Bounded, weights: Bounded, bias: Bounded) -> Bounded:
    """x @ weights.T + bias: added to the finished sum, or one of its terms, as in a BLAS."""
    product = of.product(x, weights)
    after = of.add(product, bias.map(lambda t: t.expand(product.value.shape)))
    ones = exactly(torch.ones(len(x.value), 1))
    column = bias.map(lambda t: t.unsqueeze(1))
    within = of.product(cat([x, ones], 1), cat([weights, column], 1))
    either = Bounded(after.value, torch.maximum(after.error, within.error))
    return _undecided_where(after.undecided | within.undecided, either)


def step(
    of: Arithmetic,
    input: Bounded,
    weights: Bounded,
    bias: Bounded,
    old_h: Bounded,
    old_cell: Bounded,
) -> tuple[Bounded, Bounded, Bounded]:
    """(new_h, new_cell, gates), where new_cell is not rounded: the next step takes it as it is."""
    sums = _linear(of, cat([old_h, input], 1), weights, bias)
    before = gate_parts(sums)
    input_gate, output_gate = of.sigmoid(before[0]), of.sigmoid(before[1])
    candidate = of.elu(before[2])
    new_cell = of.add(old_cell, of.multiply(candidate, input_gate))
    new_h = of.multiply(of.tanh(new_cell), output_gate)
    gates = cat([input_gate, output_gate, candidate], 1)
    return of.store(new_h), new_cell, of.store(gates)


def forward(of: Arithmetic, *arguments: Bounded) -> tuple[Bounded, Bounded, Bounded]:
    """step, with new_cell as it is stored."""
    new_h, new_cell, gates = step(of, *arguments)
    return new_h, of.store(new_cell), gates


def gate_gradients(
    of: Arithmetic, grad_h: Bounded, grad_cell: Bounded, new_cell: Bounded, gates: Bounded
) -> tuple[Bounded, Bounded]:
    """(d_preactivations, the gradients of the pre-activations; d_old_cell), not yet stored."""
    input_gate, output_gate, candidate = gate_parts(gates)
    t = of.tanh(new_cell)
    through_h = of.multiply(of.multiply(grad_h, output_gate), of.one_minus(of.multiply(t, t)))
    d_cell = of.add(grad_cell, through_h)

    times = functools.partial(functools.reduce, of.multiply)
    d_preactivations = [
        times([d_cell, candidate, input_gate, of.one_minus(input_gate)]),
        times([grad_h, t, output_gate, of.one_minus(output_gate)]),
        times([d_cell, input_gate, of.elu_derivative(candidate)]),
    ]
    return of.factor(cat(d_preactivations, 1)), d_cell


def linear_gradients(
    of: Arithmetic, d_preactivations: Bounded, input: Bounded, weights: Bounded, old_h: Bounded
) -> tuple[Bounded, Bounded, Bounded]:
    """(d_input, d_weights, d_bias), of rows."""
    state_size = old_h.value.shape[1]
    ones = exactly(torch.ones(1, len(d_preactivations.value)))
    return (
        of.store(of.product(d_preactivations, weights[:, state_size:].T)),
        of.store(of.product(d_preactivations.T, cat([old_h, input], 1).T)),
        of.store(of.product(d_preactivations.T, ones)[:, 0]),
    )


def backward(
    of: Arithmetic,
    grad_h: Bounded,
    grad_cell: Bounded,
    new_cell: Bounded,
    gates: Bounded,
    input: Bounded,
    weights: Bounded,
    old_h: Bounded,
) -> tuple[Bounded, Bounded, Bounded, Bounded, Bounded]:
    d_preactivations, d_cell = gate_gradients(of, grad_h, grad_cell, new_cell, gates)
    d_input, d_weights, d_bias = linear_gradients(of, d_preactivations, input, weights, old_h)
    state_size = old_h.value.shape[1]
    d_old_h = of.store(of.product(d_preactivations, weights[:, :state_size].T))
    return d_input, d_weights, d_bias, d_old_h, of.store(d_cell)


@dataclass(frozen=True)
class Run:
    """How a sequence is run: the rows that each step has, in one direction."""

    batch_sizes: list[int]
    reverse: bool = False
    resets: Tensor | None = None  # bool, of each row

    def steps(self) -> list[tuple[int, slice]]:
        """How many rows each step has, and which, in the order in which they run."""
        ends = itertools.accumulate(self.batch_sizes)
        steps = [(n, slice(end - n, end)) for n, end in zip(self.batch_sizes, ends, strict=True)]
        return steps[::-1] if self.reverse else steps

    def reset(self, state: Bounded, rows: slice) -> Bounded:
        if self.resets is None:
            return state
        return state.map(lambda t: t.masked_fill(self.resets[rows].unsqueeze(1), 0))


def sequence_forward(
    of: Arithmetic,
    run: Run,
    input: Bounded,
    weights: Bounded,
    bias: Bounded,
    h0: Bounded,
    c0: Bounded,
) -> tuple[Bounded, Bounded, Bounded, Bounded, Bounded]:
    """(output, cells, h_n, c_n, gates)"""
    state_size = h0.value.shape[1]
    h, cell = h0, c0
    results = []
    for n, rows in run.steps():
        old_h, old_cell = (run.reset(state[:n], rows) for state in (h, cell))
        new_h, new_cell, gates = step(of, input[rows], weights, bias, old_h, old_cell)
        h, cell = cat([new_h, h[n:]]), cat([new_cell, cell[n:]])
        results.append((new_h, of.store(new_cell), gates))
    nothing = [zeros(0, columns * state_size) for columns in (1, 1, 3)]
    in_order = reversed(results) if run.reverse else results
    output, cells, gates = map(cat, zip(nothing, *in_order, strict=True))
    return output, cells, h, of.store(cell), gates


def sequence_backward(
    of: Arithmetic,
    run: Run,
    grad_output: Bounded,
    grad_cells: Bounded,
    grad_h_n: Bounded,
    grad_c_n: Bounded,
    output: Bounded,
    cells: Bounded,
    gates: Bounded,
    input: Bounded,
    weights: Bounded,
    h0: Bounded,
) -> tuple[Bounded, Bounded, Bounded, Bounded, Bounded]:
    for_h = weights[:, : h0.value.shape[1]].T
    h, all_old_h = h0, []
    for n, rows in run.steps():
        all_old_h.append(run.reset(h[:n], rows))
        h = cat([output[rows], h[n:]])
    d_h, d_cell = grad_h_n, grad_c_n
    all_d_preactivations = []
    for n, rows in reversed(run.steps()):
        d_preactivations, d_old_cell = gate_gradients(
            of,
            of.add(grad_output[rows], d_h[:n]),
            of.add(grad_cells[rows], d_cell[:n]),
            cells[rows],
            gates[rows],
        )
        d_h = cat([run.reset(of.product(d_preactivations, for_h), rows), d_h[n:]])
        d_cell = cat([run.reset(d_old_cell, rows), d_cell[n:]])
        all_d_preactivations.append(d_preactivations)
    if not all_d_preactivations:
        d_bias = zeros(weights.value.shape[0])
        return zeros(*input.value.shape), zeros(*weights.value.shape), d_bias, d_h, d_cell
    (all_old_h if run.reverse else all_d_preactivations).reverse()
    of_rows = linear_gradients(of, cat(all_d_preactivations), input, weights, cat(all_old_h))
    return *of_rows, of.store(d_h), of.store(d_cell)
