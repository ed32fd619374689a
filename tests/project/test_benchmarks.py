"""The benchmarks run, and the documented figures are the ones that a run wrote."""

import itertools
import json
import math
import re
import sys
from importlib.util import find_spec

import compiled_before
import pytest
import torch
from common import ROOT, environment, printed, program
from torch.nn.utils.rnn import pack_sequence

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow
figures = program(ROOT / "benchmarks" / "figures.py")

HAS_ONNXRUNTIME = all(find_spec(name) is not None for name in ("onnx", "onnxruntime"))
KINDS = ["inference", "training", "training, all gradients"]


def run(name, folder, *options):
    """What a program prints, and the rows that it writes."""
    options = *map(str, options), f"--output={folder}"
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *options]
    said = printed(*command, env=environment(), timeout=600)
    return said, figures.read(folder / f"{name}.csv")


def test_cell(tmp_path):
    options = ["--dtypes", "float32", "bfloat16", "--threads", 1, 2, "--shapes", "17x0x6"]
    _, rows = run("cell", tmp_path, *options, "--rounds", 1)
    about = json.loads((tmp_path / "cell.json").read_text())
    assert about["machine"] and about["torch"] and about["commit"] and about["date"]
    assert [(row["dtype"], row["threads"], row["what"]) for row in rows] == list(
        itertools.product(["float32", "bfloat16"], "12", KINDS)
    )
    for row in rows:
        contenders = [row[name] for name in ("lltm_ops", "eager", "compile", "C++", "LSTMCell")]
        assert all(float(time) > 0 for time in contenders)


def test_sequence(tmp_path):
    options = ["--threads", 1, "--shapes", "3x1x1x2", "9x17x4x6"]
    _, rows = run("sequence", tmp_path, *options, "--rounds", 1)
    assert len(rows) == 2 * len(KINDS)
    for row in rows:
        for name in ("lltm_ops", "cell in a loop", "eager loop", "compiled loop", "LSTM", "GRU"):
            assert float(row[name]) > 0
        if HAS_ONNXRUNTIME:
            assert bool(row["onnxruntime"]) == (row["what"] == "inference")


def test_against(tmp_path):
    """The last commit, of which the objects lie there: only that is no comparison."""
    options = ["--shapes", "3x5x4", "2x3x5x4", "--kinds", "training", "--seconds", 0.01]
    command = [sys.executable, ROOT / "benchmarks" / "against.py", "HEAD", *map(str, options)]
    compiler = compiled_before.write_compiler(tmp_path)
    said = printed(*command, f"--folder={tmp_path}", env=environment(CXX=compiler), timeout=600)
    ratios = [float(ratio) for ratio in re.findall(r"^dtype.*ratio (\S+)$", said, re.MULTILINE)]
    mean = float(re.search(r"geometric mean of 2: (\S+),", said)[1])
    assert mean == pytest.approx(math.prod(ratios) ** 0.5, abs=1e-3)


def test_lengths(tmp_path):
    options = ["--lengths", 1, 9, "--rounds", 1, "--threads", 1]
    _, rows = run("lengths", tmp_path, *options)
    assert [(row["length"], row["form"], row["what"]) for row in rows] == list(
        itertools.product("19", ["padded", "packed"], KINDS[:2])
    )
    for row in rows:
        for name in ("LSTM by segments", "LSTM padded"):
            assert bool(row[name]) == (row["form"] == "packed")


def test_nn_lstm_gives_the_same_in_three_ways(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import lengths

    packed = pack_sequence([torch.randn(steps, 3) for steps in (5, 9, 5, 2)], enforce_sorted=False)
    lstm = torch.nn.LSTM(3, 4, num_layers=2)
    torch.testing.assert_close(lengths.by_segments(lstm, packed), lstm(packed))
    in_order = lengths.input_of("packed", 40)
    lstm, padded = torch.nn.LSTM(128, 4), lengths.PaddedLSTM(128, 4)
    padded.load_state_dict(lstm.state_dict())
    torch.testing.assert_close(padded(*lengths.padded(in_order)), lstm(in_order)[0].data)


def test_memory(tmp_path):
    """It is counted, so it is the same on each processor."""
    _, (measured,) = run("memory", tmp_path)
    (documented,) = figures.read(figures.DOCUMENTED / "memory.csv")
    assert measured.keys() == documented.keys()
    for name, mebibytes in documented.items():
        assert float(measured[name]) == pytest.approx(float(mebibytes), rel=0.1), name


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return program(ROOT / "benchmarks" / "tables.py")


def words(page):
    return " ".join((ROOT / page).read_text().split())


def test_documented_figures_are_the_measured_ones(tables):
    performance = (ROOT / "docs" / "performance.md").read_text()
    for table in (tables.machines(), tables.summary(), tables.compared(), tables.packed()):
        assert tables.markdown(table) in performance


def test_sentences_have_the_measured_figures(tables):
    """Those in prose: of the picture, and of the table of memory."""
    readme, training = map(words, ("README.md", "docs/training.md"))
    trained = {"threads": "1", "what": "training"}
    (row,) = tables.load("zen5", "lengths", length="640", form="packed", **trained)
    (memory,) = figures.read(figures.DOCUMENTED / "memory.csv")
    assert f"`nn.LSTM` takes {tables.ratio(row, 'LSTM'):.0f} times as long" in readme
    assert f"takes {tables.ratio(row, 'LSTM padded'):.1f} times as long (padded)" in readme
    assert f"or {tables.ratio(row, 'LSTM by segments'):.1f} times ([by segments]" in readme
    ours, gru, lstm = (f"{float(memory[name]):.0f}" for name in ("lltm_ops", "GRU", "LSTM"))
    assert f"[{ours} MiB](docs/training.md#long-sequences)" in readme
    assert f"`nn.GRU` takes {gru}, `nn.LSTM` {lstm}" in readme
    for name, mebibytes in memory.items():
        shown = name.replace("lltm_ops", "LLTM") if "lltm" in name else f"`nn.{name}`"
        assert f"| {shown} | {float(mebibytes):.0f} |" in training


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sentences_have_the_figures_of_the_gpu(dtype):
    rows = figures.read(figures.DOCUMENTED / "h100" / "recurrence.csv")
    leads = [
        float(row["nn.LSTM"]) / float(row["recurrence"])
        for row in rows
        if row["dtype"] == dtype and row["recurrence"]
    ]
    found = rf"\| {dtype} \| `nn.LSTM`.* \| {min(leads):.2f} to {max(leads):.2f} \|"
    assert re.search(found, (ROOT / "docs" / "cuda.md").read_text())


def test_the_picture_of_the_readme_is_of_the_measured_figures(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import how_fast
    from PIL import Image

    panels = how_fast.panels()
    how_fast.draw(panels, tmp_path / "picture.png")
    for picture in (tmp_path / "picture.png", ROOT / "docs" / "images" / "how_fast.png"):
        assert Image.open(picture).text["Description"] == json.dumps(panels)


def test_the_files_of_each_part_for_a_gpu_exist():
    gpu = program(ROOT / "benchmarks" / "gpu.py")
    for part in gpu.PARTS:
        for file in re.findall(r"(?:benchmarks|csrc|tests)/[\w/]*(?:\.\w+)?", part.command):
            assert (ROOT / file).exists(), (part.name, file)
    # CONTRIBUTING.md, "On a GPU".
    quick = list(itertools.takewhile(lambda part: part.name != "tests", gpu.PARTS))
    assert sum(part.seconds for part in quick) <= 15 * 60
