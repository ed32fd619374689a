"""The examples run as a user runs them, with settings so small that they learn next to nothing."""

import re
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
    return output, run("demo.py", "--steps=3", f"--output={output}")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: program(EXAMPLES / f"{name}.py")


def test_the_demo_leaves_three_files(ran):
    output, printed = ran
    assert sorted(path.name for path in output.iterdir()) == ["demo.png", "model.pt", "sample.txt"]
    titles = Image.open(output / "demo.png").text["Title"]
    assert re.fullmatch(r"Speed: [^|]+ \| Text: [^|]+ \| Memory: [^|]+", titles)
    assert (output / "sample.txt").read_text() in printed


def test_the_demo_prints_what_it_measured(ran, example):
    output, printed = ran
    demo = example("demo")
    corpus = demo.Corpus()
    model = demo.CharLM(len(corpus.vocabulary), demo.EMBEDDING_SIZE, demo.HIDDEN_SIZE)
    model.load_state_dict(torch.load(output / "model.pt"))
    bits = demo.bits_per_character(model, corpus.validation)
    assert re.search(rf"LLTM(?: needs| guesses best, with)\s+{bits:.2f}", printed)
    times = dict(re.findall(r"^(.+ed) +\S+ s +(\S+) times as long$", printed, re.M))
    for form, words in (("packed", "nn.LSTM takes"), ("padded", "it takes")):
        assert f"{words} {times[f'nn.LSTM, {form}']} times as long" in " ".join(printed.split())


def test_the_race_gives_each_as_much_time(example, monkeypatch):
    demo = example("demo")
    length = dict(zip(demo.RACE, (1.0, 8.0, 4.0, 6.5, 5.0), strict=True))

    def learn(self, sentences):
        self.bits.append(2.0)
        self.seconds += length[self.name]

    monkeypatch.setattr(demo.Learner, "learn", learn)
    corpus = demo.Corpus()
    batches = corpus.batches(20, seed=0)
    learners = [demo.Learner(name, corpus, 20, seed=0) for name in demo.RACE]
    times = demo.race(learners, batches, lambda learner: None)
    assert times == {name: 20 * seconds for name, seconds in length.items()}
    assert [len(learner.bits) for learner in learners] == [20, 3, 5, 3, 4]
    assert demo.steps_that_fit(corpus, batches, seconds=100) == 100 // (5 * 1 + 3 + 4)


def test_packed_and_padded_sentences_have_the_same_loss(example):
    demo = example("demo")
    corpus = demo.Corpus()
    model = demo.CharLM(len(corpus.vocabulary), 4, 8, torch.nn.LSTM)
    forms = (form(corpus.training[:5]) for form in (demo.packed, demo.padded))
    torch.testing.assert_close(*(demo.loss_of(model, *form) for form in forms))


def test_the_ways_to_run_agree(ran):
    ways = ["AOTInductor", "eager", "torch.compile"] + HAS_TORCHSCRIPT * ["torch.jit.script"]
    rows = re.findall(r"^(\S+) +(\d\.\de.\d\d) +[\d.]+ ms$", ran[1], re.M)
    assert sorted(name for name, _ in rows) == ways
    assert all(float(difference) <= 1e-5 for _, difference in rows)


def test_a_way_that_cannot_run_costs_its_row(example, monkeypatch, capsys):
    ways = example("ways_to_run")
    monkeypatch.setattr(ways, "WAYS", {"torch.compile": lambda *_: [][0]})
    assert [*ways.compare(torch.nn.Linear(2, 2), torch.ones(1, 2))] == ["eager"]
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
