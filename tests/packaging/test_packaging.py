"""Building, loading, and what is said where that fails; each in a process of its own."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import compiled_before
import pytest
import shell_blocks
import torch
from common import BUILD_EXTENSION, CXX, ROOT, printed, program, run_python

import lltm_ops
from lltm_ops import _find_library

build_extension = program(BUILD_EXTENSION)

# Also where make cuda-check asks for CUDA.
CPU_ONLY = {"FORCE_CPU": "1", "FORCE_CUDA": "0"}
LIBRARY = _find_library.find_library()


def run(code, folder=ROOT, **environment):
    """Python runs code with folder first on its path."""
    return run_python(code, folder, os.environ | {"PYTHONPATH": str(folder)} | environment)


@pytest.fixture
def package_without_library(tmp_path):
    shutil.copytree(ROOT / "lltm_ops", tmp_path / "lltm_ops", ignore=shutil.ignore_patterns("*.so"))
    return tmp_path


def test_build_info():
    info = lltm_ops.build_info()
    assert info.keys() == {
        "lltm_ops", "python", "torch", "built_for_torch", "compiler", "cuda", "cuda_architectures",
        "cpu_capability",
    }  # fmt: skip
    assert info["lltm_ops"] == lltm_ops.__version__
    assert torch.__version__.startswith(info["built_for_torch"])
    assert (info["cuda"] == "not built") == (info["cuda_architectures"] == "none")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    checkout = tmp_path_factory.mktemp("sdist") / "checkout"
    # The copy is that of a new clone. setuptools would add what an earlier egg-info lists.
    built = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "*.so")
    shutil.copytree(ROOT, checkout, ignore=built)
    command = [sys.executable, "setup.py", "--quiet", "sdist"]
    subprocess.run(command, cwd=checkout, check=True, env={**os.environ, **CPU_ONLY})
    (archive,) = (checkout / "dist").glob("lltm_ops-*.tar.gz")
    return archive


def test_the_sdist_has_what_pip_needs_to_build_and_no_more(sdist):
    with tarfile.open(sdist) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    package = {f"lltm_ops/{path.name}" for path in (ROOT / "lltm_ops").glob("*.py*")}
    files = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"}
    tools = {"tools/build_extension.py"}
    assert sources | package | files | tools <= names
    assert {name for name in names if name.startswith("tools/")} <= {"tools/", *tools}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {"csrc", "lltm_ops", "lltm_ops.egg-info", "tools"}


def metadata(wheel):
    with zipfile.ZipFile(wheel) as content:
        name = next(name for name in content.namelist() if name.endswith("METADATA"))
        return content.read(name).decode()


@pytest.mark.slow
def test_wheel_of_the_sdist(sdist, tmp_path):
    """One for all Pythons; what the documented `pip install --no-build-isolation` installs."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    compiler = {"CXX": compiled_before.write_compiler(tmp_path)}
    environment = os.environ | CPU_ONLY | compiler
    subprocess.run([*pip, "--wheel-dir", tmp_path, sdist], check=True, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    minor = _find_library.torch_minor()
    assert re.fullmatch(rf"lltm_ops-[\d.]+-{minor}\.cpu-cp310-abi3-linux_\w+\.whl", wheel.name)
    assert f"Requires-Dist: torch=={minor}.*\n" in metadata(wheel)
    assert "License-Expression: BSD-3-Clause\n" in metadata(wheel)
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    information = f"lltm_ops-{lltm_ops.__version__}.dist-info"
    assert {path.name for path in installed.iterdir()} == {"lltm_ops", information}
    assert (installed / "lltm_ops" / "py.typed").exists()
    status, output = run("import lltm_ops; print(lltm_ops.__file__)", installed)
    assert (status, output) == (0, f"{installed}/lltm_ops/__init__.py\n")
    # Beside torch, as in site-packages, the library finds it by itself.
    (installed / "torch").symlink_to(Path(torch.__file__).parent)
    (library,) = installed.glob("lltm_ops/*.so")
    code = f"import ctypes; ctypes.CDLL('{library}'); print('loaded')"
    assert run(code, tmp_path) == (0, "loaded\n")


def test_one_wheel_for_several_torch(tmp_path):
    """With the library of this torch, and a copy of it that stands in for another's."""
    major, minor = map(int, _find_library.torch_minor().split("."))
    for number, gap in ((minor, 0), (minor + 2, 2)):
        folder = tmp_path / str(gap) / "lltm_ops"
        folder.mkdir(parents=True)
        shutil.copy(LIBRARY, folder / f"_C_torch{major}_{number}_cpu.abi3.so")
    tool = [sys.executable, "-W", "ignore", "tools/fat_wheel.py", tmp_path, tmp_path / "0"]
    subprocess.run([*tool, tmp_path / "2"], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("lltm_ops-*-py3-none-linux_*.whl")
    allowed = re.search(r"^Requires-Dist: torch(\S+)$", metadata(wheel), re.MULTILINE)[1]
    between = {f">={major}.{minor}", f"!={major}.{minor + 1}.*", f"<{major}.{minor + 3}"}
    assert set(allowed.split(",")) == between
    zipfile.ZipFile(wheel).extractall(tmp_path)
    package = tmp_path / "lltm_ops"
    names = {path.name for path in package.glob("*.so")}
    assert names == {f"_C_torch{major}_{number}_cpu.abi3.so" for number in (minor, minor + 2)}
    for number in (minor, minor + 2):
        code = f"""
import torch; torch.__version__ = "{major}.{number}.0"
import lltm_ops
print(next(line.split()[-1] for line in open("/proc/self/maps") if "_C_torch" in line))"""
        assert run(code, tmp_path) == (0, f"{package}/_C_torch{major}_{number}_cpu.abi3.so\n")


@pytest.mark.parametrize("compiler", [CXX, "aarch64-linux-gnu-g++"])
def test_a_library_of_make_wheels_needs_no_glibc_after_2_28(compiler, tmp_path):
    """This compiler's own may be later: 2.29 has another exp, and 2.32 what shared_ptr asks for."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    code = """
#include <cmath>
#include <memory>
double grow(double x) { return std::exp(x); }
std::shared_ptr<int> share(std::shared_ptr<int> x) { return x; }
"""
    (tmp_path / "library.cpp").write_text(code)
    command = [compiler, "-shared", "-s", "-O2", "-fPIC", tmp_path / "library.cpp"]
    library = tmp_path / "library.so"
    subprocess.run([*command, "tools/glibc_2_28.cpp", "-o", library], cwd=ROOT, check=True)
    symbols = printed("readelf", "--dyn-syms", "--wide", library)
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"@GLIBC_([\d.]+)", symbols)}
    assert versions and max(versions) <= (2, 28)


@pytest.mark.slow
def test_builds_just_in_time(sdist, tmp_path):
    """From the sdist, for debugging, in a process that must not take the installed library.

    The lock of a build that was killed lies there already. The sources are compiled of which the
    page on debugging shows lines.
    """
    subprocess.run(["tar", "-xf", sdist, "-C", tmp_path], check=True)
    (checkout,) = tmp_path.glob("lltm_ops-*")
    name = f"lltm_ops{_find_library.library_name(cuda=False)}_{lltm_ops.__version__}"
    directory = tmp_path / "build" / "debug" / name
    directory.mkdir(parents=True)
    (directory / "lock").touch()
    code = """
import torch, lltm_ops
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "_C_torch" in line}
assert len(loaded) == 1 and "abi3" not in loaded.pop()
a = [torch.randn(3, 5), torch.randn(12, 9), torch.randn(12), torch.randn(3, 4), torch.randn(3, 4)]
torch.testing.assert_close(lltm_ops.forward(*a), lltm_ops.reference(*a))
print("just in time")
"""
    options = {
        "LLTM_OPS_JIT": "1",
        "DEBUG": "1",
        **CPU_ONLY,
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "build" / "debug"),
        "MAX_JOBS": "2",
        "CXX": compiled_before.write_compiler(
            tmp_path, "cpu/lltm_forward.cpp ops/library.cpp ops/autograd.cpp ops/checks.cpp"
        ),
    }
    status, output = run(code, checkout, **options)
    assert status == 0 and output.endswith("just in time\n"), output
    for commands, lines in shell_blocks.DEBUG:
        shell_blocks.assert_prints(commands, lines, tmp_path, PYTHONPATH=str(checkout), **options)


def test_import_does_not_load_what_takes_long():
    modules = {"onnx", "onnxscript", "torch.distributed.tensor", "torch.utils.cpp_extension"}
    code = f"import sys, lltm_ops; print({modules} & sys.modules.keys())"
    assert run(code) == (0, "set()\n")


def test_a_library_loaded_by_hand_is_not_loaded_twice():
    """Twice would abort the process."""
    code = f"import torch; torch.ops.load_library({str(LIBRARY)!r}); import lltm_ops; print('once')"
    assert run(code) == (0, "once\n")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            [],
            r"expected a library built for torch \S+ in \S+, but got none: build it with `pip inst",
        ),
        (
            [f"lltm_ops/_C_torch{name}.abi3.so" for name in ("2_9_cpu", "2_10_cpu", "2_10_cu13")],
            r".*but got those for torch 2\.9 \(cpu\), 2\.10 \(cpu, cu13\): build it with",
        ),
        # It hides an installed package from a Python started there, or with it on PYTHONPATH.
        (
            ["tools/build_extension.py"],
            ".*but got none: this is a checkout, so either build here with",
        ),
    ],
    ids=["none", "of other versions", "checkout"],
)
def test_without_library(package_without_library, files, words):
    for file in files:
        path = package_without_library / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    status, output = run("import lltm_ops", package_without_library)
    assert status == 1
    assert re.search(f"^ImportError: lltm_ops: {words}", output, re.MULTILINE), output


def test_a_torch_without_a_library():
    """An upgrade of torch does this. make compat tests its wheel with it, too."""
    package = Path(lltm_ops.__file__).parent
    code = "import torch; torch.__version__ = '3.1.0'; import lltm_ops"
    status, output = run(code, package.parent)
    assert status == 1
    words = (
        f"lltm_ops: expected a library built for torch 3.1.0 in {package}, but got those for torch"
    )
    assert f"ImportError: {words} {_find_library.torch_minor()[0]}." in output


@pytest.mark.parametrize(
    ("cuda", "found"),
    [(None, "cpu"), ("12.6", "cpu"), ("13.0", "cu13"), ("13.2", "cu13")],
)
def test_which_library_is_taken(monkeypatch, tmp_path, cuda, found):
    monkeypatch.setattr(torch, "__version__", "2.13.1")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(_find_library, "__file__", str(tmp_path / "_find_library.py"))
    for name in ("2_12_cu12", "2_13_cpu", "2_13_cu13", "2_14_cpu", "2_14_cu12"):
        (tmp_path / f"_C_torch{name}.abi3.so").touch()
    assert _find_library.find_library().name == f"_C_torch2_13_{found}.abi3.so"


def test_ninja_beside_python_is_found(monkeypatch):
    monkeypatch.setenv("PATH", "")
    build_extension._find_ninja()
    assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def compiled(code):
    def write(library):
        command = [CXX, "-shared", "-fPIC", "-x", "c", "-", "-o", library]
        subprocess.run(command, input=code, text=True, check=True)

    return write


def cut(size):
    return lambda library: library.write_bytes(LIBRARY.read_bytes()[:size])


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        # An upgrade of torch may do this.
        (
            compiled("int gone_from_torch(void); int call(void) { return gone_from_torch(); }"),
            r".*undefined symbol: gone_from_torch",
        ),
        (compiled("int x;"), r"it has no torch\.ops\.lltm\.forward"),
        # Mapped, it would end the process.
        (cut(500_000), r"its last \d+ bytes are missing"),
    ],
    ids=["symbol", "empty", "cut"],
)
def test_a_library_that_does_not_load(package_without_library, write, reason):
    write(package_without_library / "lltm_ops" / LIBRARY.name)
    status, output = run("import lltm_ops", package_without_library)
    assert status == 1
    assert re.search(
        rf"^ImportError: lltm_ops: \S+ does not load with torch \S+ \({reason}\): build it with",
        output,
        re.MULTILINE,
    ), output


def test_just_in_time_an_upgrade_takes_no_object_of_the_version_before(monkeypatch):
    """Unpacking sets times back, and ninja goes by times."""
    folders = []
    monkeypatch.setattr(
        build_extension, "build_and_load", lambda _, __, folder, **options: folders.append(folder)
    )
    for version in ("1.0", "1.0", "1.1"):
        monkeypatch.setattr("lltm_ops._version.__version__", version)
        build_extension.load_just_in_time()
    assert folders[0] == folders[1] != folders[2]


def test_setup_without_torch_says_so():
    code = (
        "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['setup.py', '--version']; "
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    status, output = run(code)
    assert status == 1
    assert "Traceback" not in output
    line = output.strip().splitlines()[-1]
    assert line.endswith(
        "even where yours has one: install torch if it is missing, then run pip install again, "
        "with --no-build-isolation"
    )


def test_a_build_without_cuda_removes_the_library_that_would_be_loaded_instead(
    package_without_library,
):
    (package_without_library / "tools").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tools/build_extension.py"):
        shutil.copy(ROOT / name, package_without_library / name)
    package = package_without_library / "lltm_ops"
    minor = _find_library.torch_minor().replace(".", "_")
    cpu, cuda, other = (
        package / f"_C_torch{version}.abi3.so"
        for version in (f"{minor}_cpu", f"{minor}_cu13", "2_9_cu13")
    )
    cuda.touch()
    other.touch()
    code = f"""
import pathlib, runpy, sys, torch
from torch.utils import cpp_extension
torch.version.cuda = "13.0"
cpp_extension.BuildExtension.run = lambda self: pathlib.Path({str(cpu)!r}).touch()
sys.argv = ["setup.py", "--quiet", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")"""
    status, output = run(code, package_without_library, **CPU_ONLY)
    assert status == 0, output
    assert set(package.glob("*.so")) == {cpu, other}


def test_forced_cuda_that_cannot_be_built(monkeypatch):
    monkeypatch.setenv("FORCE_CPU", "1")
    monkeypatch.setenv("FORCE_CUDA", "1")
    with pytest.raises(RuntimeError, match="FORCE_CUDA=1, but FORCE_CPU=1 too: unset one of them"):
        build_extension.builds_cuda()
    monkeypatch.setenv("FORCE_CPU", "0")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match=r"FORCE_CUDA=1, but torch .* was built without CUDA"):
        build_extension.builds_cuda()


def test_the_library_asks_for_no_python_and_no_openmp_of_its_own():
    """So it loads without Python, and shares the threads of libtorch."""
    undefined = printed("nm", "--dynamic", "--undefined-only", LIBRARY)
    assert "GOMP_parallel" in undefined
    assert not re.search(r" _?Py[A-Z_]", undefined)
    needed = printed("readelf", "--dynamic", LIBRARY)
    assert "libtorch_cpu.so" in needed
    assert "gomp" not in needed and "libpython" not in needed
    assert re.search(r"runpath: \[(.*:)?\$ORIGIN/\.\./torch/lib\]", needed)


def test_clang_is_refused(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec g++ -D__clang__ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match=r"to be g\+\+, but got clang \(.*c\+\+\), whose OpenMP"):
        build_extension.compile_args(cuda=False)


def test_an_archive_on_the_path_is_no_package(tmp_path):
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", ROOT, "lltm_ops")
    _, said = run("import lltm_ops", tmp_path, PYTHONPATH=archive)
    assert "expected a folder, because the system loads a library from a file" in said
