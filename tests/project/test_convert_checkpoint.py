"""Checkpoints of the tutorial's LLTM, converted, give the numbers that they gave before."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import ROOT, TOLERANCES, program, rejection
from torch import nn

import lltm_ops

PATH = ROOT / "examples" / "convert_checkpoint.py"
convert_checkpoint = program(PATH)

INPUT_FEATURES, STATE_SIZE = 5, 4


class TutorialLLTM(nn.Module):
    """The module of the tutorial in plain PyTorch."""

    def __init__(self, bias_shape):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3 * STATE_SIZE, STATE_SIZE + INPUT_FEATURES))
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, input, state):
        return lltm_ops.reference(input, self.weights, self.bias.flatten(), *state)


class Model(nn.Module):
    """Others beside the LLTM: one has parameters of the same names, one a version to keep."""

    def __init__(self, rnn):
        super().__init__()
        self.norm = nn.BatchNorm1d(INPUT_FEATURES)
        self.rnn = rnn
        self.other = nn.ParameterDict({"weights": torch.ones(2), "bias": torch.ones(2)})


each_bias_shape = pytest.mark.parametrize("bias_shape", [(12,), (1, 12)], ids=str)


def convert(*arguments):
    return convert_checkpoint.main([str(argument) for argument in arguments])


def assert_same_numbers(ours, tutorial):
    input, state = torch.randn(7, 3, INPUT_FEATURES), (torch.randn(3, STATE_SIZE),) * 2
    hx = state
    outputs = []
    for x in input:
        hx = tutorial(x, hx)
        outputs.append(hx[0])
    if isinstance(ours, lltm_ops.LLTM):
        output, last = ours(input, tuple(part[None] for part in state))
        actual = (output, last[0][0], last[1][0])
    else:
        steps = []
        for x in input:
            state = ours(x, state)
            steps.append(state[0])
        actual = (torch.stack(steps), *state)
    torch.testing.assert_close(actual, (torch.stack(outputs), *hx), **TOLERANCES[torch.float32])


@each_bias_shape
@pytest.mark.parametrize("to", ["cell", "layer"])
def test_gives_the_same_numbers(to, bias_shape, tmp_path, capsys):
    tutorial = TutorialLLTM(bias_shape)
    torch.save(tutorial.state_dict(), tmp_path / "old.pt")
    assert convert(tmp_path / "old.pt", tmp_path / "new.pt", "--to", to) == 0
    ours = {"cell": lltm_ops.LLTMCell, "layer": lltm_ops.LLTM}[to](INPUT_FEATURES, STATE_SIZE)
    state = torch.load(tmp_path / "new.pt", weights_only=True)
    ours.load_state_dict(state)
    assert {name: tensor.shape for name, tensor in state.items()} == {
        name: tensor.shape for name, tensor in ours.state_dict().items()
    }
    assert_same_numbers(ours, tutorial)
    suffix = {"cell": "", "layer": "_l0"}[to]
    assert capsys.readouterr().out == (
        f"weights [12, 9] -> weights{suffix} [12, 9]\n"
        f"bias {list(bias_shape)} -> bias{suffix} [12]\n"
    )


@each_bias_shape
def test_under_a_prefix_and_the_rest_as_it_was(bias_shape, tmp_path):
    model = Model(TutorialLLTM(bias_shape))
    torch.save(model.state_dict(), tmp_path / "old.pt")
    before = (tmp_path / "old.pt").read_bytes()
    convert(tmp_path / "old.pt", tmp_path / "new.pt")
    assert (tmp_path / "old.pt").read_bytes() == before
    state = torch.load(tmp_path / "new.pt", weights_only=True)
    ours = Model(lltm_ops.LLTM(INPUT_FEATURES, STATE_SIZE))
    assert list(state) == list(ours.state_dict())
    assert state._metadata["norm"] == {"version": 2}
    ours.load_state_dict(state)
    assert_same_numbers(ours.rnn, model.rnn)
    torch.testing.assert_close(ours.other["weights"], model.other["weights"], rtol=0, atol=0)


def test_only_the_prefixes_asked_for(tmp_path):
    torch.save(nn.ModuleList(TutorialLLTM(12) for _ in range(3)).state_dict(), tmp_path / "old.pt")
    convert(tmp_path / "old.pt", tmp_path / "new.pt", "--prefix", "0.", "--prefix", "2.")
    state = torch.load(tmp_path / "new.pt", weights_only=True)
    names = "0.weights_l0 0.bias_l0 1.weights 1.bias 2.weights_l0 2.bias_l0"
    assert list(state) == names.split()


WEIGHTS, BIAS = torch.zeros(12, 9), torch.zeros(12)


@pytest.mark.parametrize(
    ("saved", "options", "message"),
    [
        (None, "", "cannot read old.pt: No such file or directory"),
        (b"text", "", "old.pt is not a file that torch.load reads with weights_only=True: "),
        (b"", "", "old.pt is not a file that torch.load reads with weights_only=True: expected"),
        (TutorialLLTM(12), "", "is not a file that torch.load reads with weights_only=True"),
        ([WEIGHTS], "", "old.pt: expected a state_dict, but got list"),
        ({"model": {"weights": WEIGHTS}}, "", "names to tensors, but got dict for 'model'"),
        ({0: WEIGHTS}, "", "names to tensors, but got Tensor for 0"),
        ({}, "", "old.pt holds no LLTM: expected parameters named weights and bias"),
        (nn.LSTM(5, 4).state_dict(), "", "holds no LLTM: expected parameters named weights and"),
        (
            {"weights": torch.zeros(13, 9), "bias": BIAS},
            "",
            "old.pt holds no LLTM: expected weights of shape [3 * state_size, state_size + "
            "input_features], but got [13, 9]",
        ),
        ({"weights": torch.zeros(12, 3), "bias": BIAS}, "", "input_features], but got [12, 3]"),
        ({"weights": torch.zeros(0, 9), "bias": BIAS[:0]}, "", "input_features], but got [0, 9]"),
        (
            {"weights": WEIGHTS, "bias": BIAS.to_sparse()},
            "",
            "expected weights and bias that are dense, of one floating point dtype, but got bias "
            "of torch.float32 and torch.sparse_coo",
        ),
        ({"weights": WEIGHTS, "bias": BIAS.long()}, "", "but got bias of torch.int64"),
        (
            {"weights": WEIGHTS, "bias": torch.zeros(12, 1)},
            "--prefix=",
            "for --prefix '', expected bias of shape [12] or [1, 12], but got [12, 1]",
        ),
        (
            {"a.weights": WEIGHTS, "a.bias": BIAS},
            "--prefix=b.",
            "expected b.weights and b.bias, but got such names only with the prefixes ['a.']",
        ),
        (
            {"weights": WEIGHTS, "bias": BIAS, "bias_l0": BIAS},
            "",
            "bias would become bias_l0, which is there already",
        ),
    ],
)
def test_rejects(saved, options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if isinstance(saved, bytes):
        Path("old.pt").write_bytes(saved)
    elif saved is not None:
        torch.save(saved, "old.pt")
    options = ["old.pt", "new.pt", *options.split()]
    assert message in rejection(convert_checkpoint.main, options, capsys)
    assert not Path("new.pt").exists()


@pytest.mark.parametrize("output", ["old.pt", "link.pt", "other.pt"])
def test_overwrites_nothing(output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save(TutorialLLTM(12).state_dict(), "old.pt")
    Path("link.pt").symlink_to("old.pt")
    Path("other.pt").write_bytes(b"precious")
    before = Path("old.pt").read_bytes(), Path("other.pt").read_bytes()
    sentence = rejection(convert_checkpoint.main, ["old.pt", output], capsys)
    assert f"{output} exists already: expected the name of a new file" in sentence
    assert (Path("old.pt").read_bytes(), Path("other.pt").read_bytes()) == before


def test_a_folder_that_is_not_there(tmp_path, capsys):
    torch.save(TutorialLLTM(12).state_dict(), tmp_path / "old.pt")
    arguments = [tmp_path / "old.pt", tmp_path / "missing" / "new.pt"]
    sentence = rejection(convert_checkpoint.main, arguments, capsys)
    assert "new.pt: No such file or directory" in sentence


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    torch.save({"weights": torch.zeros(300, 200), "bias": torch.zeros(300)}, tmp_path / "old.pt")
    command = f"ulimit -f 16 && exec {sys.executable} {PATH} old.pt new.pt"
    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.endswith(" error: cannot write new.pt: File too large\n")
    assert not (tmp_path / "new.pt").exists()
