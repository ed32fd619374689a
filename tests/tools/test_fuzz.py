"""The fuzzer itself: what it takes for right and wrong. `make fuzz` runs it."""

import shutil

import pytest
import torch
from fuzz import checks, reference
from fuzz.cases import Case, cases
from fuzz.mutants import FUZZER, MUTANTS, ON_HOST, ROOT
from hypothesis import given, settings


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.file)
def test_planted_faults_still_find_their_place_in_the_sources(mutant, tmp_path):
    target = tmp_path / mutant.file
    target.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / mutant.file, target)
    mutant.apply(tmp_path)
    assert target.read_text() != (ROOT / mutant.file).read_text()
    assert mutant.finder == FUZZER or f"def {mutant.finder}(" in (ROOT / ON_HOST).read_text()


@settings(max_examples=50, deadline=None, database=None)
@given(cases())
def test_a_case_is_repeated_by_its_line(case):
    assert Case.from_json(case.to_json()) == case


def wrong(change):
    """forward, whose results were changed."""

    def call(case, name, arguments, threads=None):
        results = list(torch.ops.lltm.forward(*arguments))
        change(arguments, results)
        return results

    return call


FAULTS = {
    "value": lambda arguments, results: results[1].mul_(1 + 1e-5),
    "unchanged": lambda arguments, results: arguments[0].neg_(),
    "contiguous": lambda arguments, results: results.reverse() or results[0].t_(),
    "fresh": lambda arguments, results: results.__setitem__(1, results[0]),
    "repeated": lambda arguments, results: results[0].add_(torch.rand(()) * 1e-7),
}


@pytest.mark.parametrize("check", FAULTS)
def test_a_wrong_result_is_a_fault(check, monkeypatch):
    case = Case("forward", batch=3, features=5, state=4)
    checks.run_case(case, checks.Outcome())
    monkeypatch.setattr(checks, "call_operator", wrong(FAULTS[check]))
    with pytest.raises(checks.Fault) as fault:
        checks.run_case(case, checks.Outcome())
    assert fault.value.check == check


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
