"""The limits of docs/limits.md that no other test shows: one that is gone needs no row there."""

import functools
import subprocess
import sys

import pytest
import torch
from common import environment, needs_torchscript
from layers import SLOW_OPTIONS
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import lltm_ops

PACKED = pack_sequence([torch.randn(length, 5) for length in (7, 4, 2)])
STATE = torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)


@pytest.fixture
def layer():
    torch._dynamo.reset()
    return lltm_ops.LLTM(5, 6)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_the_cell_state_grows_with_time_and_less_behind_a_closed_gate():
    torch.manual_seed(0)
    layer = lltm_ops.LLTM(32, 128, return_cells=True)
    sizes = []
    with torch.no_grad():
        for _ in range(3):
            cells = layer(torch.randn(1000, 4, 32))[2]
            sizes.append([cells[step].abs().mean() for step in (99, 999)])
            layer.bias_l0[:128] -= 2
    assert all(late > 5 * early for early, late in sizes)
    assert sizes[0][1] > 3 * sizes[1][1] > 9 * sizes[2][1]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, -6.2), (torch.float16, -8.3)])
def test_a_candidate_near_its_limit_passes_no_gradient(dtype, limit):
    zeros, ones = torch.zeros(1, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    gradients = []
    for pre_activation in (limit + 0.1, limit - 0.1):
        gates = torch.tensor([[0.5, 0.5, pre_activation]]).to(torch.float32)
        gates[0, 2].expm1_()
        d_bias = lltm_ops.backward(
            ones, ones, zeros, gates.to(dtype), ones, torch.zeros(3, 2, dtype=dtype), ones
        )[2]
        gradients.append(d_bias[2])
    assert gradients[0] > 0 == gradients[1]


def test_a_cell_state_overflows_in_float16_and_h_does_not(layer):
    large = torch.full((1, 3, 6), 65000.0)
    with torch.no_grad():
        layer.bias_l0.fill_(30)
        output, (_, c_n) = layer.half()(torch.zeros(100, 3, 5).half(), (large.half(), large.half()))
    assert c_n.isinf().all() and output.isfinite().all()


def test_a_cell_state_changed_in_place_is_missed_in_backward():
    for kind in (torch.nn.LSTMCell, lltm_ops.LLTMCell):
        h, c = kind(5, 6)(torch.randn(3, 5))
        c.mul_(2)
        if kind is torch.nn.LSTMCell:
            (h + c).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (h + c).sum().backward()


def test_each_number_of_steps_has_a_graph_where_the_layer_runs_step_by_step():
    """Up to a limit of torch.compile: what comes after it runs eagerly."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    layer = torch.compile(lltm_ops.LLTM(5, 6, zoneout=0.1).eval(), backend=counter)
    for time in range(2, 12):
        layer(torch.zeros(time, 3, 5))
    assert counter.frame_count == torch._dynamo.config.recompile_limit == 8


def test_export_leaves_no_time_open_where_the_layer_runs_step_by_step():
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    with pytest.raises(Exception, match="Constraints violated"):
        layer = lltm_ops.LLTM(5, 6, layer_norm=True)
        torch.export.export(layer, (torch.zeros(7, 3, 5),), dynamic_shapes=shapes)


def test_transforms_of_sequences_run_a_loop_over_the_steps(layer):
    input = torch.randn(7, 3, 5)
    with torch.profiler.profile() as profile:
        torch.func.jvp(lambda input: layer(input)[0], (input,), (input,))
    assert [event.name for event in profile.events()].count("aten::elu") >= 7


def loss_of(data, batch_sizes):
    weights, bias = torch.ones(18, 11), torch.ones(18)
    states = torch.zeros(3, 6), torch.zeros(3, 6)
    return lltm_ops.sequence_forward(data, weights, bias, *states, batch_sizes)[0].sum()


def output_of(layer):
    layer.requires_grad_(False)
    return lambda data, sizes: layer(data, STATE, None, sizes)[0]


READ_LENGTHS = {
    "grad": lambda data, sizes: torch.func.grad(loss_of)(data, sizes),
    "jvp": lambda data, sizes: torch.func.jvp(lambda d: loss_of(d, sizes), (data,), (data,))[1],
    "vmap": lambda data, sizes: torch.func.vmap(loss_of, (0, None))(data.expand(2, 13, 5), sizes),
    **{str(slow): output_of(lltm_ops.LLTM(5, 6, **slow)) for slow in SLOW_OPTIONS},
}


@pytest.mark.parametrize("how", READ_LENGTHS)
@pytest.mark.parametrize(
    ("tracer", "refusal"),
    [
        pytest.param(torch.jit.trace, "under torch.jit.trace, which", marks=needs_torchscript),
        (lambda function, example: make_fx(function)(*example), "out of a tracing tensor"),
    ],
    ids=["jit.trace", "make_fx"],
)
def test_a_trace_does_not_keep_the_lengths_of_its_example(how, tracer, refusal):
    example = PACKED.data, PACKED.batch_sizes
    READ_LENGTHS[how](*example)
    with pytest.raises(RuntimeError, match=refusal):
        tracer(READ_LENGTHS[how], example)


@pytest.mark.parametrize("how", ["grad", "jvp", "vmap"])
def test_a_transform_of_a_packed_sequence_is_no_graph(layer, how):
    """The lengths break the graph, and what reads them runs eagerly."""
    expected = READ_LENGTHS[how](PACKED.data, PACKED.batch_sizes)
    graphs = torch.compile(READ_LENGTHS[how], backend="aot_eager")
    torch.testing.assert_close(graphs(PACKED.data, PACKED.batch_sizes), expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="_values_of_batch_sizes"):
        compiled(READ_LENGTHS[how])(PACKED.data, PACKED.batch_sizes)


def test_a_compiled_graph_has_no_second_derivative(layer):
    input = torch.randn(7, 3, 5, requires_grad=True)
    output, _ = compiled(layer)(input)
    (gradient,) = torch.autograd.grad(output.square().sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_compiled_autograd_has_no_second_derivative(layer):
    input = torch.randn(7, 3, 5, requires_grad=True)
    compiler = functools.partial(torch.compile, backend="eager")
    enabled = torch._dynamo.compiled_autograd._enable(compiler)
    with enabled, pytest.raises(RuntimeError, match="while holding the GIL"):
        torch.autograd.grad(layer(input)[0].sum(), input, create_graph=True)


def test_a_packed_sequence_without_a_state_breaks_the_graph(layer):
    assert torch._dynamo.explain(layer)(PACKED).graph_break_count > 0
    assert torch._dynamo.explain(layer)(PACKED, STATE).graph_break_count == 0
    torch._dynamo.reset()
    ours, exact = compiled(layer)(PACKED)[0], layer(PACKED)[0]
    torch.testing.assert_close(ours.data, exact.data)


@pytest.mark.parametrize("strict", [False, True])
def test_a_packed_sequence_without_a_state_is_exported_in_strict_mode(layer, strict):
    arguments = PACKED.data, None, None, PACKED.batch_sizes
    dynamic = {0: torch.export.Dim.DYNAMIC}
    shapes = dynamic, None, None, dynamic

    def export():
        return torch.export.export(layer, arguments, dynamic_shapes=shapes, strict=strict)

    if strict:
        torch.testing.assert_close(export().module()(*arguments)[0], layer(*arguments)[0])
    else:
        with pytest.raises(Exception, match="data-dependent"):
            export()


@pytest.mark.parametrize("rnn", [torch.nn.LSTM(5, 6), lltm_ops.LLTM(5, 6)], ids=str)
def test_a_model_that_packs_is_not_exported(rnn):
    class Packs(torch.nn.Module):
        def forward(self, input, lengths):
            return rnn(pack_padded_sequence(input, lengths), STATE)[0].data

    with pytest.raises(Exception, match=r"data-dependent|batch_sizes to have dtype Long"):
        torch.export.export(Packs(), (torch.randn(7, 3, 5), torch.tensor([7, 4, 2])))


@pytest.mark.slow
@torch.no_grad()
def test_a_package_of_aot_inductor_is_made_for_the_strides_of_its_example(monkeypatch, tmp_path):
    layer = lltm_ops.LLTM(5, 6, num_layers=2)
    input, hx = torch.randn(7, 3, 5), (torch.randn(2, 3, 6), torch.randn(2, 3, 6))
    program = torch.export.export(layer, (input, hx))
    path = torch._inductor.aoti_compile_and_package(program, package_path=f"{tmp_path}/layer.pt2")
    others = tuple(state.transpose(0, 1).contiguous().transpose(0, 1) for state in hx)
    output = torch._inductor.aoti_load_package(path)(input, others)[0]
    assert not torch.allclose(output, layer(input, hx)[0])
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    with pytest.raises(RuntimeError, match="unmatched stride value"):
        torch._inductor.aoti_load_package(path)(input, others)


@needs_torchscript
def test_a_scripted_layer_keeps_parameters_that_are_replaced(layer):
    scripted, input = torch.jit.script(layer), torch.randn(7, 3, 5)
    before = scripted(input)[0]
    others = lltm_ops.LLTM(5, 6)
    scripted.load_state_dict(others.state_dict(), assign=True)
    assert torch.equal(scripted(input)[0], before)
    scripted = torch.jit.script(layer)
    scripted.load_state_dict(others.state_dict())
    assert torch.equal(scripted(input)[0], others(input)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantize_dynamic_leaves_our_modules_as_they_are(layer):
    model = torch.nn.ModuleList([torch.nn.LSTM(5, 6), layer, lltm_ops.LLTMCell(5, 6)])
    quantized = torch.ao.quantization.quantize_dynamic(model, {type(module) for module in model})
    assert [type(module) for module in quantized[1:]] == [lltm_ops.LLTM, lltm_ops.LLTMCell]
    assert type(quantized[0]) is not torch.nn.LSTM


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_stack_of_96_kib_is_large_enough(dtype):
    """For the thread that calls, and for those of OpenMP."""
    code = f"""
import threading, torch, lltm_ops
torch.set_num_threads(2)
layer, input = lltm_ops.LLTM(512, 512, dtype={dtype}), torch.randn(4, 16, 512, dtype={dtype})
threading.stack_size(96 << 10)
thread = threading.Thread(target=lambda: layer(input)[0].sum().backward())
thread.start()
thread.join()
assert layer.weights_l0.grad is not None"""
    variables = environment(OMP_STACKSIZE="96k")
    subprocess.run([sys.executable, "-c", code], check=True, env=variables)
