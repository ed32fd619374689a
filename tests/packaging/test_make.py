"""make: what it asks of a machine first, and what it does again, or not, in a second run."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import namedtuple

import pytest
from common import OF_MAKE, ROOT, program

CHECK = ROOT / "tools" / "check_machine.py"
# Notes how it is called. The file `missing` has what the machine lacks: such a call fails.
PYTHON = """#!/bin/sh
echo "$*" >> calls
if [ -s missing ]; then echo "$*" | grep -q -f missing && exit 1; fi
case "$*" in *--build-lib*) mkdir -p "${*##* }";; esac
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
for name in python auditwheel abi3audit twine; do cp "$0" "$3/bin/$name"; done
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """All that make looks at, with a Python that does nothing."""
    for name in ("csrc", "lltm_ops"):
        (tmp_path / name).mkdir()
    for name in ("csrc/a.cpp", "lltm_ops/_extension.py", "setup.py", "pyproject.toml", "missing"):
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


GROUP = """
import os
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test(number):
    with open(f"worker_of_{number}", "w") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"])
"""
HAS_TORCH = '-c from importlib.util import find_spec; exit(find_spec("torch") is None)'
INSTALL = [
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
        ("check_machine", INSTALL[:1], [*INSTALL, *BUILD, *TEST]),
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


def test_the_wheel_for_one_torch_replaces_its_own_kind_alone(project):
    for folder in ("dist", "tests"):
        (project / folder).mkdir()
    for_all, before = (
        project / "dist" / f"a-{tags}.whl" for tags in ("py3-none-x", "cp310-abi3-x")
    )
    for_all.touch()
    before.touch()
    status, calls = make(project, "wheel")
    assert status == 0 and "-m build --no-isolation" in calls
    assert for_all.exists() and not before.exists()


def test_a_silent_command_is_said_to_go_on():
    command = "echo first; printf part; sleep 11; echo done; printf last"
    said = subprocess.run(
        f"({command}) | {ROOT}/tools/when_silent compiling",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.fullmatch(r"first\npart\ncompiling: 1\d s\ndone\nlast", said)


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


def test_an_environment_whose_python_is_gone_is_made_anew(project):
    make(project, "test")
    (project / ".venv" / "bin" / "python").unlink()
    assert make(project, "test") == (0, [*INSTALL, *BUILD, *TEST])


def test_a_venv_in_the_environment_means_something_else(project, monkeypatch):
    monkeypatch.setenv("VENV", "of another project")
    assert make(project, "test") == (0, [*INSTALL, *BUILD, *TEST])


def test_cleaning_leaves_the_lock_to_who_waits(project):
    make(project, "test")
    make(project, "clean")
    assert (project / "build" / ".lock").exists() and not (project / ".venv").exists()


def test_without_python_one_sentence_says_so(project):
    result = subprocess.run(
        ["make", "test", "BASE_PYTHON=python9"], cwd=project, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stdout == "Python is missing (python9 was not found): install python3\n"


def test_tests_of_one_group_run_in_one_process(tmp_path):
    """The book's do so because they build in one folder."""
    pytest.importorskip("xdist")
    (tmp_path / "test_group.py").write_text(GROUP)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    subprocess.run([*command, "-n2", "--dist=loadgroup"], cwd=tmp_path, check=True)
    assert len({file.read_text() for file in tmp_path.glob("worker_of_*")}) == 1


def test_pytest_names_what_runs_for_long(tmp_path):
    pytest.importorskip("xdist")
    for name in ("conftest.py", "support/poison.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    (tmp_path / "test_long.py").write_text("import time\ndef test(): time.sleep(11)\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n1", "--rootdir=."]
    said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert re.search(r"^test_long.py::test has run for \d+ s$", said, re.MULTILINE)


def lacking(folder=ROOT, environment=".venv", **variables):
    """What check_machine.py says of all but the disk, line by line."""
    command = [sys.executable, CHECK, environment, "torch==2.13.0"]
    result = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    lines = result.stderr.splitlines()
    assert (result.returncode != 0) == bool(lines)
    return [line for line in lines if " GB of disk are needed " not in line]


def test_this_machine_lacks_nothing():
    assert lacking() == []


def test_a_build_beside_an_environment_asks_for_a_compiler_only():
    command = [sys.executable, CHECK]
    options = {"env": os.environ | {"CXX": "gone"}, "capture_output": True, "text": True}
    result = subprocess.run(command, **options)
    assert result.stderr == "A C++ compiler is missing (gone was not found): install g++\n"


@pytest.fixture
def check_machine():
    return program(CHECK)


VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def test_no_venv(check_machine, monkeypatch):
    """Debian's python3 has venv, but not what it needs."""
    found = check_machine.find_spec
    monkeypatch.setattr(
        check_machine, "find_spec", lambda name: None if name == "ensurepip" else found(name)
    )
    assert list(check_machine.python()) == [f"Python's venv is missing: install {VERSION}-venv"]


def test_no_headers(check_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (sentence,) = check_machine.python()
    assert sentence == f"Python.h, which torch.compile needs, is missing: install {VERSION}-dev"


def test_an_old_python(check_machine, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    sentence, *_ = check_machine.python()
    assert sentence.startswith(f"Python 3.10 or later is needed, but {sys.executable} is ")


@pytest.mark.parametrize(
    ("torch", "cached", "needed"),
    [
        ("torch==2.13.0", True, 12),
        ("torch==2.13.0", False, 9),
        ("torch==2.13.0+cpu", True, 3),
        ("torch==2.13.0+cpu", False, 2.5),
    ],
)
def test_a_full_disk(check_machine, monkeypatch, tmp_path, torch, cached, needed):
    """One disk holds the environment, what pip downloads, and its cache."""
    monkeypatch.setattr(check_machine.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "" if cached else "1")
    Usage = namedtuple("Usage", "free")
    for free, enough in ((needed, True), (needed - 0.4, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free * 10**9))
        said = list(check_machine.disk(tmp_path / "not" / "yet" / ".venv", torch))
        expected = (
            f"{needed} GB of disk are needed at {tmp_path}, but {free:.2g} are free: make room"
        )
        assert said == [] if enough else said[0].startswith(expected)


def test_what_an_earlier_run_left_needs_no_room(check_machine, monkeypatch, tmp_path):
    Usage = namedtuple("Usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9 * 10**9))
    monkeypatch.setattr(check_machine.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    environment = tmp_path / ".venv"
    assert len(list(check_machine.disk(environment, "torch==2.13.0"))) == 1
    environment.mkdir()
    with open(environment / "library.so", "wb") as sparse:
        sparse.truncate(4 * 10**9)
    assert list(check_machine.disk(environment, "torch==2.13.0")) == []


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        (
            "no-such-compiler",
            "A C++ compiler is missing (no-such-compiler was not found): install g++",
        ),
        ("ccache g++", "CXX is 'ccache g++', which torch.compile takes for the name of one"),
    ],
)
def test_no_compiler(compiler, words):
    (sentence,) = lacking(CXX=compiler)
    assert sentence.startswith(words)


def test_no_openssl(tmp_path):
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    sentences = lacking(PATH=str(tmp_path), CXX="c++")
    assert sentences == ["openssl, which torch.compile calls, is missing: install openssl"]


def test_an_old_compiler(tmp_path):
    (tmp_path / "c++").write_text("#!/bin/sh\necho unknown option -std=c++20\nexit 1\n")
    (tmp_path / "c++").chmod(0o755)
    (sentence,) = lacking(PATH=f"{tmp_path}:{os.environ['PATH']}", CXX="c++")
    assert sentence == (
        "The compiler c++ is no g++ for C++20 (unknown option -std=c++20): install g++ 11 or later"
    )


@pytest.mark.parametrize("character", " &'$;")
def test_a_path_that_torch_does_not_quote(tmp_path, character):
    folder = tmp_path / f"a{character}b"
    folder.mkdir()
    expected = f"has {character!r} in it ({folder}"
    for sentences in (
        lacking(folder=folder, environment=tmp_path / ".venv"),
        lacking(environment=folder / ".venv"),
        lacking(TMPDIR=str(folder)),
    ):
        (sentence,) = sentences
        assert expected in sentence
