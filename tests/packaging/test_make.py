"""make: what it asks of a machine first, and what it does again, or not, in a second run."""

import fcntl
import io
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from common import OF_MAKE, ROOT, program

CHECK = ROOT / "tools" / "check_machine.py"
default_torch = program(ROOT / "tools" / "default_torch.py")
# Notes how it is called. The file `missing` has what the machine lacks: such a call fails.
PYTHON = """#!/bin/sh
echo "$*" >> calls
if [ -s missing ]; then echo "$*" | grep -q -f missing && exit 1; fi
case "$*" in *--build-lib*) mkdir -p "${*##* }";; *default_torch*) echo torch==2.13.0;; esac
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
for name in python auditwheel abi3audit twine; do cp "$0" "$3/bin/$name"; done
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """All that make looks at, with a Python that does nothing."""
    for name in ("csrc", "lltm_ops"):
        (tmp_path / name).mkdir()
    for name in ("csrc/a.cpp", "setup.py", "pyproject.toml", "missing"):
        (tmp_path / name).touch()
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "python3").write_text(PYTHON)
    (tmp_path / "python3").chmod(0o755)
    for name in (*OF_MAKE, "VENV", "PYTHON", "TORCH", "TEST_ARGS", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def make(project, *arguments):
    """The exit status, and how Python was called."""
    calls = project / "calls"
    calls.write_text("")
    command = ["make", "BASE_PYTHON=./python3", *arguments]
    status = subprocess.run(command, cwd=project, stdout=subprocess.DEVNULL).returncode
    return status, calls.read_text().replace("--quiet ", "").splitlines()


HAS_TORCH = '-c from importlib.util import find_spec; exit(find_spec("torch") is None)'
INSTALL = [
    "tools/default_torch.py",
    "tools/check_machine.py .venv torch==2.13.0",
    "-m venv .venv",
    "-m pip install --upgrade pip setuptools ninja wheel",
    "-m pip uninstall --yes torch",
    "-m pip install torch==2.13.0",
    HAS_TORCH,
]
BUILD = [
    "tools/check_machine.py",
    "setup.py build_ext --inplace",
    "-m pip install --no-build-isolation --editable .[demo,test]",
]
TEST = [
    "-c import xdist",
    "-m pytest --override-ini=faulthandler_timeout=1800 "
    "--override-ini=faulthandler_exit_on_timeout=true "
    "--numprocesses=auto --maxprocesses=8 --dist=loadgroup -m not slow",
]


def test_a_second_run_installs_and_builds_nothing(project):
    assert make(project, "test") == (0, [*INSTALL, *BUILD, *TEST])
    assert make(project, "test") == (0, [HAS_TORCH, *TEST])


@pytest.mark.parametrize(
    ("missing", "done", "again"),
    [
        ("check_machine", INSTALL[:2], [*INSTALL, *BUILD, *TEST]),
        ("install torch", INSTALL[:-1], [*INSTALL, *BUILD, *TEST]),
        ("find_spec", INSTALL, [*INSTALL, *BUILD, *TEST]),
        ("build_ext", [*INSTALL, *BUILD[:2]], [HAS_TORCH, *BUILD, *TEST]),
        ("--editable", [*INSTALL, *BUILD], [HAS_TORCH, *BUILD, *TEST]),
    ],
)
def test_a_run_goes_on_where_one_before_it_ended(project, missing, done, again):
    (project / "missing").write_text(missing)
    assert make(project, "test") == (2, done)
    (project / "missing").write_text("")
    assert make(project, "test") == (0, again)


def test_a_changed_source_is_built_and_nothing_is_fetched(project):
    make(project, "test")
    later = (project / ".venv" / ".built").stat().st_mtime + 1
    os.utime(project / "csrc" / "a.cpp", (later, later))
    assert make(project, "test") == (0, [HAS_TORCH, *BUILD, *TEST])


@pytest.mark.parametrize(
    ("nvidia_smi", "variables", "reached", "for_cpu"),
    [
        (None, {}, True, True),
        (None, {}, False, False),
        ("/bin/nvidia-smi", {}, True, False),
        (None, {"CUDA_HOME": "/usr/local/cuda"}, True, False),
        (None, {"FORCE_CUDA": "1"}, True, False),
    ],
)
def test_torch_is_for_the_cpu_where_nothing_asks_for_cuda(
    monkeypatch, nvidia_smi, variables, reached, for_cpu
):
    def urlopen(url, timeout):
        if not reached:
            raise urllib.error.URLError("no route")
        return io.BytesIO()

    monkeypatch.setattr(shutil, "which", lambda name: nvidia_smi)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    for name in ("CUDA_HOME", "FORCE_CUDA"):
        monkeypatch.setenv(name, variables.get(name, ""))
    index = f" --extra-index-url {default_torch.CPU_INDEX}" if for_cpu else ""
    assert default_torch.default() == f"torch==2.13.0{index}"


def test_another_torch_is_installed_with_all_that_its_words_say(project):
    make(project, "test")
    words = "torch>=2.14 --extra-index-url https://example.org/cpu"
    _, calls = make(project, "test", f"TORCH={words}")
    # For pip, another build of the same version is the same.
    assert "-m pip uninstall --yes torch" in calls
    assert f"-m pip install {words}" in calls
    assert make(project, "test", "TORCH=") == (0, [HAS_TORCH, *TEST])


def test_an_interrupted_change_of_torch_is_not_taken_for_the_old_one(project):
    make(project, "test")
    (project / "missing").write_text("install torch")
    assert make(project, "test", "TORCH=torch==2.15.0")[0] == 2
    (project / "missing").write_text("")
    _, calls = make(project, "test")
    assert "-m pip install torch==2.13.0" in calls


def test_wheels_go_on_where_they_were_cut_with_one_torch_at_a_time(project):
    def fetched_or_built():
        status, calls = make(project, "wheels", "TORCHES=2.11.0 2.12.0")
        shown = [
            call
            for call in calls
            if re.match("-m pip install torch|setup.py|-W ignore tools", call)
        ]
        return status, [call.partition("--build-lib ")[2] or call for call in shown]

    steps = ["-m pip install torch==2.11.0", "build/wheels/2.11.0/CPU.part"]
    steps += ["-m pip install torch==2.12.0", "build/wheels/2.12.0/CPU.part"]
    folders = "build/wheels/packed build/wheels/2.11.0/CPU build/wheels/2.12.0/CPU"
    pack = f"-W ignore tools/fat_wheel.py {folders}"
    (project / "missing").write_text("2.12.0/CPU.part")
    assert fetched_or_built() == (2, steps)
    (project / "missing").write_text("")
    assert fetched_or_built() == (0, [steps[-1], pack])
    assert not (project / ".venv-wheel").exists()
    assert fetched_or_built() == (0, [pack])


def test_of_two_makes_one_waits(project):
    (project / "build").mkdir()
    with open(project / "build" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "BASE_PYTHON=./python3", "test"]
        with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout.readline() == "Waiting for another make in this checkout\n"
            assert not (project / "calls").exists()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert "Waiting" not in second.communicate()[0]
    assert make(project, "test") == (0, [HAS_TORCH, *TEST])


def test_what_the_compiler_leaves_behind_does_not_hold_the_lock(project):
    left = "setsid sleep 20 > /dev/null 2>&1 < /dev/null &"
    (project / "python3").write_text(PYTHON.replace("exit 0", f"{{ {left} exit 0; }}"))
    make(project, "in-place", "PYTHON=./python3")
    with open(project / "build" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("variable", ["VENV", "PYTHON"])
def test_the_environment_chooses_no_other_one(project, monkeypatch, variable):
    """There, these variables mean something else."""
    monkeypatch.setenv(variable, "of another project")
    assert make(project, "test") == (0, [*INSTALL, *BUILD, *TEST])


def test_extras_are_installed_once_and_only_for_who_needs_them(project):
    make(project, "test")
    with_extras = "-m pip install --no-build-isolation --editable .[demo,test,docs,onnx]"
    all_tests = [TEST[0], TEST[1].removesuffix(" -m not slow")]
    assert make(project, "test-all") == (0, [HAS_TORCH, with_extras, *all_tests])
    assert make(project, "test-all") == (0, [HAS_TORCH, *all_tests])
    (project / ".venv" / "bin" / "python").unlink()
    assert make(project, "test-all") == (0, [*INSTALL[1:], *BUILD, with_extras, *all_tests])


def test_cleaning_leaves_the_lock_to_who_waits(project):
    make(project, "test")
    make(project, "clean")
    assert (project / "build" / ".lock").exists() and not (project / ".venv").exists()


def lacking(folder=ROOT, environment=".venv", **variables):
    """What check_machine.py says of all but the disk, line by line."""
    command = [sys.executable, CHECK, environment, "torch==2.13.0"]
    result = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    lines = result.stderr.splitlines()
    assert (result.returncode != 0) == bool(lines)
    return [line for line in lines if " GB of disk are needed " not in line]


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("gone", ["A C++ compiler is missing (gone was not found): install g++"]),
        ("ccache g++", ["CXX is 'ccache g++', which torch.compile takes for the name of one"]),
        ("false", ["The compiler false is no g++ for C++20 (it said nothing): install g++ 11"]),
        ("c++", []),
    ],
)
def test_what_is_lacking_of_a_compiler(compiler, words):
    said = lacking(CXX=compiler)
    assert len(said) == len(words)
    assert all(map(str.startswith, said, words))


@pytest.mark.parametrize("character", " &'$;")
def test_a_path_that_torch_does_not_quote(tmp_path, character):
    """A build or torch.compile would fail there, or a shell would run a part of it."""
    folder = tmp_path / f"a{character}b"
    folder.mkdir()
    (sentence,) = lacking(folder=folder, environment=tmp_path / ".venv")
    assert f"has {character!r} in it ({folder}" in sentence
