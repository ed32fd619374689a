"""lltm::sequence_forward computes the cell over whole sequences, in memory that does not grow.

What holds for the cell in the same way stands in the files that test both: values, gradients,
registration, errors and PyTorch's subsystems.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import (
    composite,
    double,
    each_dtype,
    needs_cuda,
    sequence_backward_inputs,
    sequence_inputs,
    sequence_reference,
)

forward = torch.ops.lltm.sequence_forward
backward = torch.ops.lltm.sequence_backward


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("zeros", [1, 3])
def test_steps_that_no_sequence_has(reverse, zeros):
    """Also where they would begin a chunk of their own, of which backward sums nothing."""
    rows = 1100
    _, weights, bias, h0, c0, *_ = sequence_inputs(shape=(1, rows, 5, 4))
    input = torch.randn(rows, 5)
    results = []
    for sizes in ([rows], [rows] + [0] * zeros):
        tensors = [t.clone().requires_grad_() for t in (input, weights, bias, h0, c0)]
        outputs = forward(*tensors, torch.tensor(sizes), reverse)
        results.append([*outputs, *torch.autograd.grad(outputs[0].sum(), tensors)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_reset_is_any_byte_but_zero():
    input, weights, bias, h0, c0, *_ = sequence_inputs(requires_grad=True)
    bytes_of_resets = torch.randint(0, 2, (5, 3), dtype=torch.uint8) * 255
    results = []
    for resets in (bytes_of_resets.view(torch.bool), bytes_of_resets.bool()):
        output, *_ = forward(input, weights, bias, h0, c0, resets=resets)
        results.append([output, *torch.autograd.grad(output.sum(), [input, weights, h0])])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_reset_begins_a_new_sequence_also_after_what_is_not_finite():
    input, weights, bias, h0, c0, *_ = sequence_inputs(shape=(12, 2, 5, 33))
    input[3, 0] = float("nan")
    resets = torch.zeros(12, 2, dtype=torch.bool)
    resets[5, 0] = True
    output, *_ = forward(input, weights, bias, h0, c0, resets=resets)
    zeros = torch.zeros_like(h0[:1])
    anew, *_ = forward(input[5:, :1], weights, bias, zeros, zeros)
    torch.testing.assert_close(output[5:, :1], anew)
    assert output[3:5, 0].isnan().any() and output[:, 1].isfinite().all()


@pytest.mark.parametrize(
    ("device", "way"),
    [
        ("cpu", "kernels"),
        ("cpu", "composite"),
        pytest.param("cuda", "recurrence", marks=needs_cuda),
        pytest.param("cuda", "steps", marks=needs_cuda),
        pytest.param("cuda", "composite", marks=needs_cuda),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [("padded", False, False), ("packed", True, True)], ids=str)
def test_half_types_lose_nothing_of_a_cell_that_has_grown(device, way, dtype, kind, monkeypatch):
    """Over 2000 steps, beside float32 with rounded inputs and results."""
    monkeypatch.setenv("LLTM_CUDA_RECURRENCE", str(int(way == "recurrence")))
    inputs = sequence_inputs(device, dtype, (2000, 3, 5, 32), kind)
    exact = sequence_reference(*double(inputs))
    in_float32 = [tensor.float() for tensor in inputs[:5]]
    best = [result.to(dtype) for result in forward(*in_float32, *inputs[5:])]
    ours = (composite(forward) if way == "composite" else forward)(*inputs)

    def error(result, e):
        return (result.cpu().double() - e).square().mean().sqrt()

    # The CUDA kernels round the products with input before they become gates.
    limits = (2 if device == "cpu" or way == "composite" else 3, 2) * 2
    for actual, rounded, e, limit in zip(ours, best, exact, limits, strict=True):
        assert error(actual, e) <= limit * error(rounded, e)


def test_called_by_many_threads_at_once():
    """More of them than cores, so that teams wait for threads that do not run; with one weight."""
    inputs = sequence_inputs(shape=(40, 3, 64, 256), requires_grad=True)

    def train(_):
        outputs = forward(*inputs)
        return [*outputs, *torch.autograd.grad(outputs[0].sum(), inputs[:5])]

    expected = train(0)
    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(train, range(64)):
            torch.testing.assert_close(results, expected, rtol=0, atol=0)


def memory_allocated(op, *inputs):
    """Bytes in use at the most, beyond the results."""
    with torch.profiler.profile(profile_memory=True) as profile:
        outputs = op(*inputs)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    in_use = list(itertools.accumulate(event.nbytes() for event in events))
    results = sum(output.nbytes for output in outputs)
    assert max(in_use) > results
    return max(in_use) - results


@each_dtype
@pytest.mark.parametrize(
    ("op", "inputs", "sizes"),
    [(forward, sequence_inputs, (64, 96)), (backward, sequence_backward_inputs, (16, 32))],
    ids=["inference", "backward"],
)
def test_memory_does_not_grow_with_time(dtype, op, inputs, sizes):
    def extra(time):
        return memory_allocated(op, *inputs(dtype=dtype, shape=(time, 4, *sizes)))

    assert extra(4000) <= extra(1000) + 4096


@each_dtype
def test_memory_of_inference_does_not_grow_with_threads(dtype):
    """Which share the rows of the batch."""
    inputs = sequence_inputs(dtype=dtype, shape=(16, 512, 64, 96))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = memory_allocated(forward, *inputs)
        torch.set_num_threads(16)
        assert memory_allocated(forward, *inputs) <= 1.25 * alone
    finally:
        torch.set_num_threads(threads)
