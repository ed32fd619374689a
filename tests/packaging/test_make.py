"""make, from nothing: what it asks of a machine, and what it makes whole, once, or not at all."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from common import OF_MAKE, ROOT

# Notes how it is called, and fails where the file `fails` has a part of that, or hangs.
PYTHON = """#!/bin/sh
echo "$*" >> calls
if [ -s fails ] && echo "$*" | grep -q -f fails; then exit 1; fi
if [ -s hangs ] && echo "$*" | grep -q -f hangs; then exec sleep 60; fi
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
cp "$0" "$3/bin/python"
"""
TORCH = "-m pip install torch==2.13.0"
BUILD = "setup.py --quiet build_ext --inplace"
PACKAGES = "-m pip install --quiet --no-build-isolation --editable .[demo,test]"
TESTS = "-m pytest --numprocesses=auto --maxprocesses=8 --dist=loadgroup -m not slow"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """All that make looks at, with a Python that does nothing."""
    (tmp_path / "csrc").mkdir()
    for name in ("csrc/a.cpp", "setup.py", "pyproject.toml"):
        (tmp_path / name).touch()
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "python3").write_text(PYTHON)
    (tmp_path / "python3").chmod(0o755)
    for name in (*OF_MAKE, "TORCH", "TEST_ARGS", "CUDA_HOME", "FORCE_CUDA"):
        monkeypatch.delenv(name, raising=False)
    for name in ("VENV", "PYTHON"):  # in the environment, they mean something else
        monkeypatch.setenv(name, "of another project")
    (tmp_path / "fails").write_text("urlopen")  # the index of torch for the CPU is out of reach
    return tmp_path


def make(project, *arguments):
    """The exit status, what was said, and how Python was called, without the questions."""
    (project / "calls").write_text("")
    command = ["make", "BASE_PYTHON=./python3", *arguments]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True)
    calls = (project / "calls").read_text().splitlines()
    return result.returncode, result.stderr, [call for call in calls if call[:2] != "-c"]


def test_a_second_run_installs_and_builds_nothing(project):
    status, _, calls = make(project, "test")
    assert status == 0
    assert calls[0] == "-m venv .venv"
    assert calls[2:] == [TORCH, BUILD, PACKAGES, TESTS]
    assert make(project, "test") == (0, "", [TESTS])


@pytest.mark.parametrize(
    ("fails", "variables", "sentence"),
    [
        ("version_info", [], r"Python 3.10 or later is missing (./python3 is none): install it"),
        ("ensurepip", [], "Python's venv is missing: install python3-venv"),
        ("Python.h", [], "Python.h, which torch.compile needs, is missing: install python3-dev"),
        ("no", ["CXX=gone"], "A compiler for C++20 is missing (gone is none): install g++ 11"),
    ],
)
def test_what_a_machine_lacks_is_one_sentence(project, fails, variables, sentence):
    (project / "fails").write_text(fails)
    status, said, calls = make(project, "test", *variables)
    assert (status, calls) == (2, [])
    assert said.startswith(sentence)
    assert said.count("\n") == 2  # its own, and make's
    assert not (project / ".venv").exists()


def test_an_installation_that_fails_leaves_no_environment(project):
    (project / "fails").write_text("install torch")
    assert make(project, "test")[0] == 2
    assert not (project / ".venv").exists()


def test_ctrl_c_leaves_no_environment(project):
    (project / "hangs").write_text("install torch")
    command = ["make", "BASE_PYTHON=./python3", "test"]
    process = subprocess.Popen(command, cwd=project, start_new_session=True)
    calls = project / "calls"
    while not (calls.exists() and TORCH in calls.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) != 0
    assert not (project / ".venv").exists()


def test_a_folder_that_make_has_not_made_stays(project):
    (project / "own").mkdir()
    (project / "own" / "file").touch()
    status, said, calls = make(project, "test", "VENV=own", "TORCH=torch==2.12.0")
    assert (status, calls) == (2, [])
    assert said.startswith("own is there, but was not made here, or not to its end: remove it")
    assert (project / "own" / "file").exists()


def test_another_torch_makes_the_environment_anew(project):
    make(project, "test")
    (project / ".venv" / "of torch 2.13").touch()
    words = "torch>=2.14 --extra-index-url https://example.org/cpu"
    _, _, calls = make(project, "test", f"TORCH={words}")
    assert f"-m pip install {words}" in calls
    assert not (project / ".venv" / "of torch 2.13").exists()
    assert make(project, "test", f"TORCH={words}")[2] == [TESTS]
    assert make(project, "test")[2] == [TESTS]


def test_a_change_is_built_and_nothing_is_fetched(project):
    make(project, "test")
    assert make(project, "test", "DEBUG=1")[2] == [BUILD, PACKAGES, TESTS]
    later = (project / ".venv" / ".built").stat().st_mtime + 1
    os.utime(project / "csrc" / "a.cpp", (later, later))
    assert make(project, "test", "DEBUG=1")[2] == [BUILD, PACKAGES, TESTS]


@pytest.mark.parametrize("asks", ["nothing", "FORCE_CUDA=1", "CUDA_HOME=/cuda", "nvidia-smi"])
def test_torch_is_for_the_cpu_unless_something_asks_for_cuda(project, monkeypatch, asks):
    if asks == "nothing" and shutil.which("nvidia-smi"):
        pytest.skip("this machine asks for CUDA")
    (project / "fails").unlink()
    if asks == "nvidia-smi":
        (project / asks).symlink_to("python3")
    monkeypatch.setenv("PATH", f"{project}{os.pathsep}{os.environ['PATH']}")
    cpu = " --extra-index-url https://download.pytorch.org/whl/cpu" if asks == "nothing" else ""
    assert TORCH + cpu in make(project, "test", *([asks] if "=" in asks else []))[2]
