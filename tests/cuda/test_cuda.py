"""What only a GPU can show: streams, graphs, synchronisation, large sizes. The rest of the suite
runs on the GPU too."""

import contextlib
import os
import sys

import pytest
import torch
from common import (
    CELL,
    PADDED,
    ROOT,
    assert_sequences_match,
    double,
    each_operator,
    each_sequence_kind,
    gradients,
    needs_cuda,
    printed,
    sample_inputs,
    sequence_backward_inputs,
    sequence_inputs,
)

import lltm_ops

pytestmark = needs_cuda


@contextlib.contextmanager
def errors_on_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_replay(call, inputs):
    """A captured call is replayed after its inputs have changed in place."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        for tensor in inputs:
            tensor.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, call())


@pytest.fixture(params=["0", "1"], ids=["steps", "recurrence"])
def way(request, monkeypatch):
    """Both ways of a sequence in half types."""
    monkeypatch.setenv("LLTM_CUDA_RECURRENCE", request.param)


@pytest.fixture(params=["steps-float32", "steps-bfloat16", "recurrence-bfloat16"])
def dtype_of_way(request, monkeypatch):
    """The recurrence takes half types, and of these some sizes."""
    way, dtype = request.param.split("-")
    monkeypatch.setenv("LLTM_CUDA_RECURRENCE", str(int(way == "recurrence")))
    return getattr(torch, dtype)


@each_operator
def test_runs_on_the_current_stream(operator, dtype_of_way):
    """A value that an earlier kernel of the stream writes late must be seen."""
    inputs = operator.inputs("cuda", dtype_of_way, (6, 16, 32, 128))
    expected = operator.forward(*inputs)
    late = torch.zeros_like(inputs[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(inputs[0])
        outputs = operator.forward(late, *inputs[1:])
    torch.cuda.synchronize()
    torch.testing.assert_close(outputs, expected)


def results_on_two_streams(call):
    """Makes one call, then twenty on two streams. Returns the twenty results, and the one."""
    expected = call()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for stream in streams * 10:
        with torch.cuda.stream(stream):
            results.append(call())
    torch.cuda.synchronize()
    return results, expected


@pytest.mark.parametrize("operator", [CELL, PADDED], ids=str)
def test_two_streams_at_once(operator, dtype_of_way):
    """Each of two grids of the recurrence needs all its blocks to run at once."""
    inputs = operator.inputs("cuda", dtype_of_way, (200, 64, 32, 512))
    results, expected = results_on_two_streams(lambda: operator.forward(*inputs))
    for outputs in results:
        torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def test_layers_on_two_streams(dtype_of_way):
    """Training of two layers in both directions."""
    sizes = {"num_layers": 2, "bidirectional": True}
    layer = lltm_ops.LLTM(33, 256, **sizes, device="cuda", dtype=dtype_of_way)
    input = torch.randn(100, 16, 33, device="cuda", dtype=dtype_of_way)

    def train():
        output, _ = layer(input)
        return output, *torch.autograd.grad(output.square().mean(), [*layer.parameters()])

    results, expected = results_on_two_streams(train)
    for outputs in results:
        for ours, once in zip(outputs, expected, strict=True):
            torch.testing.assert_close(ours, once)


@each_operator
def test_does_not_synchronise(operator, dtype_of_way):
    inputs = operator.inputs("cuda", dtype_of_way, (5, 3, 5, 32), requires_grad=True)
    with errors_on_synchronisation():
        for _ in range(2):
            outputs = operator.forward(*inputs)
            torch.autograd.backward(outputs, [output.detach() for output in outputs])


@each_operator
def test_graph_capture_and_replay(operator, dtype_of_way):
    inputs = operator.inputs("cuda", dtype_of_way, (5, 3, 5, 32), requires_grad=True)

    def step():
        outputs = operator.forward(*inputs)
        return (*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), inputs[:5]))

    check_replay(step, inputs[:5])


def test_the_recurrence_runs(monkeypatch):
    """Without this, the tests of both ways could test one of them twice."""
    monkeypatch.setenv("LLTM_CUDA_RECURRENCE", "1")
    inputs = sequence_inputs("cuda", torch.bfloat16, (5, 3, 5, 32), requires_grad=True)
    before = torch.ops.lltm._recurrence_launches()
    outputs = torch.ops.lltm.sequence_forward(*inputs)
    torch.autograd.backward(outputs, [output.detach() for output in outputs])
    assert torch.ops.lltm._recurrence_launches() == [before[0], before[1] + 2]


FIRST_CALL = """
import torch
from common import sequence_inputs
inputs = sequence_inputs("cuda", torch.bfloat16, (5, 3, 5, 32), requires_grad=True)

def step():
    outputs = torch.ops.lltm.sequence_forward(*inputs)
    return (*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), inputs[:5]))

# cuBLAS cannot begin in a capture, neither in this thread nor in that of backward.
square = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
(square @ square).sum().backward()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = step()
assert torch.ops.lltm._recurrence_launches() == [0, 2]
graph.replay()
torch.testing.assert_close(captured, step())
"""


def test_the_first_call_of_a_process_is_captured():
    """It loads the kernels."""
    variables = os.environ | {"LLTM_CUDA_RECURRENCE": "1", "CUDA_MODULE_LOADING": "LAZY"}
    printed(sys.executable, "-c", FIRST_CALL, cwd=ROOT / "tests" / "support", env=variables)


def test_a_batch_that_does_not_fit_runs_step_by_step(monkeypatch):
    monkeypatch.setenv("LLTM_CUDA_RECURRENCE", "1")
    inputs = sequence_inputs("cuda", torch.bfloat16, (3, 20_000, 5, 64))
    before = torch.ops.lltm._recurrence_launches()
    outputs = torch.ops.lltm._sequence_forward_with_gates(*inputs)
    assert torch.ops.lltm._recurrence_launches() == [before[0] + 1, before[1]]
    exact = torch.ops.lltm._sequence_forward_with_gates(*double(inputs))
    assert_sequences_match(outputs, exact, torch.bfloat16)


# What the recurrence takes. On 132 multiprocessors two of these have four tiles a block. The last
# does not fit there, and the rows of its weights begin at odd places, so its steps copy them.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (3, 1, 3, 32),
        (9, 11, 5, 64),
        (5, 16, 8, 1024),
        (5, 64, 8, 1024),
        (7, 200, 8, 256),
        (3, 128, 7, 1024),
    ],
    ids=str,
)
@each_sequence_kind
def test_half_types_match_reference(dtype, shape, kind, way):
    inputs = sequence_inputs("cuda", dtype, shape, kind)
    outputs = torch.ops.lltm._sequence_forward_with_gates(*inputs)
    exact = torch.ops.lltm._sequence_forward_with_gates(*double(inputs))
    assert_sequences_match(outputs, exact, dtype)
    assert_sequences_match(torch.ops.lltm.sequence_forward(*inputs), exact[:-1], dtype)
    inputs = sequence_backward_inputs("cuda", dtype, shape, kind)
    exact = torch.ops.lltm.sequence_backward(*double(inputs))
    assert_sequences_match(torch.ops.lltm.sequence_backward(*inputs), exact, dtype)


@each_sequence_kind
def test_sequences_repeat_their_bits(kind, dtype_of_way):
    inputs = sequence_inputs("cuda", dtype_of_way, (64, 24, 16, 512), kind)
    first = torch.ops.lltm._sequence_forward_with_gates(*inputs)
    for _ in range(20):
        for again, once in zip(
            torch.ops.lltm._sequence_forward_with_gates(*inputs), first, strict=True
        ):
            assert torch.equal(again, once)


def test_batch_above_the_limit_of_a_grid():
    inputs = sample_inputs("cuda", shape=(70_001, 1, 3), requires_grad=True)
    exact = lltm_ops.reference(*double(inputs))
    CELL.assert_match(lltm_ops.forward(*inputs), exact, torch.float32)
    copies = double(inputs)
    for ours, exact in zip(
        gradients(lltm_ops.forward, inputs), gradients(lltm_ops.reference, copies), strict=True
    ):
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=1e-3, atol=1e-2)


def test_more_elements_than_a_32_bit_index_reaches():
    """3 * batch * state_size is over 2^31; the last rows are compared."""
    batch, state_size = 2**21 + 3, 352
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    inputs = sample_inputs("cuda", torch.bfloat16, (1, 2, state_size))
    inputs[0] = torch.randn(batch, 2, device="cuda", dtype=torch.bfloat16)
    inputs[3] = inputs[3].expand(batch, -1)
    inputs[4] = inputs[4].expand(batch, -1)
    gates = torch.ops.lltm._forward_with_gates(*inputs)[2]
    assert gates.numel() > 2**31
    new_h, new_cell = lltm_ops.forward(*inputs)
    tail = [t[-5:] if t.shape[0] == batch else t for t in inputs]
    for ours, exact in zip((new_h, new_cell), lltm_ops.reference(*double(tail)), strict=True):
        torch.testing.assert_close(ours[-5:].cpu().double(), exact, rtol=3e-2, atol=3e-2)
    grads = lltm_ops.backward(
        new_h, new_cell, new_cell, gates, inputs[0], inputs[1], inputs[3], (True,) + (False,) * 4
    )
    rows = (new_h, new_cell, new_cell, gates, inputs[0])
    tail = [tensor[-5:].cpu().double() for tensor in rows]
    exact = lltm_ops.backward(*tail, inputs[1].cpu().double(), inputs[3][-5:].cpu().double())
    torch.testing.assert_close(grads[0][-5:].cpu().double(), exact[0], rtol=5e-2, atol=5e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_operator
def test_device_guard(operator, dtype_of_way):
    inputs = operator.inputs("cuda:1", dtype_of_way, (5, 3, 5, 32), requires_grad=True)
    with torch.cuda.device(0):
        outputs = operator.forward(*inputs)
        grads = torch.autograd.grad(outputs, inputs[:5], [output.detach() for output in outputs])
    assert {tensor.device for tensor in (*outputs, *grads)} == {torch.device("cuda:1")}
    copies = double(inputs)
    exact = operator.forward(*copies)
    operator.assert_match(outputs, exact, dtype_of_way)
    exact_grads = torch.autograd.grad(exact, copies[:5], [output.detach() for output in exact])
    operator.assert_match(grads, exact_grads, dtype_of_way, rows=3)
