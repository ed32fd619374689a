"""A rehearsal of make gpu: each step of benchmarks/gpu.py runs to its end, without a GPU.

The programs in Python run, on the CPU and at small sizes. What other programs would read has to be
there, and what check.cpp is told has to be an option of it.
"""

import contextlib
import importlib
import itertools
import os
import runpy
import select
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from common import ROOT, program
from torch.overrides import TorchFunctionMode

import lltm_ops

BENCHMARKS = ROOT / "benchmarks"
DOCS = " ".join((ROOT / "docs" / "cuda.md").read_text().split())
CHECK = (ROOT / "tests" / "cuda" / "recurrence" / "check.cpp").read_text()
SMALL = {
    "recurrence": "--sizes 8 --batches 2 --times 4",
    "cell": "--shapes 2x3x4",
    "sequence": "--shapes 3x2x3x4",
    "few_rows": "--sizes 8 --batches 2",
}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    gpu = program(BENCHMARKS / "gpu.py")
    monkeypatch.setattr(gpu, "OUTPUT", tmp_path / "gpu")
    gpu.OUTPUT.mkdir()
    return gpu


class OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def call_each(functions, *args, **options):
    """In place of timing.medians."""
    return {name: float(len([function()])) for name, function in functions.items()}


def pretend_to_have_a_gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    contest, timing = map(importlib.import_module, ("contest", "timing"))
    counted = itertools.count()
    properties = SimpleNamespace(multi_processor_count=132)
    for owner, name, stand_in in (
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "get_device_capability", lambda: (9, 0)),
        (torch.cuda, "get_device_name", lambda: "a GPU"),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (torch.cuda, "current_stream", mock.MagicMock()),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "CUDAGraph", mock.MagicMock()),
        (torch.cuda, "graph", lambda graph: contextlib.nullcontext()),
        (torch.cuda, "Stream", mock.MagicMock()),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch, "compile", lambda module, **options: module),
        (torch, "set_num_threads", lambda threads: None),
        (torch.profiler, "profile", mock.MagicMock()),
        (torch.ops.lltm, "_recurrence_outcomes", lambda: [next(counted), 0, 0, 0]),
        (torch.ops.lltm_benchmark, "tutorial_cell", lltm_ops.reference),
        (torch.ops.lltm_benchmark, "few_rows", lltm_ops.forward),
        (contest, "load_native", lambda *names: None),
        (timing, "settle_allocator", lambda: None),
        (timing, "medians", call_each),
        (timing, "captured", lambda function: function),
    ):
        monkeypatch.setattr(owner, name, stand_in, raising=False)


def look_at(command):
    """What it reads is there, and what it says is understood."""
    for word in command:
        if word.removeprefix("-I").startswith(str(ROOT)):
            assert Path(word.removeprefix("-I")).exists()
    if "make" in command:
        dry = [*command, "--dry-run"]
        subprocess.run(dry, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    names = [Path(word).name for word in command]
    options = command[names.index("check") + 1 :] if "check" in names else []
    for option in options:
        assert f'name == "{option.partition("=")[0]}"' in CHECK


def test_every_step_runs_to_its_end(gpu, monkeypatch, capsys):
    pretend_to_have_a_gpu(monkeypatch)
    ran = []

    def finish(command, seconds, log):
        log.touch()
        look_at(command)
        if command[:2] == [sys.executable, "-c"]:
            with pytest.raises(SystemExit), OnTheCpu():
                exec(command[2], {})
        elif command[-1] == str(ROOT / "learn"):
            subprocess.run([*command, "--collect-only"], check=True)
        elif command[0] == sys.executable and Path(command[1]).parent == BENCHMARKS:
            name = Path(command[1]).stem
            monkeypatch.setattr(sys, "argv", [*command[1:], *SMALL[name].split()])
            with OnTheCpu():
                runpy.run_path(command[1], run_name="__main__")
            ran.append(name)
        return 0

    monkeypatch.setattr(gpu, "finish", finish)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    status, said = gpu.main(), capsys.readouterr().out
    assert status == 0, said
    for part, decides in gpu.PARTS.items():
        assert said.count(f"{part} decides {decides}.") == 1
    assert set(ran) == set(SMALL)
    tables = list(gpu.OUTPUT.glob("*/*.csv"))
    assert len(tables) == len(ran)
    assert not [table for table in tables if "error" in table.read_text()]
    # docs/cuda.md: what fits into one call of 600 s, and into two.
    calls = (
        ["build", "truth", "first_call", "operators"],
        ["times", "graphs", "benchmark", "checkers"],
    )
    assert [*calls[0], *calls[1]] == list(gpu.PARTS)[: list(gpu.PARTS).index("tests")]
    seconds = [sum(step[1] for part in parts for step in gpu.steps_of(part)) for parts in calls]
    assert max(seconds) <= 600 and sum(seconds) <= 16 * 60
    assert all(f"`--parts {' '.join(parts)}`" in DOCS for parts in calls)


def test_a_run_that_is_killed_leaves_an_archive(gpu, monkeypatch):
    pretend_to_have_a_gpu(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--parts", "graphs", "checkers"])

    def finish(command, seconds, log):
        if log.stem == "memcheck":
            raise KeyboardInterrupt
        return log.write_text("right") * 0

    monkeypatch.setattr(gpu, "finish", finish)
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    with tarfile.open(f"{gpu.OUTPUT}.tar.gz") as archive:
        assert "./two_streams.log" in archive.getnames()


@pytest.mark.parametrize(
    ("command", "verdict"),
    [("true", "ok"), ("exit 3", "FAILED with 3"), ("sleep 1000", "FAILED with 124")],
)
def test_a_step_ends_with_its_status_or_in_time(gpu, capsys, command, verdict):
    # A process in the background ignores SIGINT.
    command = f"sleep 1000 & echo $!; {command}"
    assert gpu.run(("step", 2, ["bash", "-c", command])) == (verdict == "ok")
    assert capsys.readouterr().out.startswith(f"step: {verdict}, ")
    child = int((gpu.OUTPUT / "step.log").read_text().split()[0])
    with contextlib.suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(child)], [], [], 60)[0], "it still runs"
