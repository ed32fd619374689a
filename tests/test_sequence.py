"""lltm::sequence_forward computes the cell over whole sequences: values, gradients of any order,
memory. Registration, errors and PyTorch's subsystems stand with those of the cell."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import (
    DTYPES,
    LAYOUTS,
    SEQUENCE_ARGUMENTS,
    SEQUENCE_BACKWARD_ARGUMENTS,
    SEQUENCE_SHAPES,
    assert_sequences_match,
    composite,
    double,
    each_device,
    each_dtype,
    each_sequence_kind,
    gradients,
    sequence_backward_inputs,
    sequence_inputs,
    sequence_reference,
)
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import lltm_ops

forward = torch.ops.lltm.sequence_forward
backward = torch.ops.lltm.sequence_backward
SMALL = (3, 2, 2, 3)


# In float16 the gradients of a thousand steps overflow.
DTYPES_AND_SHAPES = [
    (dtype, shape)
    for dtype, shape in itertools.product(DTYPES, SEQUENCE_SHAPES)
    if shape[0] < 1000 or dtype != torch.float16
]


@each_device
@pytest.mark.parametrize(("dtype", "shape"), DTYPES_AND_SHAPES, ids=str)
@each_sequence_kind
def test_values_and_gradients_match_reference(device, dtype, shape, kind):
    inputs = sequence_inputs(device, dtype, shape, kind, requires_grad=True)
    exact_inputs = double(inputs)
    assert_sequences_match(forward(*inputs), sequence_reference(*exact_inputs), dtype)
    expected = gradients(sequence_reference, exact_inputs)
    zeros = [torch.zeros_like(t) for t in exact_inputs[:5]]
    expected = [z if e is None else e for e, z in zip(expected, zeros, strict=True)]
    assert_sequences_match(gradients(forward, inputs), expected, dtype)


@each_device
@pytest.mark.parametrize("shape", [(20, 17, 6, 40), (8, 2, 5, 1100)], ids=str)
@each_sequence_kind
def test_inference_computes_the_same(device, shape, kind):
    inputs = sequence_inputs(device, shape=shape, kind=kind)
    trained = torch.ops.lltm._sequence_forward_with_gates(*inputs)
    for ours, exact in zip(forward(*inputs), trained[:2], strict=True):
        assert torch.equal(ours, exact)


@each_device
def test_a_sequence_is_a_loop_over_the_cell(device):
    input, weights, bias, h, cell, *_ = sequence_inputs(device, shape=(20, 3, 6, 40))
    output, cells = forward(input, weights, bias, h, cell)
    for t, x in enumerate(input):
        h, cell = lltm_ops.forward(x, weights, bias, h, cell)
        torch.testing.assert_close(output[t], h)
        torch.testing.assert_close(cells[t], cell)


def test_packed_is_what_each_sequence_gives_alone():
    lengths = [9, 9, 4, 1]
    input, weights, bias, h0, c0, *_ = sequence_inputs(shape=(9, 4, 5, 33))
    packed = pack_padded_sequence(input, lengths)
    output, _ = forward(packed.data, weights, bias, h0, c0, packed.batch_sizes)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone, _ = forward(input[:length, one], weights, bias, h0[one], c0[one])
        places = [int(packed.batch_sizes[:t].sum()) + row for t in range(length)]
        torch.testing.assert_close(output[places], alone[:, 0])


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
        [torch.full((12, 9), float("nan")) for _ in range(50)]  # what fresh memory may hold
        results.append([*outputs, *torch.autograd.grad(outputs[0].sum(), tensors)])
    for ours, exact in zip(*results, strict=True):
        assert torch.equal(ours, exact)


def test_a_reset_is_any_byte_but_zero():
    input, weights, bias, h0, c0, *_ = sequence_inputs(requires_grad=True)
    bytes_of_resets = torch.randint(0, 2, (5, 3), dtype=torch.uint8) * 255
    results = []
    for resets in (bytes_of_resets.view(torch.bool), bytes_of_resets.bool()):
        output, _ = forward(input, weights, bias, h0, c0, resets=resets)
        results.append([output, *torch.autograd.grad(output.sum(), [input, weights, h0])])
    for ours, exact in zip(*results, strict=True):
        assert torch.equal(ours, exact)


def test_a_reset_begins_a_new_sequence_also_after_what_is_not_finite():
    input, weights, bias, h0, c0, *_ = sequence_inputs(shape=(12, 2, 5, 33))
    input[3, 0] = float("nan")
    resets = torch.zeros(12, 2, dtype=torch.bool)
    resets[5, 0] = True
    output, _ = forward(input, weights, bias, h0, c0, resets=resets)
    zeros = torch.zeros_like(h0[:1])
    anew, _ = forward(input[5:, :1], weights, bias, zeros, zeros)
    torch.testing.assert_close(output[5:, :1], anew)
    assert output[3:5, 0].isnan().any() and output[:, 1].isfinite().all()


@each_device
@each_sequence_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_argument_in_each_layout(device, kind, layout):
    for name in SEQUENCE_ARGUMENTS:
        inputs = sequence_inputs(device, shape=(5, 3, 6, 4), kind=kind)
        position = SEQUENCE_ARGUMENTS.index(name)
        if not isinstance(inputs[position], torch.Tensor):
            continue
        if name == "batch_sizes" and layout == "expanded":
            continue  # would be other sizes
        inputs[position] = LAYOUTS[layout](inputs[position])
        before = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
        assert_sequences_match(forward(*inputs), sequence_reference(*double(inputs)), torch.float32)
        for tensor, copy in zip(inputs, before, strict=True):
            assert tensor is copy or torch.equal(tensor, copy)


@each_device
@each_sequence_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_with_each_argument_in_each_layout(device, kind, layout):
    for name in SEQUENCE_BACKWARD_ARGUMENTS[:8]:
        inputs = sequence_backward_inputs(device, shape=(5, 3, 6, 4), kind=kind)
        position = SEQUENCE_BACKWARD_ARGUMENTS.index(name)
        inputs[position] = LAYOUTS[layout](inputs[position])
        expected = composite(backward)(*double(inputs), [True] * 5)
        assert_sequences_match(backward(*inputs), expected, torch.float32)


@each_device
@each_dtype
@each_sequence_kind
def test_a_device_without_kernels_takes_the_composite_formulas(device, dtype, kind):
    inputs = sequence_inputs(dtype=dtype, kind=kind)
    outputs = composite(forward)(*inputs)
    assert_sequences_match(outputs, sequence_reference(*double(inputs)), dtype)
    inputs = sequence_backward_inputs(dtype=dtype, kind=kind)
    ours = composite(backward)(*inputs, [True] * 5)
    assert_sequences_match(ours, backward(*double(inputs)), dtype)


def with_options(op, inputs):
    """op as a function of the five tensors alone, for what differentiates by all arguments."""
    return lambda *tensors: op(*tensors, *inputs[len(tensors) :])


@each_device
@each_sequence_kind
def test_gradcheck(device, kind):
    inputs = sequence_inputs(device, torch.float64, SMALL, kind, requires_grad=True)
    assert torch.autograd.gradcheck(
        with_options(forward, inputs),
        inputs[:5],
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@each_device
@each_sequence_kind
def test_gradgradcheck(device, kind):
    inputs = sequence_inputs(device, torch.float64, SMALL, kind, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        with_options(forward, inputs), inputs[:5], check_fwd_over_rev=True
    )


@each_device
@each_sequence_kind
@pytest.mark.parametrize("name", ["_sequence_forward_with_gates", "sequence_backward"])
def test_gradcheck_of_internal_operators(device, kind, name):
    sample = sequence_backward_inputs if name == "sequence_backward" else sequence_inputs
    inputs = sample(device, torch.float64, SMALL, kind, requires_grad=True)
    tensors = [t for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point()]
    op = with_options(getattr(torch.ops.lltm, name), inputs)
    assert torch.autograd.gradcheck(op, tensors, check_forward_ad=True)


@each_device
@pytest.mark.parametrize("used", [0, 1], ids=["output", "cells"])
def test_gradient_of_one_output(device, used):
    inputs = sequence_inputs(device, torch.float64, requires_grad=True)
    actual = torch.autograd.grad(forward(*inputs)[used][-1].sum(), inputs[:5])
    exact_inputs = double(inputs)
    loss = sequence_reference(*exact_inputs)[used][-1].sum()
    assert_sequences_match(actual, torch.autograd.grad(loss, exact_inputs[:5]), torch.float64)


@each_device
@pytest.mark.parametrize("required", list(itertools.product([False, True], repeat=5)))
def test_any_subset_of_gradients(device, required):
    inputs = sequence_inputs(device, torch.float64, (9, 3, 5, 4), ("padded", False, True))
    for tensor, flag in zip(inputs, required, strict=False):
        tensor.requires_grad_(flag)
    if not any(required):
        assert not any(output.requires_grad for output in forward(*inputs))
        return
    expected = gradients(sequence_reference, double(inputs))
    for ours, exact in zip(gradients(forward, inputs), expected, strict=True):
        assert (ours is None) == (exact is None)
        if exact is not None:
            assert_sequences_match([ours], [exact], torch.float64)


@each_device
@pytest.mark.parametrize("mask", list(itertools.product([False, True], repeat=5)))
def test_output_mask(device, mask):
    inputs = sequence_backward_inputs(device, shape=(9, 3, 5, 4), kind=("packed", True, True))
    everything = backward(*inputs)
    for ours, all_asked, asked in zip(backward(*inputs, mask), everything, mask, strict=True):
        assert (ours is not None) == asked
        if asked:
            assert torch.equal(ours, all_asked)


@each_device
def test_accuracy_over_a_thousand_steps_is_no_worse_than_twice_eager(device):
    """float32 against float64, of outputs and of gradients."""
    inputs = sequence_inputs(device, shape=(1000, 1, 32, 64), requires_grad=True)
    # A recurrence that keeps what it computed, and neither forgets nor explodes.
    inputs = [inputs[0].detach() * 0.3, *(t.detach() * 0.5 for t in inputs[1:5]), *inputs[5:]]

    def results(op, inputs):
        inputs = [t.clone().requires_grad_() for t in inputs[:5]]
        return [*op(*inputs), *gradients(op, inputs)]

    exact = results(sequence_reference, double(inputs))

    def errors(op):
        return torch.stack(
            [
                (ours.detach().cpu().double() - e.detach()).square().mean().sqrt()
                for ours, e in zip(results(op, inputs), exact, strict=True)
            ]
        )

    eager = errors(sequence_reference)
    scales = torch.stack([e.detach().square().mean().sqrt() for e in exact])
    assert torch.all(errors(forward) <= 2 * eager + torch.finfo(torch.float32).eps * scales / 8)


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["kernels", "composite"])
@pytest.mark.parametrize("kind", [("padded", False, False), ("packed", True, True)], ids=str)
def test_half_types_lose_nothing_of_a_cell_that_has_grown(device, dtype, way, kind):
    """Over 2000 steps, beside float32 with rounded inputs and results."""
    inputs = sequence_inputs(device, dtype, (2000, 3, 5, 32), kind)
    exact = sequence_reference(*double(inputs))
    in_float32 = [tensor.float() for tensor in inputs[:5]]
    best = [result.to(dtype) for result in forward(*in_float32, *inputs[5:])]
    ours = (composite(forward) if way == "composite" else forward)(*inputs)

    def error(result, e):
        return (result.cpu().double() - e).square().mean().sqrt()

    # Step by step on CUDA the sums are rounded before they become gates.
    limits = (3 if device == "cuda" else 2, 2)
    for actual, rounded, e, limit in zip(ours, best, exact, limits, strict=True):
        assert error(actual, e) <= limit * error(rounded, e)


@each_device
@pytest.mark.parametrize("shape", [(40, 1, 64, 128), (30, 40, 33, 130)], ids=str)
def test_results_are_the_same_from_run_to_run(device, shape):
    inputs = sequence_inputs(device, shape=shape, requires_grad=True)
    first = [*forward(*inputs), *torch.autograd.grad(forward(*inputs)[0].sum(), inputs[:5])]
    for _ in range(3):
        outputs = forward(*inputs)
        again = [*outputs, *torch.autograd.grad(outputs[0].sum(), inputs[:5])]
        for ours, before in zip(again, first, strict=True):
            assert torch.equal(ours, before)


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize(
    "shape", [(40, 1, 256, 512), (40, 2, 64, 1100), (30, 40, 64, 130), (6, 3, 100, 400)], ids=str
)
def test_results_do_not_depend_on_the_number_of_threads(form, shape):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            inputs = sequence_inputs(shape=shape, kind=(form, False, True), requires_grad=True)
            outputs = forward(*inputs)
            results.append([*outputs, *torch.autograd.grad(outputs[0].sum(), inputs[:5])])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for one, many in zip(results[0], other, strict=True):
            assert torch.equal(one, many)


def test_called_by_many_threads_at_once():
    """More of them than cores, so that teams wait for threads that do not run."""
    inputs = sequence_inputs(shape=(40, 3, 64, 256))
    expected = forward(*inputs)
    with ThreadPoolExecutor(8) as pool:
        for outputs in pool.map(lambda _: forward(*inputs), range(64)):
            for ours, exact in zip(outputs, expected, strict=True):
                assert torch.equal(ours, exact)


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
def test_memory_of_inference_does_not_grow_with_time(dtype):
    def extra(time):
        return memory_allocated(forward, *sequence_inputs(dtype=dtype, shape=(time, 4, 64, 96)))

    assert extra(4000) <= extra(400) + 4096


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


@each_dtype
def test_memory_of_backward_does_not_grow_with_time(dtype):
    def extra(time):
        inputs = sequence_backward_inputs(dtype=dtype, shape=(time, 4, 16, 32))
        return memory_allocated(backward, *inputs)

    assert extra(4000) <= extra(1000) + 4096


@each_sequence_kind
def test_saves_the_gates_and_nothing_else_beyond_inputs_and_outputs(kind):
    inputs = sequence_inputs(shape=(7, 3, 5, 4), kind=kind, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = forward(*inputs)
    tensors = [t for t in (*inputs, *outputs) if isinstance(t, torch.Tensor)]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    extra = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in known]
    assert [tuple(tensor.shape) for tensor in extra] == [(*outputs[0].shape[:-1], 3 * 4)]


@pytest.mark.parametrize("name", ["input", "weights", "bias", "h0", "output", "cells"])
def test_in_place_change_of_a_saved_tensor_is_caught(name):
    inputs = [t * 1 if i < 5 else t for i, t in enumerate(sequence_inputs(requires_grad=True))]
    output, cells = forward(*inputs)
    named = dict(zip(SEQUENCE_ARGUMENTS, inputs, strict=True)) | {"output": output, "cells": cells}
    with torch.no_grad():
        named[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@each_device
@each_sequence_kind
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device, kind, use_reentrant):
    inputs = sequence_inputs(device, torch.float64, kind=kind, requires_grad=True)
    copies = [t.detach().clone().requires_grad_() for t in inputs[:5]] + inputs[5:]
    actual = gradients(
        lambda *args: checkpoint(forward, *args, use_reentrant=use_reentrant), inputs
    )
    for ours, exact in zip(actual, gradients(forward, copies), strict=True):
        torch.testing.assert_close(ours, exact)


def test_batches_of_many_sizes_keep_no_memory():
    """OneDNN keeps each kernel that it generates, so they have to be few, as those of the cell."""
    import resource
    from pathlib import Path

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def run(batch: int) -> None:
        inputs = sequence_inputs(shape=(9, batch, 16, 16), requires_grad=True)
        torch.autograd.grad(forward(*inputs)[0].sum(), inputs[:5])

    run(600)
    before = resident()
    for batch in range(16, 600, 2):
        run(batch)
    assert resident() - before < 50e6
