"""The library without Python: by CMakeLists.txt, as a package for CMake, and called from C++.

No test compiles a source of the library: make sanitize does, with CMake. The fast tests put the
library that Python loads in its place. The slow ones link its objects, by the commands of
docs/cpp.md, in a copy of the checkout.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import compiled_before
import pytest
import torch
from common import BUILD_EXTENSION, HAS_TORCHSCRIPT, ROOT, needs_torchscript, printed, program
from torch.jit._pickle import restore_type_tag

import lltm_ops
from lltm_ops._find_library import find_library

pytest.importorskip("cmake")

PACKAGES = Path(lltm_ops.__file__).parent.parent
LIBRARY, EXAMPLE = re.findall(
    r"^```sh\n(.*?)^```$", (ROOT / "docs" / "cpp.md").read_text(), re.M | re.S
)

in_one_process = pytest.mark.xdist_group("cmake")


def by_the_docs(test):
    """They share one build."""
    return pytest.mark.slow(pytest.mark.xdist_group("cmake_by_the_docs")(test))


def run(commands, folder, **environment):
    commands = commands.replace(".venv/bin/python", sys.executable)
    variables = {**os.environ, "PYTHONPATH": str(PACKAGES), **environment}
    return printed("bash", "-e", "-c", commands, cwd=folder, env=variables, timeout=3600)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the build in build, of which only the library is another's, and the package."""
    folder = tmp_path_factory.mktemp("cmake")
    run(
        f'cmake -S "{ROOT}" -B build -G Ninja -D CMAKE_INSTALL_PREFIX="$PWD/lltm_ops" '
        "-D CMAKE_SKIP_RPATH=ON",  # it would look for the one that it has given to the library
        folder,
        CMAKE_PREFIX_PATH=torch.utils.cmake_prefix_path,
        CMAKE_EXPORT_COMPILE_COMMANDS="ON",
    )
    shutil.copy(find_library(), folder / "build" / "liblltm_ops.so")
    run("cmake --install build", folder)
    return folder


@in_one_process
def test_sources_and_flags_are_those_of_the_extension(installed):
    entries = json.loads((installed / "build" / "compile_commands.json").read_text())
    compiled = {
        str(Path(entry["file"]).relative_to(ROOT)): entry["command"]
        for entry in entries
        if "/csrc/" in entry["file"]
    }
    cuda = any(source.endswith(".cu") for source in compiled)
    build_extension = program(BUILD_EXTENSION)
    assert not (cuda and build_extension.flag("FORCE_CPU"))
    assert set(compiled) == set(build_extension.sources(cuda))
    flags = set(build_extension.compile_args(cuda=False)["cxx"]) - {"-g0"}
    for source, command in compiled.items():
        if source.endswith(".cpp"):
            assert flags <= set(command.split()), source


@in_one_process
def test_programs_of_another_project_find_the_package_and_call_the_operators(installed):
    # The library of Python looks for that of torch, such as libc10_cuda.so, beside its own place.
    torch_libraries = Path(torch.__file__).parent / "lib"
    said = run(
        f'cmake -S "{ROOT}/tests/packaging/cpp" -B tests -G Ninja && cmake --build tests && '
        f'LD_LIBRARY_PATH="{torch_libraries}" ctest --test-dir tests --output-on-failure',
        installed,
        CMAKE_PREFIX_PATH=f"{torch.utils.cmake_prefix_path}:{installed}/lltm_ops",
    )
    assert "100% tests passed" in said


@in_one_process
def test_a_torch_of_another_minor_is_refused(installed, tmp_path):
    torch_package = tmp_path / "torch"
    torch_package.mkdir()
    (torch_package / "TorchConfig.cmake").write_text("set(Torch_FOUND TRUE)\n")
    (torch_package / "TorchConfigVersion.cmake").write_text(
        "set(PACKAGE_VERSION 1.2.3)\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\n"
        "project(other LANGUAGES CXX)\n"
        "find_package(LltmOps REQUIRED)\n"
    )
    configure = f"! cmake -S . -B build -G Ninja -D Torch_DIR={torch_package} 2>&1"
    said = run(configure, tmp_path, CMAKE_PREFIX_PATH=f"{installed}/lltm_ops")
    built_for = ".".join(torch.__version__.split(".")[:2])
    words = f"LltmOps: built for torch {built_for}, found 1.2.3: build LltmOps again"
    assert words in " ".join(said.split())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """With the library built, tested and installed, and the example run."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("cmake", "csrc", "examples", "lltm_ops", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "CMakeLists.txt", folder)
    said = run(
        LIBRARY + EXAMPLE,
        folder,
        CXX=compiled_before.write_compiler(folder),
        CMAKE_BUILD_TYPE="None",  # programs that nobody times compile sooner
    )
    assert "100% tests passed" in said
    return folder


@by_the_docs
def test_nothing_of_python_and_no_second_openmp_is_linked(checkout):
    library = next((checkout / "build" / "lltm_ops").rglob("liblltm_ops.so"))
    needed = re.findall(r"NEEDED.*\[(.*)\]", printed("readelf", "-d", library))
    assert any(name.startswith("libtorch_cpu") for name in needed)
    assert not [name for name in needed if "python" in name or "omp" in name]
    program = checkout / "build" / "example" / "without_python"
    loaded = printed("ldd", program)
    assert "liblltm_ops.so" in loaded and "python" not in re.sub(r"/\S*", "", loaded)


@pytest.fixture(scope="module")
def files(checkout):
    folder = checkout / "build" / "example" / "files"
    names = ("inputs", "model", "outputs")
    # What C++ writes says what type its dictionary is.
    with torch.serialization.safe_globals([restore_type_tag]):
        return tuple(torch.load(folder / f"{name}.pt", weights_only=True) for name in names)


@by_the_docs
def test_the_operator_computes_the_same_bits(files):
    inputs, _, outputs = files
    step = [inputs[name] for name in ("step", "weights", "bias", "old_h", "old_cell")]
    new_h, new_cell = lltm_ops.forward(*step)
    assert torch.equal(outputs["new_h"], new_h)
    assert torch.equal(outputs["new_cell"], new_cell)


@pytest.fixture
def model(files, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "cpp")
    import prepare

    model = prepare.Model()
    model.load_state_dict(files[1])
    return model


@by_the_docs
def test_models_compute_the_same(files, model):
    inputs, _, outputs = files
    (expected,) = model(inputs["input"])
    torch.testing.assert_close(outputs["compiled"], expected)
    if HAS_TORCHSCRIPT:
        torch.testing.assert_close(outputs["scripted"], expected)


@by_the_docs
@needs_torchscript
def test_the_scripted_model_learns_the_same(files, model):
    inputs, _, outputs = files
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs["input"])[0], inputs["target"])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < losses[0]
    torch.testing.assert_close(outputs["losses"], torch.stack(losses))
    trained = {name: outputs[f"trained.{name}"] for name in model.state_dict()}
    torch.testing.assert_close(trained, dict(model.state_dict()))
