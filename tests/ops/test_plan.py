"""The profiler shows which path a call takes on the CPU (docs/debugging.md)."""

import pytest
import torch
from torch.profiler import profile

import lltm_ops


def plans(call):
    with profile() as profiler:
        call()
    return [event.key for event in profiler.key_averages() if event.key.startswith("lltm plan")]


def arguments(*rows, dtype=torch.float32):
    inputs, state = torch.randn(*rows, 32), torch.zeros(rows[-1], 64)
    return [t.to(dtype) for t in (inputs, torch.randn(192, 96), torch.randn(192), state, state)]


@pytest.mark.parametrize(("batch", "plan"), [(2, "2 rows by dot"), (48, "0 rows by dot")])
def test_few_rows_of_a_step_are_multiplied_by_dot(batch, plan):
    (name,) = plans(lambda: lltm_ops.forward(*arguments(batch)))
    assert name.startswith("lltm plan: Float products, ") and plan in name


@pytest.mark.parametrize(("steps", "plan"), [(7, "rows by dot"), (8, "panels of units")])
def test_a_short_sequence_is_a_loop_over_the_cell(steps, plan):
    (name,) = plans(lambda: lltm_ops.sequence_forward(*arguments(steps, 4)))
    assert plan in name


def test_half_is_multiplied_in_float():
    (name,) = plans(lambda: lltm_ops.sequence_forward(*arguments(9, 4, dtype=torch.half)))
    assert "Float products" in name
