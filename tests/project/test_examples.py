"""The examples run as a user runs them, with settings so small that they learn next to nothing."""

import errno
import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from common import HAS_TORCHSCRIPT, ROOT, environment, program, rejection

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

# The tests share a run of the demo.
pytestmark = pytest.mark.xdist_group("examples")
CHAR_LM = ROOT / "examples" / "char_lm.py"
TINY = [
    "--device=cpu",
    f"--text={CHAR_LM}",
    "--batch-size=4",
    "--length=16",
    "--embedding-size=8",
    "--hidden-size=16",
    "--validate-every=10",
    "--sample-length=20",
    "--recall-steps=2",
]
LEFT = ["checkpoint.pt", "learning.png", "sample.txt"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def start(*options):
    return subprocess.Popen(
        [sys.executable, str(CHAR_LM), *TINY, *map(str, options)],
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, returncode=0):
    """What it printed, once it ended as it should have."""
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == returncode, stdout + stderr
    assert "Traceback" not in stderr
    return stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Output folder and printed text of a whole run."""
    output = tmp_path_factory.mktemp("char_lm")
    printed = finish(start("--steps=40", "--learning-rate=0.1", "--output", output))
    return output, printed


@pytest.fixture
def char_lm(monkeypatch):
    threads = torch.get_num_threads()
    yield imported(monkeypatch)
    torch.set_num_threads(threads)


def imported(monkeypatch):
    """The example as a module, for what needs no process of its own."""
    monkeypatch.syspath_prepend(str(CHAR_LM.parent))
    return program(CHAR_LM)


def test_char_lm_learns_and_leaves_its_results(trained):
    output, printed = trained
    for layer in ("LLTM", "LSTM", "GRU"):
        line = rf"^{layer} +step .* (\S+) in training, (\S+) in validation"
        bits = [(float(a), float(b)) for a, b in re.findall(line, printed, re.MULTILINE)]
        assert len(bits) == 4
        for first, last in zip(bits[0], bits[-1], strict=True):
            assert last < first - 0.1
    assert (output / "learning.png").read_bytes().startswith(PNG_SIGNATURE)
    saved = torch.load(output / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 40
    assert {"model", "optimizer", "config", "vocabulary"} <= saved.keys()
    assert sorted(path.name for path in output.iterdir()) == LEFT


def test_char_lm_ends_with_what_it_found_where_it_lies_and_what_comes_next(trained):
    output, printed = trained
    _, found, left, following = re.split(r"\n--- (?=What)", printed)
    assert re.findall(r"^- (\w+): ", found, re.MULTILINE) == ["Text", "Memory", "Speed"]
    bits = re.findall(r"^(LLTM|LSTM|GRU) +[\d,]+ +(\d\.\d{3}) ", printed, re.MULTILINE)
    best = min(bits, key=lambda row: float(row[1]))[0]
    assert f"- Text: {best} learned it best" in found
    assert re.findall(r"^\w+ +(/.*)$", left, re.MULTILINE) == [
        str(output / name) for name in ("learning.png", "checkpoint.pt", "sample.txt")
    ]
    assert "make test" in following
    assert (ROOT / "docs" / "training.md").exists()
    assert "docs/training.md" in following and "help(lltm_ops.LLTM)" in following


def test_char_lm_sets_the_words_it_was_given_off_from_what_it_wrote(trained):
    output, printed = trained
    shown = (output / "sample.txt").read_text()
    assert shown in printed
    given, written = re.fullmatch(
        r"The LLTM was given these words:\n(.*)\n\nIt wrote on, .*?:\n(.*)\n", shown, re.DOTALL
    ).groups()
    assert re.match(r"    [A-Za-z]", given)
    assert 0 < len(textwrap.dedent(written)) <= 20  # dedent empties lines of spaces


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ay\n\n------\n\nIt was 12 o'clock", "It was 12"),
        ("1 --- 2 ---", "1 --- 2"),
    ],
)
def test_the_words_given_are_whole_and_begin_with_one(char_lm, text, words):
    assert sys.modules["language_model"].first_words(text, 7) == words


def test_the_novel_is_the_same_everywhere(char_lm):
    """So the documented figures do not depend on what is installed."""
    args = char_lm.command_line().parse_args(["--device=cpu"])
    text = char_lm.read_text(args.text)
    assert text.startswith("Persuasion\n") and text.endswith("Finis\n")
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "8061549557aebd2fd6e353d18d9197cb707029112bd52d4d8b174583a925848a"


def test_char_lm_runs_four_ways_that_agree(trained):
    _, printed = trained
    ways = ["eager", "torch.compile", "torch.export", "cell in a loop", "plain PyTorch"]
    if HAS_TORCHSCRIPT:
        ways.append("torch.jit.script")
    else:
        assert "torch.jit.script is left out" in printed
    for way in ways:
        assert re.search(rf"^{re.escape(way)} .* ms .*x$", printed, re.MULTILINE)
    assert "All agree with eager." in printed


@pytest.mark.parametrize(
    ("way", "function"),
    [
        ("torch.jit.script", "torch.jit.script"),
        ("torch.compile", "torch.compile"),
        ("torch.export", "torch.export.export"),
    ],
)
def test_a_way_that_cannot_run_costs_its_row(char_lm, way, function, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("no compiler\nand many lines more")

    ways_to_run = sys.modules["ways_to_run"]
    monkeypatch.setattr(function, fail)
    monkeypatch.setattr(ways_to_run, "MADE", {way: ways_to_run.MADE[way]})
    monkeypatch.setattr(ways_to_run, "seconds_per_call", lambda ways, _: dict.fromkeys(ways, 1.0))
    model = sys.modules["language_model"].CharLM(5, 2, 3)
    agree, times = char_lm.compare(model, torch.zeros(1, 4, dtype=torch.long))
    assert agree
    assert list(times) == ["eager", "cell in a loop", "plain PyTorch"]
    printed = capsys.readouterr().out
    reason = "" if way == "torch.jit.script" and not HAS_TORCHSCRIPT else "no compiler "
    sentence = rf"^{re.escape(way)} is left out, .*: {reason}.*It needs .*\.\)$"
    assert re.search(sentence, printed, re.MULTILINE)
    assert "many lines more" not in printed
    assert "All agree with eager." in printed


ERRORS = {"LLTM, input gate -4": 0.001, "LSTM": 0.34, "GRU": 0.33}


@pytest.mark.parametrize(
    ("errors", "sentence"),
    [
        (
            ERRORS,
            "Memory: LLTM, input gate -4 (after 2 steps) learned to say the first of 100 values; "
            "LSTM (0.34) and GRU (0.33) did not, where always the mean has 0.33.",
        ),
        (
            ERRORS | {"LLTM, input gate -4": 0.3, "GRU": 0.001},
            "Memory: GRU (after 2 steps) learned to say the first of 100 values; LLTM, input gate "
            "-4 (0.30) and LSTM (0.34) did not, where always the mean has 0.33.",
        ),
        (
            dict.fromkeys(ERRORS, 0.3),
            "Memory: no layer learned to say the first of 100 values in this run.",
        ),
        (
            dict.fromkeys(ERRORS, 0.001),
            "Memory: LLTM, input gate -4 (after 2 steps), LSTM (after 2 steps) and GRU (after 2 "
            "steps) learned to say the first of 100 values.",
        ),
    ],
)
def test_the_demo_says_of_memory_what_its_run_found(char_lm, errors, sentence):
    losses = {layer: [0.0105, error, error] for layer, error in errors.items()}
    assert char_lm.demo_report.about_recall(losses, errors) == sentence


@pytest.mark.slow
def test_char_lm_resumes_after_ctrl_c_as_if_it_had_not_stopped(tmp_path):
    steps = 1000
    options = (f"--steps={steps}", "--validate-every=100", "--skip-compare", "--output")
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    process = start(*options, stopped)
    while "in validation" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    process.send_signal(signal.SIGINT)
    assert "--resume continue from" in finish(process, returncode=130)
    half = torch.load(stopped / "checkpoint.pt", weights_only=True)
    assert 100 <= half["step"] < steps
    assert (stopped / "learning.png").exists()

    finish(start(*options, stopped, "--resume"))
    finish(start(*options, whole))
    resumed, uninterrupted = (
        torch.load(output / "checkpoint.pt", weights_only=True) for output in (stopped, whole)
    )
    for what in (
        lambda saved: saved["model"],
        lambda saved: saved["optimizer"]["state"],
        lambda saved: saved["bits"],
        lambda saved: saved["validation_bits"],
    ):
        torch.testing.assert_close(what(resumed), what(uninterrupted), rtol=0, atol=0)


@pytest.mark.parametrize("part", ["compare", "recall"])
def test_char_lm_says_how_to_go_on_after_ctrl_c_in_parts_2_and_4(
    char_lm, part, monkeypatch, tmp_path, capsys
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(char_lm, "compare", lambda *_: (True, {}))
    monkeypatch.setattr(char_lm, "time_training", lambda *_: {})
    monkeypatch.setattr(char_lm, part, interrupted)
    assert char_lm.main([*TINY, "--steps=2", f"--output={tmp_path}"]) == 130
    assert f"--resume continue from {tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--text missing.txt", "cannot read --text missing.txt: No such file"),
        ("--text .", "cannot read --text .: Is a directory"),
        ("--text binary", "cannot read --text binary: 'utf-8' codec can't decode"),
        ("--text empty", "the text is too short: expected at least 170 characters for "),
        ("--text short", "--batch-size 4 and --length 16, but got 169"),
        ("--resume", "--resume: there is no checkpoint in runs/char_lm"),
        ("--output broken", "in broken already: expected --resume or another --output"),
        ("--resume --output broken", "broken/checkpoint.pt is not a complete checkpoint of this"),
        ("--resume --output folder", "complete checkpoint of this program: Is a directory"),
        ("--output short", "cannot write to --output short: File exists"),
        ("--output /proc", "cannot write to --output /proc: "),
        ("--prompt \N{SNOWMAN}", "--prompt has characters that the text has not: '\N{SNOWMAN}'"),
        ("--steps 0", "--steps: expected a whole number from 1 to 99999999, but got 0"),
        ("--steps 1.5", "--steps: expected a whole number from 1 to 99999999, but got 1.5"),
        ("--batch-size -3", "--batch-size: expected a whole number from 1 to 99999999, but got -3"),
        ("--length 99999999", "the text is too short: expected at least 1,000,000,000 characters"),
        ("--hidden-size 1000000", "expected a whole number from 1 to 65536, but got 1000000"),
        ("--threads 100000", "argument --threads: expected a whole number from 1 to 1024, but got"),
        ("--seed -1", "--seed: expected a whole number from 0 to 9223372036854775807, but got -1"),
        ("--seed 1" + 40 * "0", "to 9223372036854775807, but got 1" + 40 * "0"),
        ("--temperature nan", "--temperature: expected a number from 1e-30 to 1e+30, but got nan"),
        ("--temperature 1e-320", "expected a number from 1e-30 to 1e+30, but got 1e-320"),
        ("--learning-rate inf", "expected a number from 1e-30 to 1e+30, but got inf"),
        ("--learning-rate 1e300", "expected a number from 1e-30 to 1e+30, but got 1e300"),
        ("--device abacus", "argument --device: abacus cannot be used: "),
        ("--device meta", "argument --device: meta cannot be used: "),
        ("--device privateuseone", "argument --device: privateuseone cannot be used: "),
    ],
)
def test_char_lm_rejects(char_lm, options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("a" * 169)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "checkpoint.pt").write_bytes(b"no checkpoint")
    (tmp_path / "folder" / "checkpoint.pt").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert message in rejection(char_lm.main, [*TINY, *options.split()], capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden-size=32"], "was trained with --hidden-size 16, not 32"),
        (["--steps=41"], "was trained with --steps 40, not 41"),
        (["--text", __file__], "was trained on another text"),
    ],
)
def test_char_lm_resumes_only_its_own_configuration(char_lm, trained, options, message, capsys):
    output, _ = trained
    same = ["--steps=40", "--learning-rate=0.1", "--resume", "--output", str(output)]
    assert message in rejection(char_lm.main, [*TINY, *same, *options], capsys)


def without(what):
    def damage(saved):
        del saved[what]

    return damage


def with_item(value, *path):
    """Puts the value where the path leads in a checkpoint."""

    def damage(saved):
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = value

    return damage


STATE = ("optimizer", "state", 0)


@pytest.mark.parametrize(
    "damage",
    [
        *map(without, ("model", "optimizer", "scheduler", "config", "bits", "validation_bits")),
        with_item(None, "model"),
        with_item(torch.zeros(1), "model", "head.weight"),
        with_item("zeros", "model", "head.bias"),
        with_item({}, "optimizer", "state"),
        with_item(torch.zeros(3), *STATE, "exp_avg"),
        with_item({"step": torch.tensor(1.0)}, *STATE),
        with_item("0.1", "optimizer", "param_groups", 0, "lr"),
        with_item([], "optimizer", "param_groups"),
        with_item("40", "scheduler", "last_epoch"),
        with_item([], "scheduler", "base_lrs"),
        with_item(40, "bits"),
        with_item(["4.0"], "bits"),
        with_item([4.0], "validation_bits"),
        with_item([], "config"),
    ],
)
def test_char_lm_resumes_only_what_it_saves(char_lm, trained, damage, tmp_path, capsys):
    output, _ = trained
    saved = torch.load(output / "checkpoint.pt", weights_only=True)
    damage(saved)
    torch.save(saved, tmp_path / "checkpoint.pt")
    options = ["--steps=40", "--learning-rate=0.1", "--resume", "--output", str(tmp_path)]
    expected = f"--resume: {tmp_path}/checkpoint.pt is not a complete checkpoint of this program\n"
    assert rejection(char_lm.main, [*TINY, *options], capsys) == expected


def test_char_lm_resumes_no_truncated_checkpoint(char_lm, trained, tmp_path, capsys):
    output, _ = trained
    whole = (output / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    options = ["--steps=40", "--learning-rate=0.1", "--resume", "--output", str(tmp_path)]
    sentence = rejection(char_lm.main, [*TINY, *options], capsys)
    assert "is not a complete checkpoint of this program" in sentence


def test_char_lm_begins_over_no_checkpoint(char_lm, trained, capsys):
    output, _ = trained
    before = (output / "checkpoint.pt").read_bytes()
    sentence = rejection(char_lm.main, [*TINY, "--output", output], capsys)
    assert sentence == (
        f"there is a checkpoint in {output} already: expected --resume or another --output\n"
    )
    assert (output / "checkpoint.pt").read_bytes() == before


def test_char_lm_begins_anew_where_it_is_told_to(char_lm, tmp_path, capsys):
    """make demo says --anew whatever its DEMO_ARGS are. A --resume among them prevails."""
    options = [*TINY, "--skip-compare", "--anew", f"--output={tmp_path}"]
    (tmp_path / "sample.txt").write_text("of an earlier run")
    for steps in (3, 2):
        assert char_lm.main([*options, f"--steps={steps}"]) == 0
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == steps
        assert "earlier" not in (tmp_path / "sample.txt").read_text()
    trained = (tmp_path / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    rejection(char_lm.main, [*options, "--prompt=\N{SNOWMAN}"], capsys)
    rejection(char_lm.main, [*options, "--resum"], capsys)
    assert (tmp_path / "checkpoint.pt").read_bytes() == trained
    assert char_lm.main([*options, "--steps=2", "--resume"]) == 0
    assert "in training" not in capsys.readouterr().out.split("1 of 4")[-1]


@pytest.fixture
def full_disk():
    """Files that cannot grow stand for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_char_lm_leaves_nothing_behind_on_a_full_disk(char_lm, full_disk, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        char_lm.main([*TINY, "--steps=2", f"--output={tmp_path}"])
    assert exit.value.code == 2
    expected = f"error: cannot write {tmp_path}/checkpoint.pt: File too large\n"
    assert capsys.readouterr().err.endswith(expected)
    assert list(tmp_path.iterdir()) == []


def test_char_lm_keeps_the_checkpoint_when_saving_fails(char_lm, trained, monkeypatch, capsys):
    output, _ = trained
    before = (output / "checkpoint.pt").read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    options = ["--steps=40", "--learning-rate=0.1", "--resume", "--output", str(output)]
    with pytest.raises(SystemExit):
        char_lm.main([*TINY, *options])
    assert f"cannot write {output}/checkpoint.pt: No space left" in capsys.readouterr().err
    assert (output / "checkpoint.pt").read_bytes() == before
    assert sorted(path.name for path in output.iterdir()) == LEFT


def test_char_lm_syncs_before_it_renames(char_lm, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    (tmp_path / "file").write_bytes(b"before")
    monkeypatch.setattr(Path, "replace", lambda *paths: synced.append(paths))
    char_lm.write(tmp_path / "file", b"after")
    new, old = tmp_path / "file.tmp", tmp_path / "file"
    assert synced == [str(new), (new, old), str(tmp_path)]
    assert new.read_bytes() == b"after"


def test_char_lm_names_a_model_that_does_not_fit(char_lm, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(sys.modules["language_model"].CharLM, "__init__", fail)
    expected = "there is no memory for a model with --embedding-size 8 and --hidden-size 16"
    assert expected in rejection(char_lm.main, [*TINY, "--output", tmp_path], capsys)


def test_char_lm_stops_when_the_loss_is_not_finite(char_lm, tmp_path):
    with pytest.raises(SystemExit, match=r"The loss is \S+ after step .* smaller --learning-rate"):
        char_lm.main([*TINY, "--learning-rate=1e30", "--steps=20", "--output", str(tmp_path)])


@pytest.mark.parametrize("missing", ["tqdm", "matplotlib.figure"])
def test_char_lm_names_a_missing_package(missing, monkeypatch):
    for module in ("demo_report", "memory_tasks", "ways_to_run"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"{missing} is missing: pip install tqdm matplotlib"):
        imported(monkeypatch)


@pytest.mark.slow
def test_memory_tasks_prints_a_row_for_each_task_and_layer():
    command = [sys.executable, str(CHAR_LM.parent / "memory_tasks.py"), "--steps=150", "--seeds=1"]
    options = ["--length=8", "--hidden-size=16", "--learning-rates=0.03"]
    printed = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    rows = [line.strip("| ").split(" | ") for line in printed.stdout.splitlines()[2:]]
    layers = ["LLTM", "LLTM, input gate -2", "LLTM, input gate -4", "LLTM, resets"]
    layers += ["LSTM", "LSTM, forget gate +3", "LSTM, forget gate +5, input gate -5"]
    layers += ["GRU", "GRU, update gate +5"]
    assert [row[:3] for row in rows] == [
        [task, layer, "0.03"]
        for task in ("recall", "add", "latest")
        for layer in layers
        if task == "latest" or layer != "LLTM, resets"
    ]
    losses = {(row[0], row[1]): float(row[4]) for row in rows}
    assert all(losses[task, "LLTM"] < 0.08 for task in ("recall", "add", "latest"))
    assert losses["latest", "LLTM, resets"] < losses["latest", "LLTM"]
