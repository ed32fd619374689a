"""The fuzzer itself: what it takes for right and wrong. `make fuzz` runs it."""

import pytest
import torch
from fuzz import checks, reference
from fuzz.cases import Case, cases
from hypothesis import given, settings


@settings(max_examples=50, deadline=None, database=None)
@given(cases())
def test_a_case_is_repeated_by_its_line(case):
    assert Case.from_json(case.to_json()) == case


def test_a_wrong_result_is_a_fault(monkeypatch):
    case = Case("forward", batch=3, features=5, state=4)
    checks.run_case(case, checks.Outcome())
    right = checks.call_operator
    monkeypatch.setattr(
        checks, "call_operator", lambda *call: [each * (1 + 1e-5) for each in right(*call)]
    )
    with pytest.raises(checks.Fault, match="value"):
        checks.run_case(case, checks.Outcome())


def test_what_is_not_finite_is_expected_where_it_is_certain():
    """inf * 0 is nan; a sum that may overflow, or not, is undecided."""
    of = reference.Arithmetic(torch.float32)
    inf, nan, huge = torch.inf, torch.nan, 3e38
    rows = torch.tensor([[inf, 1.0], [inf, -inf], [inf, 0.0], [nan, 1.0], [huge, huge], [1.0, 2.0]])
    sums = of.product(reference.exactly(rows), reference.exactly(torch.tensor([[1.0, 1.0]])))
    expected = torch.tensor([[inf], [nan], [inf], [nan], [0.0], [3.0]], dtype=torch.float64)
    torch.testing.assert_close(sums.value, expected, equal_nan=True)
    assert sums.undecided.flatten().tolist() == [False] * 4 + [True, False]
    times_zero = of.product(reference.exactly(rows[:1]), reference.exactly(torch.zeros(1, 2)))
    assert times_zero.value.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_bounds_are_a_few_roundings_of_one_step(dtype):
    """So that a fault of more than these shows."""
    case = Case("forward", dtype=str(dtype).removeprefix("torch."), batch=3, features=5, state=4)
    arguments = checks.arguments_of(case, checks.maker_of(case))
    for result in checks.expected_of(case, arguments):
        assert (result.error < 100 * torch.finfo(dtype).eps).all()
