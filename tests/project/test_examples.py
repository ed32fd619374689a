"""The examples run as a user runs them, with settings so small that they learn next to nothing."""

import json
import re
import statistics
import subprocess
import sys

import pytest
import torch
from common import HAS_TORCHSCRIPT, ROOT, environment, program

from lltm_ops import LLTM

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")  # which matplotlib needs

pytestmark = pytest.mark.xdist_group("examples")  # so that they share a run of the demo
EXAMPLES = ROOT / "examples"


def run(name, *options):
    command = [sys.executable, EXAMPLES / name, *options]
    return subprocess.check_output(command, env=environment(), text=True)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    output = tmp_path_factory.mktemp("demo")
    return output, run("demo.py", "--epochs=1", "--rounds=1", "--steps=25", f"--output={output}")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: program(EXAMPLES / f"{name}.py")


def test_the_demo_draws_what_it_measured(ran):
    output, printed = ran
    titles = Image.open(output / "demo.png").text["Title"]
    assert re.fullmatch(r"Time: [^|]+ \| Accuracy: [^|]+ \| Memory: [^|]+", titles)
    costs = re.findall(r"(nn\.\w+|LLTM), (?:packed|padded) .* s +\S+ times as long", printed)
    accuracies = re.findall(r"^    \w+, (\S+) +(?:\d+\.\d % +){3}\(", printed, re.M)
    assert costs == 2 * ["LLTM", "nn.LSTM", "nn.LSTM", "nn.GRU", "nn.GRU"]
    assert accuracies == 2 * ["LLTM", "nn.LSTM", "nn.GRU"]


def test_the_pages_have_the_numbers_of_the_picture(example):
    """Which holds them as text. make demo draws it anew."""
    picture = json.loads(Image.open(ROOT / "docs/images/demo.png").text["Description"])
    readme, training = (
        " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/training.md")
    )
    median = {name: 100 * statistics.median(of) for name, of in picture["accuracies"].items()}
    for name, (layer, _) in example("demo").CONTENDERS.items():
        cells = [name.replace("nn", "`nn").replace(",", "`,") if "nn" in name else name]
        for task, costs in picture["costs"].items():
            seconds, mebibytes = costs[name]
            accuracy = f"{median[f'{task}, {layer}']:.1f} %"
            cells += [accuracy, f"{1e3 * seconds:.0f} ms", f"{mebibytes:.1f} MiB"]
        assert f"| {' | '.join(cells)} |" in training
    for task in ("speakers", "exercises"):
        ours, lstm, gru = (
            f"{median[f'{task}, {name}']:.1f}" for name in ("LLTM", "nn.LSTM", "nn.GRU")
        )
        assert f"{task} {ours} % (`nn.LSTM` {lstm}, `nn.GRU` {gru})" in readme
    steps = {name: f"{min(of)} to {max(of)}" for name, of in picture["recall"].items() if all(of)}
    of_layer = {name.split(", ")[1]: s for name, s in steps.items() if "set to keep" in name}
    assert f"{of_layer['LLTM']} steps" in readme
    assert f"{of_layer['nn.LSTM']} steps, and `nn.GRU` {of_layer['nn.GRU']}" in readme
    found = [of_layer[name] for name in ("LLTM", "nn.LSTM", "nn.GRU")]
    assert "needs {} steps, the LSTM {} and the GRU {}.".format(*found) in training


@pytest.mark.parametrize(
    ("task", "counts"), [("speakers", (180, 90, 370)), ("exercises", (70, 28, 42))]
)
def test_the_parts_of_the_data_have_no_sequence_in_common(task, counts, example):
    demo = example("demo")
    parts = [demo.Sequences(task, part) for part in (demo.LEARN, demo.CHOOSE, demo.TEST)]
    assert tuple(len(part.inputs) for part in parts) == counts
    every = {tuple(s.flatten().tolist()) for part in parts for s in part.inputs}
    assert len(every) == sum(counts)
    learned = torch.cat([s for part in parts[:2] for s in part.inputs])
    torch.testing.assert_close(learned.std(0), torch.ones(parts[0].features))


@pytest.mark.parametrize("layer", ["LLTM", "LSTM", "GRU"])
def test_packed_and_padded_sequences_have_the_same_logits(layer, example):
    demo = example("demo")
    sequences = demo.Sequences("speakers", demo.CHOOSE)
    model = demo.Classifier(layer, sequences.features, sequences.classes)
    torch.testing.assert_close(
        *(form(model, sequences.inputs) for form in (demo.packed, demo.padded))
    )


def test_what_is_kept_for_backward_is_counted_once(example):
    numbers = torch.ones(2**18, requires_grad=True)
    assert example("demo").kept_for_backward(lambda: (numbers * numbers).sum()) == 1


def test_the_ways_to_run_agree(ran):
    ways = ["AOTInductor", "eager", "torch.compile"] + HAS_TORCHSCRIPT * ["torch.jit.script"]
    rows = re.findall(r"^(\S+) +(\d\.\de.\d\d) +[\d.]+ ms$", ran[1], re.M)
    assert sorted(name for name, _ in rows) == ways
    assert all(float(difference) <= 1e-5 for _, difference in rows)


def test_a_way_that_cannot_run_costs_its_row(example, monkeypatch, capsys):
    ways = example("ways_to_run")
    monkeypatch.setattr(ways, "WAYS", {"torch.compile": lambda *_: [][0]})
    assert [*ways.compare(torch.nn.Bilinear(2, 2, 2), *torch.ones(2, 1, 2))] == ["eager"]
    assert "torch.compile is left out, because of IndexError: list" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["recall", "add", "latest"])
def test_the_memory_tasks_ask_for_what_they_say(task, example):
    inputs, targets, marks = example("memory_tasks").batch(task, 12, 50)
    assert torch.equal(inputs[:, :, 1].bool(), marks)
    for values, mark, target in zip(inputs[:, :, 0].T, marks.T, targets, strict=True):
        expected = {"recall": values[0], "add": values[mark].sum(), "latest": values[mark][-1]}
        assert target == expected[task]


@pytest.mark.slow
def test_memory_tasks_prints_a_row_for_each_task_and_layer():
    options = ["--length=8", "--hidden-size=16", "--learning-rates=0.03", "--steps=150"]
    printed = run("memory_tasks.py", "--seeds=1", *options)
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()[2:]]
    losses = {(task, layer): float(loss) for task, layer, _, _, loss, *_ in rows}
    assert len(losses) == 9 + 2 * 8
    assert all(losses[task, "LLTM"] < 0.08 for task in ("recall", "add", "latest"))


def test_all_ways_through_episodes_give_the_same(example):
    episodes = example("episodes")
    input, begins = episodes.rollout()
    begins[0, 0], begins[0, 1] = True, False
    for layer in (torch.nn.LSTM(episodes.FEATURES, 5), LLTM(episodes.FEATURES, 5)):
        expected = episodes.runs(layer, input, begins, every_step=True)
        torch.testing.assert_close(episodes.runs(layer, input, begins), expected)
        torch.testing.assert_close(episodes.cut_and_pad(layer, input, begins), expected)
    torch.testing.assert_close(episodes.one_call(layer, input, begins), expected)


def test_episodes_are_timed():
    assert len(re.findall(r": [\d.]+ ms, [\d.]+ times", run("episodes.py", "--rounds=1"))) == 4
