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

Sequences are padded here, [time, batch, ...], and each row of the batch has a length: packing is
the business of whoever compares.
"""

from __future__ import annotations

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

    def replaced(self, index: object, by: Bounded) -> Bounded:
        value, error = self.value.clone(), self.error.clone()
        value[index], error[index] = by.value, by.error
        return Bounded(value, error, (self.plain and by.plain) or None)

    def zeroed(self, where: Tensor) -> Bounded:
        return self.map(lambda tensor: tensor.masked_fill(where, 0))

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


def cat(tensors: Sequence[Bounded], dim: int) -> Bounded:
    return Bounded(
        torch.cat([t.value for t in tensors], dim), torch.cat([t.error for t in tensors], dim)
    )


def placed(sizes: Sequence[int], parts: Sequence[tuple[object, Bounded]]) -> Bounded:
    """Zeros, but for each part at its index."""
    whole = zeros(*sizes)
    for index, part in parts:
        whole.value[index], whole.error[index] = part.value, part.error
    return Bounded(whole.value, whole.error)


@dataclass(frozen=True)
class Arithmetic:
    """What rounds where, in kernels for a dtype.

    Kernels compute in opmath, and round only results. Those of the CPU multiply bfloat16 natively,
    which rounds the gradients of gates; the composite formulas do not.
    """

    dtype: torch.dtype
    composite: bool = False

    @property
    def opmath(self) -> Format:
        double = self.dtype == torch.float64
        return Format.of(torch.float64 if double else torch.float32)

    @property
    def results(self) -> Format:
        return Format.of(self.dtype)

    @property
    def _products_take(self) -> Format:
        """What the gradients of gates are rounded to before they are multiplied."""
        rounds = self.dtype == torch.bfloat16 and not self.composite
        return self.results if rounds else self.opmath

    def store(self, a: Bounded) -> Bounded:
        """Rounds to what a result is, and the h that the next step begins with."""
        return a if self.results == self.opmath else self._round(a, self.results)

    def factor(self, a: Bounded) -> Bounded:
        return self._round(a, self._products_take)

    def add(self, a: Bounded, b: Bounded) -> Bounded:
        value, error = a.value + b.value, a.error + b.error
        if a.plain and b.plain:
            return self._after_each(Bounded(value, error, True), overflows=True)
        special = (a.value.isnan() | b.value.isnan()) | a.value.isinf() | b.value.isinf()
        undecided = (a.undecided | b.undecided) & ~(a.value.isnan() | b.value.isnan())
        return self._with_specials(value, error, special, undecided, overflows=True)

    def total(self, parts: Sequence[Bounded]) -> Bounded:
        """What PyTorch adds up as tensors, in any order."""
        total = parts[0]
        for part in parts[1:]:
            total = self.store(self.add(total, part))
        if len(parts) < 3:
            return total
        magnitude = sum(part.value.abs() + part.error for part in parts)
        more = len(parts) * (self.results.unit + OWN_UNIT) * magnitude
        result = Bounded(total.value, torch.where(total.regular, total.error + more, total.error))
        overflows = ~(magnitude < self.results.largest) & ~total.value.isnan()
        return _undecided_where(overflows, result)

    def multiply(self, a: Bounded, b: Bounded) -> Bounded:
        value = a.value * b.value
        error = a.value.abs() * b.error + b.value.abs() * a.error + a.error * b.error
        # What overflows here need not in the fused multiply-add that it is part of.
        if a.plain and b.plain:
            return self._after_each(Bounded(value, error, True), overflows=False)
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

        def derivative(x: Tensor) -> Tensor:
            return torch.where(x > 0, 1.0, x + 1)

        return self._unary(elu, derivative, elu.error)

    def product(self, a: Bounded, b: Bounded) -> Bounded:
        """a [M, K] @ b [N, K].T, summed in opmath, in any order."""
        a, b = self._flushed(a), self._flushed(b)
        terms = a.value.shape[1]
        roundings = (terms + 2) * (self.opmath.unit + OWN_UNIT)
        gamma = roundings / (1 - roundings)
        of_infinities = None
        if not (a.plain and b.plain):
            of_infinities = _sum_of_infinities(a, b)
            a, b = (
                Bounded(
                    torch.where(x.regular, x.value, 0.0), torch.where(x.regular, x.error, 0.0), True
                )
                for x in (a, b)
            )
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
            result = Bounded(value, error, True)
        else:
            result = _undecided_where(overflows, Bounded(value, error))
            if of_infinities is not None:
                special, undecided = of_infinities
                result = _undecided_where(undecided, result)
                known = special != 0
                result = Bounded(
                    torch.where(known, special, result.value),
                    torch.where(known & (~undecided | special.isnan()), 0.0, result.error),
                )
                # An infinity beside a sum that may overflow to the other one.
                lost = overflows & special.isinf()
                result = _undecided_where(lost, result)
        return result

    def column_sums(self, a: Bounded) -> Bounded:
        """The sum of each column of a [rows, columns]."""
        ones = Bounded(torch.ones(1, a.value.shape[0], dtype=torch.float64), plain=True)
        return self.product(a.map(lambda t: t.T), ones)[:, 0]

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
            return self._after_each(Bounded(value, error, True), overflows=True)
        special = ~a.value.isfinite()
        return self._with_specials(value, error, special, a.undecided, overflows=True)

    def _with_specials(
        self, value: Tensor, error: Tensor, special: Tensor, undecided: Tensor, overflows: bool
    ) -> Bounded:
        """An operation where not all operands are finite: those results are special as they are."""
        keep = ~(special | undecided)
        regular = self._after_each(
            Bounded(torch.where(keep, value, 0.0), torch.where(keep, error, 0.0)), overflows
        )
        return _undecided_where(
            undecided,
            Bounded(
                torch.where(special, value, regular.value),
                torch.where(special, 0.0, regular.error),
            ),
        )

    def _after_each(self, a: Bounded, overflows: bool) -> Bounded:
        return self._round(a, self.opmath, overflows)

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

    def count(x: Tensor, y: Tensor) -> Tensor:
        return x.to(torch.float64) @ y.to(torch.float64).T

    def any_of(x: Tensor, y: Tensor) -> Tensor:
        return count(x, torch.ones_like(b.value)) + count(torch.ones_like(a.value), y) > 0

    up = [x.value == torch.inf for x in (a, b)]
    down = [x.value == -torch.inf for x in (a, b)]
    infinite = [x.value.isinf() for x in (a, b)]
    positive = [x.value > 0 for x in (a, b)]
    negative = [x.value < 0 for x in (a, b)]
    zero = [(x.value == 0) & ~x.undecided & ~x.perhaps_zero for x in (a, b)]
    unsure = [x.perhaps_zero & ~x.undecided for x in (a, b)]
    sums_up = count(up[0], positive[1]) + count(down[0], negative[1])
    sums_up = sums_up + count(positive[0], up[1]) + count(negative[0], down[1]) > 0
    sums_down = count(up[0], negative[1]) + count(down[0], positive[1])
    sums_down = sums_down + count(negative[0], up[1]) + count(positive[0], down[1]) > 0
    nan = any_of(a.value.isnan(), b.value.isnan())
    nan = nan | (count(infinite[0], zero[1]) + count(zero[0], infinite[1]) > 0)
    undecided = any_of(a.undecided, b.undecided)
    undecided = undecided | (count(infinite[0], unsure[1]) + count(unsure[0], infinite[1]) > 0)
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
    ones = Bounded(torch.ones(x.value.shape[0], 1, dtype=torch.float64), plain=True)
    column = bias.map(lambda t: t.unsqueeze(1))
    within = of.product(cat([x, ones], 1), cat([weights, column], 1))
    either = Bounded(after.value, torch.maximum(after.error, within.error))
    return _undecided_where(after.undecided | within.undecided, either)


def forward(
    of: Arithmetic,
    input: Bounded,
    weights: Bounded,
    bias: Bounded,
    old_h: Bounded,
    old_cell: Bounded,
) -> tuple[Bounded, Bounded, Bounded]:
    """(new_h, new_cell, gates), as they are stored."""
    new_h, new_cell, gates = step(of, input, weights, bias, old_h, old_cell)
    return new_h, of.store(new_cell), gates


def step(
    of: Arithmetic,
    input: Bounded,
    weights: Bounded,
    bias: Bounded,
    old_h: Bounded,
    old_cell: Bounded,
) -> tuple[Bounded, Bounded, Bounded]:
    """forward, but for new_cell, which is not rounded: the next step takes it as it is."""
    sums = _linear(of, cat([old_h, input], 1), weights, bias)
    before = gate_parts(sums)
    input_gate, output_gate = of.sigmoid(before[0]), of.sigmoid(before[1])
    candidate = of.elu(before[2])
    new_cell = of.add(old_cell, of.multiply(candidate, input_gate))
    new_h = of.multiply(of.tanh(new_cell), output_gate)
    gates = cat([input_gate, output_gate, candidate], 1)
    return of.store(new_h), new_cell, of.store(gates)


def gate_gradients(
    of: Arithmetic, grad_h: Bounded, grad_cell: Bounded, new_cell: Bounded, gates: Bounded
) -> tuple[Bounded, Bounded]:
    """(d_gates, the gradients of the pre-activations; d_old_cell), not yet stored."""
    input_gate, output_gate, candidate = gate_parts(gates)
    t = of.tanh(new_cell)
    through_h = of.multiply(of.multiply(grad_h, output_gate), of.one_minus(of.multiply(t, t)))
    d_cell = of.add(grad_cell, through_h)

    def times(first: Bounded, *factors: Bounded) -> Bounded:
        for factor in factors:
            first = of.multiply(first, factor)
        return first

    d_gates = [
        times(d_cell, candidate, input_gate, of.one_minus(input_gate)),
        times(grad_h, t, output_gate, of.one_minus(output_gate)),
        times(d_cell, input_gate, of.elu_derivative(candidate)),
    ]
    return of.factor(cat(d_gates, 1)), d_cell


def transposed(a: Bounded) -> Bounded:
    return a.map(lambda tensor: tensor.T)


def linear_gradients(
    of: Arithmetic, d_gates: Bounded, input: Bounded, weights: Bounded, old_h: Bounded
) -> tuple[Bounded, Bounded, Bounded]:
    """(d_input, d_weights, d_bias), of rows."""
    state_size = old_h.value.shape[1]
    return (
        of.store(of.product(d_gates, transposed(weights[:, state_size:]))),
        of.store(of.product(transposed(d_gates), transposed(cat([old_h, input], 1)))),
        of.store(of.column_sums(d_gates)),
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
    d_gates, d_cell = gate_gradients(of, grad_h, grad_cell, new_cell, gates)
    d_input, d_weights, d_bias = linear_gradients(of, d_gates, input, weights, old_h)
    state_size = old_h.value.shape[1]
    d_old_h = of.store(of.product(d_gates, transposed(weights[:, :state_size])))
    return d_input, d_weights, d_bias, d_old_h, of.store(d_cell)


@dataclass(frozen=True)
class Run:
    """How a sequence is run: [time, batch] of lengths, in one direction."""

    time: int
    lengths: Tensor  # of each row of the batch
    reverse: bool = False
    resets: Tensor | None = None  # bool [time, batch]

    def steps(self) -> list[tuple[int, Tensor]]:
        """Each step that runs, and the rows of the batch that it has."""
        order = reversed(range(self.time)) if self.reverse else range(self.time)
        return [(t, (self.lengths > t).nonzero().flatten()) for t in order]

    def reset(self, state: Bounded, t: int, rows: Tensor) -> Bounded:
        if self.resets is None:
            return state
        return state.zeroed(self.resets[t, rows].unsqueeze(1))


def sequence_forward(
    of: Arithmetic,
    run: Run,
    input: Bounded,
    weights: Bounded,
    bias: Bounded,
    h0: Bounded,
    c0: Bounded,
) -> tuple[Bounded, Bounded, Bounded]:
    """(output, cells, gates), each [time, batch, ...], zero beyond the lengths."""
    batch, state_size = h0.value.shape
    h, cell = h0, c0
    results = []
    for t, rows in run.steps():
        new_h, new_cell, new_gates = step(
            of,
            input[t, rows],
            weights,
            bias,
            run.reset(h[rows], t, rows),
            run.reset(cell[rows], t, rows),
        )
        h, cell = h.replaced(rows, new_h), cell.replaced(rows, new_cell)
        results.append(((t, rows), (new_h, of.store(new_cell), new_gates)))
    output, cells, gates = (
        placed(
            (run.time, batch, columns * state_size),
            [(place, tensors[i]) for place, tensors in results],
        )
        for i, columns in enumerate((1, 1, 3))
    )
    return output, cells, gates


def sequence_backward(
    of: Arithmetic,
    run: Run,
    grad_output: Bounded,
    grad_cells: Bounded,
    output: Bounded,
    cells: Bounded,
    gates: Bounded,
    input: Bounded,
    weights: Bounded,
    h0: Bounded,
) -> tuple[Bounded, Bounded, Bounded, Bounded, Bounded]:
    state_size = h0.value.shape[1]
    for_h = transposed(weights[:, :state_size])
    h = h0
    old_h = {}
    for t, rows in run.steps():
        old_h[t] = run.reset(h[rows], t, rows)
        h = h.replaced(rows, output[t, rows])
    d_h = d_cell = zeros(*h0.value.shape)
    all_d_gates, all_inputs, all_old_h, places = [], [], [], []
    for t, rows in reversed(run.steps()):
        d_gates, d_old_cell = gate_gradients(
            of,
            of.add(grad_output[t, rows], d_h[rows]),
            of.add(grad_cells[t, rows], d_cell[rows]),
            cells[t, rows],
            gates[t, rows],
        )
        d_old_h = of.product(d_gates, for_h)
        d_h = d_h.replaced(rows, run.reset(d_old_h, t, rows))
        d_cell = d_cell.replaced(rows, run.reset(d_old_cell, t, rows))
        all_d_gates.append(d_gates)
        all_inputs.append(input[t, rows])
        all_old_h.append(old_h[t])
        places.append((t, rows))
    if not places:
        nothing = (input.value.shape, weights.value.shape, (3 * state_size,))
        return *(zeros(*sizes) for sizes in nothing), d_h, d_cell
    rows_of_d_input, d_weights, d_bias = linear_gradients(
        of, cat(all_d_gates, 0), cat(all_inputs, 0), weights, cat(all_old_h, 0)
    )
    parts = []
    for place in places:
        count = len(place[1])
        parts.append((place, rows_of_d_input[:count]))
        rows_of_d_input = rows_of_d_input[count:]
    return placed(input.value.shape, parts), d_weights, d_bias, of.store(d_h), of.store(d_cell)


@dataclass
class Layers:
    """Layers of sequences in one direction or two, as nn.LSTM has them."""

    of: Arithmetic
    runs: list[Run]  # of each direction
    parameters: list[tuple[Bounded, Bounded]]  # weights and bias, layer by layer

    def forward(self, input: Bounded, h_0: Bounded, c_0: Bounded) -> tuple[Bounded, ...]:
        """(output, h_n, c_n, cells); keeps what backward needs."""
        self.h_0 = h_0
        self.calls = []
        last_h, last_c = [], []
        for layer in range(len(self.parameters) // len(self.runs)):
            all_output, all_cells = [], []
            for direction, run in enumerate(self.runs):
                i = layer * len(self.runs) + direction
                output, cells, gates = sequence_forward(
                    self.of, run, input, *self.parameters[i], h_0[i], c_0[i]
                )
                self.calls.append((input, output, cells, gates))
                last_h.append(_last_state(run, output, h_0[i]))
                last_c.append(_last_state(run, cells, c_0[i]))
                all_output.append(output)
                all_cells.append(cells)
            input = cat(all_output, 2)
        sizes = h_0.value.shape
        return (
            input,
            placed(sizes, list(enumerate(last_h))),
            placed(sizes, list(enumerate(last_c))),
            cat(all_cells, 2),
        )

    def backward(
        self, grad_output: Bounded, grad_h_n: Bounded, grad_c_n: Bounded, grad_cells: Bounded
    ) -> tuple[Bounded, list[tuple[Bounded, Bounded]], Bounded, Bounded]:
        """(d_input, d_parameters, d_h_0, d_c_0)."""
        of, directions = self.of, len(self.runs)
        size = self.h_0.value.shape[2]
        grads_of_output, grads_of_cells = [grad_output], [grad_cells]
        d_parameters: list[tuple[Bounded, Bounded]] = []
        d_h_0, d_c_0 = [], []
        d_inputs: list[Bounded] = []
        for i in reversed(range(len(self.parameters))):
            run = self.runs[i % directions]
            input, output, cells, gates = self.calls[i]
            columns = slice(i % directions * size, (i % directions + 1) * size)
            grads = [
                of.total([*(part[..., columns] for part in parts), *_of_last_state(run, last[i])])
                for parts, last in ((grads_of_output, grad_h_n), (grads_of_cells, grad_c_n))
            ]
            d_input, d_weights, d_bias, d_h, d_c = sequence_backward(
                of, run, *grads, output, cells, gates, input, self.parameters[i][0], self.h_0[i]
            )
            if run.time == 0:
                d_h, d_c = grad_h_n[i], grad_c_n[i]
            d_parameters.insert(0, (d_weights, d_bias))
            d_h_0.insert(0, d_h)
            d_c_0.insert(0, d_c)
            d_inputs.append(d_input)
            if i % directions == 0:
                # Only the last layer returns its cell states.
                grads_of_output, d_inputs = d_inputs, []
                grads_of_cells = [zeros(*output.value.shape[:2], directions * size)]
        sizes = self.h_0.value.shape
        return (
            of.total(grads_of_output),
            d_parameters,
            placed(sizes, list(enumerate(d_h_0))),
            placed(sizes, list(enumerate(d_c_0))),
        )


def _last_places(run: Run) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(run.lengths))
    return (torch.zeros_like(rows) if run.reverse else run.lengths - 1), rows


def _last_state(run: Run, states: Bounded, initial: Bounded) -> Bounded:
    return initial if run.time == 0 else states[_last_places(run)]


def _of_last_state(run: Run, grad: Bounded) -> list[Bounded]:
    """The gradient of the last state, as one of all states."""
    if run.time == 0:
        return []
    batch, size = grad.value.shape
    return [placed((run.time, batch, size), [(_last_places(run), grad)])]
