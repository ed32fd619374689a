"""The benchmarks run, and the documented figures are the ones that a run wrote."""

import itertools
import json
import math
import subprocess
import sys
from importlib.util import find_spec

import pytest
from common import ROOT, environment

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow

HAS_ONNXRUNTIME = all(find_spec(name) is not None for name in ("onnx", "onnxruntime"))
FIGURES = ROOT / "docs" / "benchmarks"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(script, *options):
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *map(str, options)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("dtype", "threads", "shapes"),
    [("float32", [1, 2], ["17x4x6"]), ("bfloat16", [1], ["1x0x2"])],
    ids=["float32", "bfloat16"],
)
def test_cell(tmp_path, dtype, threads, shapes):
    options = ["--dtype", dtype, "--threads", *threads, "--shapes", *shapes]
    printed = run("cell.py", *options, "--rounds", 1, "--output", tmp_path)
    written = json.loads((tmp_path / f"cell_cpu_{dtype}.json").read_text())
    rows = written["rows"]
    assert len(rows) == len(threads) * len(shapes) * 3
    assert written["torch"] and written["machine"] and written["dtype"] == dtype
    for row in rows:
        times = row["microseconds"]
        assert set(times) == {"lltm_ops", "eager", "compile", "C++", "LSTMCell"}
        best = min(time for name, time in times.items() if name != "lltm_ops")
        assert row["ratio"] == pytest.approx(best / times["lltm_ops"])
        assert f"{row['ratio']:.2f}" in printed
        assert math.isfinite(row["share_of_roof"])
    assert (tmp_path / f"cell_cpu_{dtype}.png").read_bytes().startswith(PNG_SIGNATURE)


def test_sequence(tmp_path):
    options = ["--threads", 1, 2, "--shapes", "3x1x1x2", "9x17x4x6"]
    printed = run("sequence.py", *options, "--rounds", 1, "--output", tmp_path)
    rows = json.loads((tmp_path / "sequence_cpu_float32.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        names = {"lltm_ops", "cell in a loop", "eager loop", "LSTM", "GRU"}
        if row["what"] == "inference" and HAS_ONNXRUNTIME:
            names.add("onnxruntime")
        assert set(row["microseconds"]) == names
        assert f"{row['ratio']:.2f}" in printed
    picture = tmp_path / "sequence_cpu_float32.png"
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_lengths(tmp_path):
    options = ["--lengths", 1, 9, "--batch", 2, "--size", 3, "--rounds", 1, "--threads", 1]
    printed = run("lengths.py", *options, "--output", tmp_path)
    rows = json.loads((tmp_path / "lengths_cpu_float32.json").read_text())["rows"]
    assert [(row["length"], row["form"], row["what"]) for row in rows] == list(
        itertools.product([1, 9], ["padded", "packed"], ["inference", "training"])
    )
    assert "9 steps, packed" in printed
    picture = tmp_path / "lengths_cpu_float32.png"
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_sweep(tmp_path):
    sizes = ["--batches", 1, 17, "--inputs", 0, 3, "--states", 1, 5]
    printed = run("sweep.py", *sizes, "--output", tmp_path)
    written = json.loads((tmp_path / "sweep_cpu_float32_1_thread.json").read_text())
    assert len(written["rows"]) == 2 * 2 * 2 * 3
    slower = sum(row["ratio"] < 1 for row in written["rows"])
    assert f"24 figures, {slower} slower" in printed
    picture = tmp_path / "sweep_cpu_float32_1_thread.png"
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_documented_figures_are_the_measured_ones(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import report

    folders = report.processors()
    assert folders
    for folder in folders:
        assert (folder / "README.md").read_text() == report.page(folder)
    for folder in report.gpus():
        assert (folder / "README.md").read_text() == report.gpu_page(folder)
    assert "\n".join(report.summary(folders)) in (ROOT / "docs" / "performance.md").read_text()


def test_the_picture_of_the_readme_is_of_the_measured_figures(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import report
    from PIL import Image

    step, sequence = report.glance().values()
    for name, peer, shown in (
        ("cell", "LSTMCell", step["nn.LSTMCell"]),
        ("sequence", "LSTM", sequence["nn.LSTM"]),
    ):
        rows = json.loads((FIGURES / "zen4" / f"{name}_cpu_float32.json").read_text())["rows"]
        times = [row["microseconds"] for row in rows if row["what"] == "training"]
        assert shown in [time[peer] / time["lltm_ops"] for time in times]
    monkeypatch.setattr(sys, "argv", ["report.py", f"--glance={tmp_path / 'picture.png'}"])
    report.main()
    panels = json.dumps(report.glance())
    for picture in (tmp_path / "picture.png", ROOT / "docs" / "images" / "how_fast.png"):
        assert Image.open(picture).text["Description"] == panels
