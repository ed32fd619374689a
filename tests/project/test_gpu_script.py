"""benchmarks/gpu.py tells what passed from what failed, came too late or never began."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from common import ROOT, program

import lltm_ops

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    return program(SCRIPT)


@pytest.mark.parametrize(
    ("command", "seconds", "expected"),
    [
        ([sys.executable, "-c", "pass"], 60, 0),
        ([sys.executable, "-c", "raise SystemExit(3)"], 60, 3),
        ([sys.executable, "-c", "while True: pass"], 2, "TimeoutExpired"),
        (["no-such-program"], 2, "FileNotFoundError"),
    ],
)
def test_a_process_ends_with_its_status_or_in_time(gpu, tmp_path, command, seconds, expected):
    assert gpu.finish(command, seconds, tmp_path / "log") == expected


def test_results_of_tests_are_counted_and_failures_named(gpu, tmp_path, monkeypatch):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_some.py").write_text(
        "import pytest  # needs_cuda\n"
        "def test_cuda_passes(): pass\n"
        "def test_cuda_fails(): assert False\n"
        "def test_cuda_is_skipped(): pytest.skip()\n"
        "def test_other(): assert False\n"
    )
    (tests / "test_none.py").write_text('"""each_device"""\ndef test_other(): assert False\n')
    (tests / "test_of_the_cpu.py").write_text("def test_cuda_or_not(): assert False\n")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    result = gpu.run_tests(tmp_path, 60)
    assert not result["ok"]
    assert set(result["summary"].split(", ")) == {"1 passed", "1 failure", "1 skipped"}
    assert result["statuses"] == {"test_none": 5, "test_some": 1}
    assert [name.split("::")[1] for name in result["failed"]] == ["test_cuda_fails"]


@pytest.mark.parametrize("passes", [True, False])
def test_each_part_prints_a_line_and_writes_a_file(gpu, tmp_path, monkeypatch, capsys, passes):
    def part(folder, seconds):
        return {"ok": passes, "summary": f"had {seconds} s"}

    monkeypatch.setattr(gpu, "PARTS", {"first": (part, 1), "second": (part, 2)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(lltm_ops, "build_info", lambda: {"cuda": "13.0"})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path)])
    assert gpu.main() == (0 if passes else 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["first", "second"]
    assert ("FAILED" in lines[0]) != passes
    assert json.loads((tmp_path / "second.json").read_text())["summary"] == "had 2 s"


def test_a_command_that_is_late_ends_with_all_its_processes(gpu, tmp_path, monkeypatch):
    """Also one that ignores SIGINT, and one that it has begun."""
    monkeypatch.setattr(gpu, "GRACE", 1)
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    parent = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])\n"
    )
    log = tmp_path / "log"
    assert gpu.finish([sys.executable, "-c", parent], 10, log) == "TimeoutExpired"
    assert_ends(int(log.read_text().split()[0]))


def assert_ends(pid):
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_sigterm_ends_what_was_begun(tmp_path):
    """By a limit of time around the script."""
    log = tmp_path / "log"
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    code = (
        "import pathlib, runpy, signal, sys\n"
        f"gpu = runpy.run_path({str(SCRIPT)!r})\n"
        "signal.signal(signal.SIGTERM, gpu['kill_all'])\n"
        f"gpu['finish']([sys.executable, '-c', {child!r}], 1000, pathlib.Path({str(log)!r}))\n"
    )
    script = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    script.terminate()
    assert script.wait(10) == 128 + 15
    assert_ends(int(log.read_text()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "expected the packages pytest not_there, but got no not_there"),
        (["--parts", "times", "probes"], "expected a GPU"),
    ],
    ids=["all", "without tests"],
)
def test_says_which_package_is_missing_for_tests(gpu, monkeypatch, capsys, parts, words):
    monkeypatch.setattr(gpu, "PACKAGES", ("pytest", "not_there"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", *parts])
    with pytest.raises(SystemExit):
        gpu.main()
    assert words in capsys.readouterr().err


def test_a_report_is_written_when_time_is_over(gpu, tmp_path, monkeypatch):
    """By pytest, at SIGINT: what passed until then is known."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_slow.py").write_text(
        "import time  # needs_cuda\n"
        "def test_cuda_first(): pass\n"
        "def test_cuda_second(): time.sleep(1000)\n"
    )
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    result = gpu.run_tests(tmp_path, 20)
    assert not result["ok"]
    assert result["summary"] == "1 passed, 1 unfinished"


def test_what_has_no_time_left_does_not_begin(gpu, tmp_path):
    commands = gpu.Commands(tmp_path, "part", 0)
    assert not commands.run("late", [sys.executable, "-c", "pass"])
    assert gpu.verdict(commands.statuses) == {
        "ok": False, "summary": "late: no time left", "statuses": {"late": "no time left"},
    }  # fmt: skip


def test_the_recurrence_is_timed_beside_its_contenders(monkeypatch):
    """On the CPU, each call made once."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import recurrence

    def medians(calls, rounds, device):
        return {name: float(call() is not None) for name, call in calls.items()}

    monkeypatch.setattr(recurrence, "DEVICE", "cpu")
    monkeypatch.setattr(recurrence, "launches_of", lambda call: {"ran": 1})
    monkeypatch.setattr(recurrence.contest, "captured", lambda call: call)
    monkeypatch.setattr(recurrence.timing, "medians", medians)
    args = argparse.Namespace(dtype="float32", time=4, rounds=1)
    for what in ("inference", "training"):
        times = recurrence.measure(8, 2, what, args)["microseconds_per_step"]
        slow = {"a kernel a step", "nn.LSTM"}
        assert set(times) == {"recurrence", *slow, *(f"{name} with TF32" for name in slow)}
        assert set(times.values()) == {1e6 / 4}


def test_figures_stay_when_a_later_row_fails(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import recurrence

    def measure(size, batch, what, args, form):
        if size == 2:
            raise RuntimeError("out of memory")
        if size == 3:
            raise KeyboardInterrupt
        return {"microseconds_per_step": {"recurrence": 1.0}}

    monkeypatch.setattr(recurrence, "measure", measure)
    monkeypatch.setattr(recurrence.timing, "describe", lambda device, dtype: {})
    arguments = ["--sizes", "1", "2", "3", "--batches", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["recurrence.py", *arguments])
    with pytest.raises(KeyboardInterrupt):
        recurrence.main()
    rows = json.loads((tmp_path / "recurrence_cuda_bfloat16.json").read_text())["rows"]
    assert [row.get("error") for row in rows] == [None, None, "out of memory", "out of memory"]
