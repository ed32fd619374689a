import pytest
import torch
from torch.autograd import forward_ad

from my_ops import ema_update_

OP = torch.ops.my_ops.ema_update_.default
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
DECAY = 0.75
# For what begins with a tensor of 6 x 8.
VIEWS = {
    "contiguous": lambda t: t,
    "transposed": torch.t,
    "columns": lambda t: t[:, 1::2],
    "one": lambda t: t[3, 4],
    "none": lambda t: t[:0],
    "long": lambda t: t.repeat(700, 1),
}


def reference(state, input, decay=DECAY):
    return (decay * state.double() + (1 - decay) * input.double()).to(state.dtype)


def update(state, input):
    """The tests call the operator with the numbers that the reference has."""
    return ema_update_(state, input, DECAY)


@each_dtype
@pytest.mark.parametrize("view", VIEWS)
def test_any_state_is_written(dtype, view):
    whole = torch.randn(6, 8, dtype=dtype)
    before, state = whole.clone(), VIEWS[view](whole)
    input = torch.randn(*state.shape, 2, dtype=dtype)[..., 0]
    expected = reference(state, input)
    assert update(state, input) is state
    torch.testing.assert_close(state, expected)
    VIEWS[view](before).copy_(state)
    assert torch.equal(whole, before)  # nothing else was written


@each_dtype
@pytest.mark.parametrize("view", VIEWS)
def test_opcheck(dtype, view):
    state, input = (VIEWS[view](torch.randn(6, 8, dtype=dtype)) for _ in range(2))
    torch.library.opcheck(OP, (state, input.requires_grad_(), DECAY))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("view", ["contiguous", "transposed", "columns"])
def test_a_backward_that_saved_the_state_raises(compiled, view):
    """opcheck does not see this: without a new version, the gradient is that of the new state."""
    function = torch.compile(update, fullgraph=True) if compiled else update
    weights, state = torch.ones(6, 8, requires_grad=True), torch.randn(6, 8)
    result = (weights * state).sum()
    function(VIEWS[view](state), VIEWS[view](torch.randn(6, 8)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def dual(state):
    return forward_ad.make_dual(state, torch.ones_like(state))


NEED_GRADIENTS = {
    "leaf": lambda state: state.requires_grad_(),
    "result": lambda state: state.requires_grad_() * 2,
    "view": lambda state: state.requires_grad_()[1:],
    "tangent": dual,
}


@pytest.mark.parametrize("kind", NEED_GRADIENTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_state_that_needs_a_gradient_is_refused(kind, compiled):
    if kind == "tangent" and compiled:
        pytest.skip("torch.compile takes no tangents as arguments")
    with forward_ad.dual_level():
        state = NEED_GRADIENTS[kind](torch.ones(3, 2))
        function = torch.compile(update, fullgraph=True) if compiled else update
        with pytest.raises(Exception, match="expected a state that needs no gradient"):
            function(state, torch.zeros_like(state))
    assert (state != 0).all()


def test_a_parameter_is_written_where_nothing_is_recorded():
    """An optimizer does that."""
    parameter, input = torch.ones(3, requires_grad=True), torch.randn(3)
    with torch.no_grad():
        update(parameter, input)
    torch.testing.assert_close(parameter.detach(), reference(torch.ones(3), input))
    with torch.inference_mode():
        torch.testing.assert_close(update(torch.ones(3), input), parameter.detach())


MEMORY = {
    "expanded": lambda t: (t[:1].expand(6, 8), torch.ones(6, 8)),
    "overlapping rows": lambda t: (t.as_strided((3, 4), (2, 1)), torch.ones(3, 4)),
    "itself": lambda t: (t, t),
    "next row": lambda t: (t[1:], t[:-1]),
    "between": lambda t: (t[:, ::2], t[:, 1::2]),
}


@pytest.mark.parametrize("memory", MEMORY)
def test_overlaps_are_refused(memory):
    whole = torch.randn(6, 8)
    before = whole.clone()
    with pytest.raises(RuntimeError, match=r"expected (state to have|input to share no) memory"):
        update(*MEMORY[memory](whole))
    assert torch.equal(whole, before)
    update(whole[1:], whole[0].expand(5, 8).clone())  # as the sentence says


PATHS = {
    "eager": update,
    "gradient": lambda state, input: update(state, input.double().requires_grad_()),
    "inference": torch.inference_mode()(update),
    "vmap": lambda state, input: torch.vmap(update)(state[None], input[None]),
    "compile": torch.compile(update, fullgraph=True, dynamic=False),
    "meta": lambda state, input: update(state.to("meta"), input.to("meta")),
}
FAULTS = {
    "shape": (torch.ones(2), torch.ones(3), "input to be .*, like state, but got"),
    "scalar": (torch.ones(2), torch.ones(()), "input to be .*, like state, but got"),
    "dtype": (torch.ones(2), torch.ones(2).int(), "input to be .*, like state, but got"),
    "integers": (torch.ones(2).int(), torch.ones(2).int(), "state to be float.*, but got"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_path_refuses_what_does_not_fit(path, fault):
    state, input, expected = FAULTS[fault]
    with pytest.raises(Exception, match=rf"my_ops::ema_update_: expected {expected}") as raised:
        PATHS[path](state, input)
    assert "csrc" not in str(raised.value)  # a path of whoever compiled it


@pytest.mark.parametrize("in_dims", [(0, 0), (1, 0), (0, None), (2, 2)])
def test_vmap_writes_the_state_of_each_example(in_dims):
    state, input = torch.randn(3, 3, 3), torch.randn([3] * (2 + (in_dims[1] is not None)))
    expected = torch.vmap(reference, in_dims)(state, input)
    torch.vmap(update, in_dims)(state, input)
    torch.testing.assert_close(state.movedim(in_dims[0], 0), expected)


def test_vmap_refuses_one_state_for_all_examples():
    with pytest.raises(RuntimeError, match="expected a state for each example"):
        torch.vmap(lambda x: update(torch.ones(2), x))(torch.randn(3, 2))


class Average(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, input):
        """Reads and writes its state twice, with a size that may be any."""
        for row in (input.sum(0), input[-1]):
            update(self.average, row)
        return input - self.average


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_calls_write_the_buffer_of_a_module(dynamic, backend):
    torch.compiler.reset()
    module, eager = Average(), Average()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (2, 5):
        input = torch.randn(rows, 4, requires_grad=True)
        torch.testing.assert_close(compiled(input), eager(input))
        torch.testing.assert_close(module.state_dict(), eager.state_dict())


def test_exported_calls_write_the_buffer():
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(Average(), (torch.randn(3, 4),), dynamic_shapes=({0: rows},))
    program, eager, input = exported.run_decompositions().module(), Average(), torch.randn(7, 4)
    torch.testing.assert_close(program(input), eager(input))
    torch.testing.assert_close(dict(program.named_buffers()), eager.state_dict())
