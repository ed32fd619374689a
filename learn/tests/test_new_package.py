"""new_package.py: what it writes is built, tested and packed as its user does it, with each choice
of ABI, build and kernels. The templates' own tests say that the operators are right."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from common import CXX, HAS_TORCHSCRIPT, ROOT, blocks, printed, program, run_python
from torch.utils.cpp_extension import CUDA_HOME

NAME = "gated_layers"
MINOR = ".".join(torch.__version__.split(".")[:2])
CUDA = (torch.version.cuda or "").split(".")[0]
AUTHOR = 'Ada "Countess" Lövelace'


class Form(NamedTuple):
    """What new_package.py lets its user choose."""

    abi: str = "stable"
    build: str = "setuptools"
    kernel: str = "cuda"

    @property
    def libraries(self):
        if self.abi == "torch":
            return [f"_C_torch{MINOR.replace('.', '_')}"]
        return ["_C", *[f"_C_cuda{CUDA}"] * bool(CUDA and CUDA_HOME and self.kernel == "cuda")]


LEARN = ROOT / "learn"
BEGIN = "python3 learn/new_package.py --name=my_ops --output=../my_ops"
CHOICES = program(LEARN / "new_package.py").CHOICES
FORMS = [Form(*choices) for choices in product(*CHOICES.values())]
each_abi = pytest.mark.parametrize("abi", CHOICES["abi"])
each_form = pytest.mark.parametrize("form", FORMS, ids="-".join)


@pytest.fixture
def new_package():
    """A module of its own for each test."""
    return program(LEARN / "new_package.py")


def environment(**variables):
    """That of this process, but for what points to this project."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Runs a script in an environment of its own, which borrows torch and pip from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed))
    pip = folder / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    pip.chmod(0o755)
    # pip puts ninja and cmake beside python.
    places = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    path = os.pathsep.join(places)

    def run(script, cwd):
        return printed("sh", "-ec", script, cwd=cwd, env=environment(PATH=path))

    return run


def grouped(form):
    """The tests of a form run one after the other: they share the package that was built."""
    name = "-".join(form)
    marks = [pytest.mark.xdist_group(name), *[pytest.mark.smoke] * (form == Form())]
    return pytest.param(form, id=name, marks=marks)


@pytest.fixture(scope="module", params=map(grouped, FORMS))
def form(request):
    needed = {"cmake": "scikit_build_core", "triton": "triton"}
    for choice in request.param:
        if choice in needed:
            pytest.importorskip(needed[choice], reason="learn/requirements.txt has it")
    return request.param


@pytest.fixture(scope="module")
def made(form, tmp_path_factory):
    """Folder of a package that new_package.py wrote, and what it printed."""
    output = tmp_path_factory.mktemp("made with") / NAME
    arguments = [f"--name={NAME}", f"--output={output}", f"--author={AUTHOR}"]
    arguments += [f"--{choice}={value}" for choice, value in zip(CHOICES, form, strict=True)]
    return output, printed(sys.executable, LEARN / "new_package.py", *arguments)


@pytest.fixture(scope="module")
def built(made, shell, tmp_path_factory):
    """The folder after the commands that new_package.py printed, and what these printed."""
    output, said = made
    commands = re.findall("^  (.+)$", said, re.MULTILINE)
    return output, commands, shell("\n".join(commands), tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def wheel(built, shell, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    shell(f"pip wheel --no-build-isolation --no-deps --wheel-dir {folder} .", built[0])
    (path,) = folder.glob("*.whl")
    return path


def test_operators_of_all_kinds_in_one_package(made, form, shell):
    """A name that others begin with, and a second operator of one kind, too."""
    if form != Form():
        pytest.skip("the examples have one form")
    output = made[0].parent / "several"
    add = [sys.executable, LEARN / "new_package.py", f"--name={NAME}", f"--output={output}"]
    printed(*add, "--like=segment_sum", "--operator=discounted")
    for like, operator in (
        ("ema_update", "track_"), ("masked_softmax", "masked_softmax"),
        ("masked_softmax", "masked_softmax_2"), ("segment_sum", "segment_sum"),
    ):  # fmt: skip
        printed(*add, f"--like={like}", f"--operator={operator}")
    assert not list(output.rglob("*ema_update*")) and not (output / "csrc" / "track_.cpp").exists()
    said = shell("pip install --no-build-isolation -e . && python -m pytest -x -n2", output)
    assert "failed" not in said
    taken = subprocess.run([*add, "--operator=masked_softmax"], capture_output=True, text=True)
    assert taken.stderr.endswith("the package has an operator masked_softmax\n")


def python(code, folder, *paths, executable=sys.executable):
    """Runs code in a fresh process in a folder, with nothing of this project on its path."""
    variables = environment(PYTHONPATH=os.pathsep.join(map(str, paths)))
    return run_python(code, folder, variables, executable)


@pytest.mark.gpu
def test_the_printed_commands_build_it_and_its_tests_pass(built):
    output, commands, said = built
    assert commands == [
        f"cd '{output}'",
        "python -m pip install --no-build-isolation -e .",
        "python -m pytest",
    ]
    assert re.search(r"\d+ passed", said) and "failed" not in said
    assert blocks(output / "CONTRIBUTING.md", "sh") == ["\n".join(commands[1:]) + "\n"]
    shown = blocks(LEARN / "start_your_own.md", "sh")[0].splitlines()
    assert shown == [BEGIN, "cd ../my_ops", *commands[1:]]
    assert (output / ".git").is_dir() == (shutil.which("git") is not None)


USE = f"""
import torch, {NAME}
scores, mask = torch.randn(3, 4, requires_grad=True), torch.ones(3, 4).bool().tril()
for make in ({"torch.jit.script, " * HAS_TORCHSCRIPT}torch.compile(fullgraph=True),):
    result = make({NAME}.masked_softmax)(scores, mask)
    torch.testing.assert_close(result, scores.masked_fill(~mask, -torch.inf).softmax(-1))
    assert result.requires_grad
print({NAME}.__file__)
"""


def test_is_imported_in_another_folder(built, shell, tmp_path):
    imported = shell(f"python -W ignore -c 'import {NAME}; print({NAME}.__file__)'", tmp_path)
    assert imported == f"{built[0] / NAME}/__init__.py\n"


def test_wheel_works_where_nothing_else_is(form, wheel, tmp_path):
    stable = form.abi == "stable"
    use = USE.replace("torch.jit.script, ", "") if stable else USE
    requirement = "torch>=2.11" if stable else f"torch=={MINOR}.*"
    if form.build == "cmake":
        tag = "-py3-none"
    else:
        tag = "-cp310-abi3" if stable else f"-{MINOR}-cp310-abi3"
    assert re.fullmatch(rf"{NAME}-0\.1\.0{re.escape(tag)}-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        metadata = content.read(next(name for name in names if name.endswith("METADATA"))).decode()
        content.extractall(tmp_path / "installed")
    libraries = [f"{library}.abi3.so" for library in form.libraries]
    modules = ["_arguments.py"] * stable + ["_triton.py"] * (form.kernel == "triton")
    assert {name for name in names if "dist-info" not in name} == {
        f"{NAME}/{name}"
        for name in (
            *libraries,
            *modules,
            *["__init__.py", "_library.py", "_masked_softmax.py", "py.typed"],
        )
    }
    expected = {
        f"Requires-Dist: {requirement}",
        f"Author: {AUTHOR}",
        "License-Expression: BSD-3-Clause",
    }
    assert expected <= set(metadata.splitlines())
    assert "from gated_layers import masked_softmax" in metadata  # the README
    (tmp_path / "empty").mkdir()
    executables = [sys.executable]
    if stable:  # each torch of this checkout: make compat makes environments of several
        others = [str(path) for path in ROOT.glob(".venv*/bin/python")]
        executables += [
            path for path in others if not python("import torch", "/", executable=path)[0]
        ]
    for executable in executables:
        result = python(use, tmp_path / "empty", tmp_path / "installed", executable=executable)
        assert result == (0, f"{tmp_path}/installed/{NAME}/__init__.py\n"), executable


def test_commands_of_a_release(form, built, shell):
    if form.abi == "torch":
        pytest.skip("torch-abi-audit refuses it")
    for tool in ("auditwheel", "abi3audit", "torch_abi_audit", "twine"):
        pytest.importorskip(tool, reason="learn/requirements.txt has it")
    commands, upload = blocks(LEARN / "release_your_own.md", "sh")
    assert upload == "twine upload dist/*\n"
    said = shell(commands.replace("my_ops", NAME), built[0])
    assert "PASSED" in said and "STABLE" in said
    (wheel,) = (built[0] / "dist").iterdir()
    assert "-manylinux_2_" in wheel.name


def test_libraries_ask_for_no_python_and_no_openmp_of_their_own(form, built):
    for name in form.libraries:
        library = built[0] / NAME / f"{name}.abi3.so"
        undefined = printed("nm", "--dynamic", "--undefined-only", library)
        assert not re.search(r" _?Py[A-Z_]", undefined)
        if form.abi == "stable":  # torch's functions of C, and none of C++: these keep their names
            assert " torch_library_impl\n" in undefined
            assert not re.search(r" _ZN?K?(2at|3c10|5torch)", undefined)
        else:
            assert "GOMP_parallel" in undefined
        needed = printed("readelf", "--dynamic", library)
        assert "gomp" not in needed and "libpython" not in needed
        assert "runpath: [$ORIGIN/../torch/lib]" in needed


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an exp of vectors of glibc")
def test_exp_is_computed_in_vectors(form, built):
    if "Free Software Foundation" not in printed(CXX, "--version"):
        pytest.skip("needs gcc")
    library = built[0] / NAME / f"{form.libraries[0]}.abi3.so"
    calls = set(re.findall(r"_ZGV\w+", printed("nm", "--dynamic", library)))
    assert {"_ZGVeN16v_expf", "_ZGVdN8v_expf", "_ZGVbN4v_expf"} <= calls


@pytest.mark.skipif(find_spec("sphinx") is None, reason="learn/requirements.txt has it")
def test_its_documentation_has_docstrings_and_schema(built, shell):
    output = built[0]
    shell("python -m sphinx --fail-on-warning --quiet docs build/docs", output)
    page = re.sub("<[^>]+>", "", (output / "build" / "docs" / "index.html").read_text())
    assert "along the last dimension" in page
    assert "(Tensor scores, Tensor mask) -&gt; Tensor" in page


def test_a_second_build_compiles_only_what_changed(built, shell):
    """The first one left objects, and nothing is left to compile."""
    output, (_, command, _), _ = built

    def objects():
        return {path: path.stat().st_mtime_ns for path in output.glob("build/**/*.o")}

    before = objects()
    shell(command, output)
    assert before and objects() == before


@each_abi
def test_what_it_says_of_a_library_that_is_missing_or_does_not_load(new_package, abi, tmp_path):
    new_package.create(NAME, tmp_path / "new", abi)
    status, said = python(f"import {NAME}", tmp_path, tmp_path / "new")
    assert status == 1
    assert re.search(r"ImportError: .* but got none: build it with `pip install", said), said
    broken = tmp_path / "new" / NAME / f"{Form(abi).libraries[0]}.abi3.so"
    source = "int gone_from_torch(void); int call(void) { return gone_from_torch(); }"
    command = [CXX, "-shared", "-fPIC", "-x", "c", "-", "-o", str(broken)]
    subprocess.run(command, input=source, text=True, check=True)
    status, said = python(f"import {NAME}", tmp_path, tmp_path / "new")
    assert status == 1
    assert re.search(r"does not load with torch \S+ \(.*undefined symbol: gone_from_t", said)


@each_form
@pytest.mark.parametrize("name", ["ops", NAME, "Transformer2_ops"])
def test_only_the_new_name_is_in_it(new_package, form, name, tmp_path):
    new_package.create(name, tmp_path / "new", *form)
    for path in filter(Path.is_file, (tmp_path / "new").rglob("*")):
        text = path.read_text()
        for word in ("my_ops", "lltm"):
            assert word not in f"{path.relative_to(tmp_path)} {text}".lower(), path
    assert (tmp_path / "new" / name / "_library.py").is_file()


def test_its_linters_are_those_of_this_project():
    makefile = (ROOT / "Makefile").read_text()
    ours = [re.search(rf"{name}==(\S+)", makefile)[1] for name in ("ruff", "clang-format")]
    hooks = LEARN / "template" / "both" / ".pre-commit-config.yaml"
    assert re.findall(r"rev: v(\S+)", hooks.read_text())[:2] == ours


@each_form
def test_forms_are_short_and_have_nothing_of_each_other(new_package, form, tmp_path):
    new_package.create(NAME, tmp_path, *form)
    texts = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    code = [
        text
        for path, text in texts.items()
        if path.parent != tmp_path and path.suffix in (".py", ".h", ".cpp", ".cu")
    ]
    assert 0 < "".join(code).count("\n") <= (800 if form.kernel == "cuda" else 845)
    text = "".join(texts.values())
    assert ("setuptools" in text) == (form.build == "setuptools")
    assert ("scikit" in text) == (form.build == "cmake")
    assert ("CUDA toolkit" in text) == (form.kernel == "cuda")
    assert ("triton" in text) == (form.kernel == "triton")
    assert ("triton and NumPy" in texts[tmp_path / "CONTRIBUTING.md"]) == (form.kernel == "triton")


# What sp-repo-review would like to see, and why it is not there.
UNWANTED = {
    "PY007": "a task runner: two commands build and test",
    "MY100": "mypy: what is typed is the functions that users call, each of one line",
    "PC140": "mypy, as above",
    "PC170": "hooks for rST, of which there is one file",
    "PC180": "a formatter of Markdown",
}


@each_abi
def test_linters_of_workflow_and_settings_find_nothing(new_package, abi, tmp_path):
    """check-jsonschema knows what a workflow may have, cibuildwheel what its table may have, and
    zizmor what makes a workflow unsafe."""
    for tool in ("check_jsonschema", "cibuildwheel", "sp_repo_review"):
        pytest.importorskip(tool, reason="learn/requirements.txt has it")
    new_package.create(NAME, tmp_path, abi)
    workflow = tmp_path / ".github" / "workflows" / "ci.yml"
    check = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", workflow]
    printed(sys.executable, *check)
    for system in ("linux", "macos", "windows"):
        settings = ["-m", "cibuildwheel", "--platform", system, "--print-build-identifiers"]
        wheels = printed(sys.executable, *settings, tmp_path).splitlines()
        assert [wheel[:6] for wheel in wheels] == ["cp310-", "cp314-"]
    scripts = Path(sys.executable).parent
    printed(scripts / "zizmor", "--offline", tmp_path)
    review = [scripts / "sp-repo-review", tmp_path, "--format=json"]
    checks = json.loads(subprocess.run(review, capture_output=True, text=True).stdout)["checks"]
    assert {name for name, check in checks.items() if check["result"] is False} == set(UNWANTED)


def test_a_release_stops_at_a_tag_that_is_not_the_version(new_package, tmp_path):
    """The shell of the workflow's step, with a wheel of version 0.1.0."""
    new_package.create(NAME, tmp_path)
    workflow = (tmp_path / ".github" / "workflows" / "ci.yml").read_text()
    script = textwrap.dedent(re.search(r"run: \|\n(.+?)\n      - uses", workflow, re.DOTALL)[1])
    (tmp_path / "dist").mkdir()
    for url, tag, status in (("me", "v0.1.0", 0), ("me", "v0.2.0", 1), ("OWNER", "v0.1.0", 1)):
        with zipfile.ZipFile(tmp_path / "dist" / f"{NAME}-0.1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("a.dist-info/METADATA", f"Project-URL: https://github.com/{url}/ops\n")
        command, variables = ["bash", "-e", "-c", script], environment(GITHUB_REF_NAME=tag)
        assert subprocess.run(command, cwd=tmp_path, env=variables).returncode == status


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swiglu_2", None),
        (
            "../ops",
            "expected letters, digits and single underscores between them, and a letter first",
        ),
        ("Tests", "torch, this project or a folder of the package uses it"),
        ("lambda", "Python or a package that is installed uses it"),
        ("union", "C or C++ uses it"),
        ("gamma", "C or C++ uses it"),
    ],
)
def test_names_that_are_refused(new_package, name, reason):
    assert new_package.why_not(name) == reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [("swiglu", None), ("SwiGLU", "expected lower"), ("lambda", "Python"), ("gamma", "Python"),
     ("library", "_library.py uses it"), ("rows_of", "masked_softmax_kernel.h uses it")],
)  # fmt: skip
def test_operators_that_are_refused(new_package, name, reason):
    said = new_package.why_no_operator(name, [new_package.TEMPLATE])
    assert said == reason or said.startswith(reason)


def test_a_folder_with_files_is_left_as_it_is(new_package, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(SystemExit):
        new_package.main([f"--name={NAME}", f"--output={tmp_path}"])
    sentence = capsys.readouterr().err
    assert f"expected a new or an empty folder, or {NAME} with the stable ABI\n" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
