"""Builds the library: ahead of time for setup.py, just in time for LLTM_OPS_JIT=1.

Both run this file by its path. It has the list of sources and flags. CMakeLists.txt has the same
folders and flags: a test compares.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

# If TORCH_CUDA_ARCH_LIST is not set: Ampere, Hopper, and PTX for later architectures.
DEFAULT_CUDA_ARCHITECTURES = "8.0;9.0+PTX"
# torch 2.11 would take C++17, which has no concepts.
STANDARD = "-std=c++20"

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
# By its path: importing the package would load the library that is being built.
library_name = runpy.run_path(str(ROOT / "lltm_ops" / "_find_library.py"))["library_name"]


def flag(name: str) -> bool:
    """Whether an environment variable is set to yes."""
    return os.environ.get(name, "0").lower() in ("1", "on", "yes", "true")


def builds_cuda() -> bool:
    """Whether the CUDA kernels are part of the build.

    They are if torch has CUDA and a CUDA toolkit is found (``CUDA_HOME``); no GPU is
    needed. ``FORCE_CUDA=1`` and ``FORCE_CPU=1`` override.

    Raises:
        RuntimeError: if ``FORCE_CUDA=1`` asks for CUDA kernels that cannot be built.
    """
    if flag("FORCE_CPU"):
        if flag("FORCE_CUDA"):
            raise RuntimeError("lltm_ops: FORCE_CUDA=1, but FORCE_CPU=1 too: unset one of them")
        return False
    lacking = None
    if torch.version.cuda is None:
        lacking = f"torch {torch.__version__} was built without CUDA"
    elif cpp_extension.CUDA_HOME is None:
        lacking = "no CUDA toolkit was found: set CUDA_HOME"
    if lacking and flag("FORCE_CUDA"):
        raise RuntimeError(f"lltm_ops: FORCE_CUDA=1, but {lacking}")
    return lacking is None


def sources(cuda: bool) -> list[str]:
    """All source files, relative to the root.

    No two may share a base name, because the build just in time names objects after it alone.
    """
    patterns = ["ops/*.cpp", "cpu/**/*.cpp"] + (["cuda/**/*.cu"] if cuda else [])
    found = [path for pattern in patterns for path in sorted(CSRC.glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in found]


def check_compiler() -> None:
    """Raises RuntimeError for clang, whose code calls another OpenMP than libtorch's."""
    compiler: str = cpp_extension.get_cxx_compiler()  # may have options
    command = [*shlex.split(compiler), "-dM", "-E", "-x", "c++", os.devnull]
    try:
        macros = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    except OSError:
        return  # the build says that there is none
    if "#define __clang__" in macros:
        raise RuntimeError(
            f"lltm_ops: expected the compiler to be g++, but got clang ({compiler}), whose OpenMP "
            "is not libtorch's: set CXX=g++ and CC=gcc"
        )


def compile_args(cuda: bool) -> dict[str, list[str]]:
    """Compiler flags for C++ (``cxx``) and CUDA (``nvcc``).

    Only the compiler gets ``-fopenmp``. Without it at::parallel_for, a header template, runs on one
    thread. The linker does not get it, because the runtime must be libtorch's.

    Raises:
        RuntimeError: if the compiler is clang.
    """
    check_compiler()
    debug = flag("DEBUG")
    cxx = [
        STANDARD,
        *(["-O0", "-g"] if debug else ["-O3", "-g0"]),
        "-Wall",
        # A forgotten member of a struct would be 0, or a null pointer: "not wanted". It is an error
        # in CI alone, because the headers of another torch might warn, too.
        "-Wmissing-field-initializers",
        # gcc 14 warns of a correct std::vector<bool> in PyTorch's headers.
        "-Wno-array-bounds",
        "-Wno-stringop-overflow",
        "-fopenmp",
        # Without it, some of ATen's headers include those of all operators.
        "-DAT_PER_OPERATOR_HEADERS",
        # All functions that take vectors are inlined: no call depends on the ABI.
        "-Wno-psabi",
        # Without it, gcc 14 leaves some multiplications and additions unfused. That is slower, and
        # gives other bits than the same sums elsewhere.
        "--param=avoid-fma-max-bits=0",
    ]
    if cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHITECTURES)
        architectures = os.environ["TORCH_CUDA_ARCH_LIST"]
        cxx.append(f'-DLLTM_CUDA_ARCHITECTURES="{architectures}"')
        cxx.append(f'-DLLTM_CUDA_VERSION="{torch.version.cuda}"')
    return {"cxx": cxx, "nvcc": [STANDARD, *(["-O0", "-g", "-G"] if debug else ["-O3"])]}


def _find_ninja() -> None:
    """Puts the folder of python on PATH, because pip installs ninja there."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def extension() -> Any:
    """Returns the setuptools extension, and prints a line that describes it."""
    _find_ninja()
    cuda = builds_cuda()
    args = compile_args(cuda)
    kind = f"CUDA {torch.version.cuda} for {os.environ['TORCH_CUDA_ARCH_LIST']}" if cuda else "CPU"
    print(f"lltm_ops: building {library_name(cuda)} against torch {torch.__version__}, {kind}")
    extension_class = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    return extension_class(
        f"lltm_ops.{library_name(cuda)}",
        sources(cuda),
        include_dirs=[str(CSRC)],
        extra_compile_args=args,
        # Beside it in site-packages, for programs that load the library without Python.
        extra_link_args=["-Wl,-rpath,$ORIGIN/../torch/lib"],
        py_limited_api=True,
    )


def load_just_in_time() -> None:
    """Compiles the sources of this checkout into torch's extension cache and loads them.

    ``LLTM_OPS_JIT=1`` makes ``import lltm_ops`` do this instead of loading an installed
    library. The first call takes as long as a build, later ones are quick.

    Raises:
        ImportError: if something that the build needs is missing.
    """
    from lltm_ops._version import __version__

    try:
        cuda = builds_cuda()
        args = compile_args(cuda)
        name = f"lltm_ops{library_name(cuda)}"
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        build_and_load(
            name,
            [str(ROOT / source) for source in sources(cuda)],
            # The files of a later version, unpacked over this one, may be older than the objects.
            Path(root) / f"{name}_{__version__}",
            extra_cflags=args["cxx"],
            extra_cuda_cflags=args["nvcc"],
            with_cuda=cuda,
        )
    except (OSError, RuntimeError) as error:
        reason = str(error).removeprefix("lltm_ops: ")
        raise ImportError(f"lltm_ops: LLTM_OPS_JIT=1 did not build a library: {reason}") from error


def build_and_load(
    name: str, sources: list[str], directory: Path, extra_cflags: list[str], **options: Any
) -> None:
    """Runs torch.utils.cpp_extension.load with the headers of csrc, in one process at a time."""
    _find_ninja()
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "building", "w") as building:
        # The system drops this lock when a process dies. torch's own lock is a file: a build that
        # is killed leaves it behind, and every later build would wait for it without end.
        fcntl.flock(building, fcntl.LOCK_EX)
        (directory / "lock").unlink(missing_ok=True)
        cpp_extension.load(
            name,
            sources,
            extra_include_paths=[str(CSRC)],
            build_directory=str(directory),
            # Ninja gives the flags to a shell, and torch quotes them only ahead of time.
            extra_cflags=[shlex.quote(flag) for flag in extra_cflags],
            is_python_module=False,
            **options,
        )
