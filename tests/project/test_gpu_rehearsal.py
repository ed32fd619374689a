"""A rehearsal of make gpu: each part of benchmarks/gpu.py runs to its end, without a GPU.

The programs in Python run, on the CPU and at small sizes. What other programs would read has to be
there, and what check.cpp is told has to be an option of it.
"""

import contextlib
import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from common import ROOT, program
from torch.overrides import TorchFunctionMode

import lltm_ops

BENCHMARKS = ROOT / "benchmarks"
CHECK = (ROOT / "tests" / "cuda" / "recurrence" / "check.cpp").read_text()
SMALL = {
    "recurrence": "--sizes 8 --batches 2 --time 4",
    "probes": "--sizes 8 --batch 2 --time 4",
    "cell": "--shapes 2x3x4",
    "sequence": "--shapes 3x2x3x4",
}


class OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def call_each(functions, *args, **options):
    """In place of timing.medians."""
    return {name: len([function()]) for name, function in functions.items()}


def look_for_files(command):
    for word in map(str, command):
        if word.removeprefix("-I").startswith((str(ROOT), "tests/")):
            assert (ROOT / word.removeprefix("-I")).exists()
    return SimpleNamespace(stdout="{}")


def pretend_to_have_a_gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    cell, contest, probes, recurrence, timing = map(
        importlib.import_module, ("cell", "contest", "probes", "recurrence", "timing")
    )
    build_info = lltm_ops.build_info() | {"cuda": "13.0"}
    properties = SimpleNamespace(multi_processor_count=132)
    for owner, name, stand_in in (
        (lltm_ops, "build_info", lambda: build_info),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "get_device_capability", lambda: (9, 0)),
        (torch.cuda, "get_device_name", lambda: "a GPU"),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (torch.cuda, "current_stream", mock.MagicMock()),
        (torch.cuda, "Stream", mock.MagicMock()),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch, "compile", lambda module, **options: module),
        (torch, "set_num_threads", lambda threads: None),
        (timing, "load_native", lambda: None),
        (timing, "settle_allocator", lambda: None),
        (timing, "medians", call_each),
        (contest, "captured", lambda function: function),
        (cell, "TutorialCell", cell.EagerCell),
        (recurrence, "launches_of", lambda function: {"ran": 1}),
        (probes, "CUDA_HOME", "/cuda"),
        (probes, "profile", mock.MagicMock()),
        (probes.subprocess, "run", lambda command, **options: look_for_files(command)),
    ):
        monkeypatch.setattr(owner, name, stand_in)


def test_every_part_runs_to_its_end(monkeypatch, tmp_path, capsys):
    run = subprocess.run
    pretend_to_have_a_gpu(monkeypatch)
    gpu = program(BENCHMARKS / "gpu.py")
    ran = []

    def finish(command, seconds, log):
        look_for_files(command)
        words = [Path(word).name for word in command]
        if "make" in words:
            return run([*command, "--dry-run"], cwd=ROOT, stdout=subprocess.DEVNULL).returncode
        if "check" in words:
            for option in command[words.index("check") + 1 :]:
                assert f'name == "{option.partition("=")[0]}"' in CHECK
        if command[0] == sys.executable and command[1] != "-m":
            name = Path(command[1]).stem
            monkeypatch.setattr(sys, "argv", [*command[1:], *SMALL[name].split()])
            importlib.import_module(name).main()
            ran.append(name)
        return 0

    monkeypatch.setattr(gpu, "finish", finish)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path)])
    with OnTheCpu():
        assert gpu.main() == 0, capsys.readouterr().out
    assert set(ran) == set(SMALL)
    assert {file.stem for file in tmp_path.glob("*.json")} >= set(gpu.PARTS)
    assert not [file for file in tmp_path.glob("*.json") if '"error"' in file.read_text()]
