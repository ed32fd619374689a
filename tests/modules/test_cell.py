"""LLTMCell behaves like nn.LSTMCell."""

import pytest
import torch
from common import each_device, each_dtype
from torch import nn

import lltm_ops


def test_signature_and_parameters():
    cell = lltm_ops.LLTMCell(10, 20, dtype=torch.float64)
    shapes = {name: tuple(parameter.shape) for name, parameter in cell.named_parameters()}
    assert shapes == {"weights": (60, 30), "bias": (60,)}
    assert all(parameter.dtype == torch.float64 for parameter in cell.parameters())
    assert cell.weights.abs().max() <= 20**-0.5
    assert dict(lltm_ops.LLTMCell(10, 20, bias=False).named_parameters()).keys() == {"weights"}
    assert lltm_ops.LLTMCell(10, 20, device="meta").weights.is_meta


@each_device
@each_dtype
@pytest.mark.parametrize("bias", [True, False])
def test_call_is_the_operator(device, dtype, bias):
    cell = lltm_ops.LLTMCell(5, 4, bias=bias, device=device, dtype=dtype)
    input, h, c = (torch.randn(3, size, device=device, dtype=dtype) for size in (5, 4, 4))
    b = cell.bias if bias else torch.zeros(12, device=device, dtype=dtype)
    for actual, expected in zip(
        cell(input, (h, c)), lltm_ops.forward(input, cell.weights, b, h, c), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("with_state", [True, False])
def test_unbatched_input_and_default_state(with_state):
    cell = lltm_ops.LLTMCell(5, 4)
    input, h, c = torch.randn(5), torch.randn(4), torch.randn(4)
    actual = cell(input, (h, c) if with_state else None)
    batched = [state.unsqueeze(0) * with_state for state in (h, c)]
    for ours, expected in zip(actual, cell(input.unsqueeze(0), batched), strict=True):
        assert ours.shape == (4,)
        assert torch.equal(ours, expected.squeeze(0))


@pytest.mark.parametrize("kind", [lltm_ops.LLTMCell, lltm_ops.LLTM])
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((-1, 4), ValueError, "expected input_size to be 0 or more, but got -1"),
        ((4, -1), ValueError, "expected hidden_size to be . or more, but got -1"),
        (("5", 4), TypeError, "expected input_size to be an integer, but got str"),
        ((None, 4), TypeError, "expected input_size to be an integer, but got None"),
        ((5, 4.0), TypeError, "expected hidden_size to be an integer, but got float"),
        ((5, True), TypeError, "expected hidden_size to be an integer, but got bool"),
        ((5, [4]), TypeError, "expected hidden_size to be an integer, but got list"),
    ],
    ids=str,
)
def test_sizes_are_integers(kind, arguments, error, words):
    with pytest.raises(error, match=rf"^lltm_ops.{kind.__name__}: {words}$"):
        kind(*arguments)


@pytest.mark.parametrize("bias", ["False", None, 0, torch.device("cpu")], ids=str)
def test_bias_is_a_bool(bias):
    with pytest.raises(TypeError, match=r"lltm_ops.LLTMCell: expected bias to be a bool, but got"):
        lltm_ops.LLTMCell(5, 4, bias)


@pytest.mark.parametrize("kind", [lltm_ops.LLTMCell, lltm_ops.LLTM])
def test_sizes_and_flags_may_be_of_numpy(kind):
    numpy = pytest.importorskip("numpy")
    for integer in (numpy.int64, numpy.int32, torch.tensor):
        module = kind(integer(5), integer(4), bias=numpy.bool_(False))
        assert type(module.input_size) is type(module.hidden_size) is int
        assert repr(module) == repr(kind(5, 4, bias=False))


@pytest.mark.parametrize("bias_shape", [(60,), (1, 60)])
def test_a_checkpoint_of_the_tutorial_loads(bias_shape):
    class TutorialLLTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.randn(60, 30) * 0.1)
            self.bias = nn.Parameter(torch.randn(*bias_shape))

    old = nn.ModuleDict({"rnn": TutorialLLTM()})
    new = nn.ModuleDict({"rnn": lltm_ops.LLTMCell(10, 20)})
    checkpoint = old.state_dict()
    assert str(new.load_state_dict(checkpoint)) == "<All keys matched successfully>"
    assert checkpoint["rnn.bias"].shape == bias_shape
    arguments = (torch.randn(3, 10), torch.randn(3, 20), torch.randn(3, 20))
    input, h, c = arguments
    expected = lltm_ops.reference(input, old["rnn"].weights, old["rnn"].bias.flatten(), h, c)
    torch.testing.assert_close(new["rnn"](input, (h, c)), expected)


@pytest.mark.parametrize("bias_shape", [(3,), (1, 30), (60, 1), (2, 60)])
def test_a_checkpoint_with_a_wrong_bias_is_refused(bias_shape):
    checkpoint = {"weights": torch.zeros(60, 30), "bias": torch.zeros(bias_shape)}
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        lltm_ops.LLTMCell(10, 20).load_state_dict(checkpoint)
