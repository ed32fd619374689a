"""Says what a machine lacks before `make` installs or builds: one sentence for each thing.

It runs with the Python that the environment will be made of, and needs nothing but that. Its syntax
is that of Python 3.7, so that an old one gets to the sentence about its version.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

GIGABYTE = 10**9
# torch 2.13 from PyPI, which has CUDA, is a download of 2.9 GB and takes 5.0 when it is installed.
DOWNLOADED, INSTALLED = 3 * GIGABYTE, 6 * GIGABYTE
# A build for the CPU alone has "cpu" in its version, or in the address of its index.
DOWNLOADED_FOR_CPU, INSTALLED_FOR_CPU = GIGABYTE // 2, 2 * GIGABYTE
# Make, a shell or the linker's options give the others a meaning, and torch quotes none.
PATH_CHARACTERS = r"[\w./+@~-]*"
PROGRAM = """
#ifdef __clang__
#error "its OpenMP is not libtorch's"
#endif
#include <concepts>
#include <cstdlib>
struct Point { int x, y; };
template <std::integral T> constexpr T twice(T value) { return 2 * value; }
static_assert(twice(Point{.x = 1, .y = 2}.y) == 4);
"""


def python():
    version = "python" + sysconfig.get_python_version()
    if sys.version_info < (3, 10):  # noqa: UP036
        yield (
            f"Python 3.10 or later is needed, but {sys.executable} is {version}: install a later "
            "one, and name it: make BASE_PYTHON=python3.12"
        )
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        yield f"Python's venv is missing: install {version}-venv"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        yield f"Python.h, which torch.compile needs, is missing: install {version}-dev"


def compiler():
    name = os.environ.get("CXX") or "c++"
    if len(name.split()) > 1:
        yield (
            f"CXX is {name!r}, which torch.compile takes for the name of one program: name a "
            "compiler without options (for ccache, put its folder of compilers on PATH)"
        )
        return
    try:
        result = subprocess.run(
            [name, "-std=c++20", "-fopenmp", "-fsyntax-only", "-x", "c++", "-"],
            input=PROGRAM,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError:
        yield f"A C++ compiler is missing ({name} was not found): install g++"
        return
    if result.returncode != 0:
        said = (result.stdout.strip().splitlines() or ["it said nothing"])[0]
        yield f"The compiler {name} is no g++ for C++20 ({said}): install g++ 11 or later"


def openssl():
    if shutil.which("openssl") is None:
        yield "openssl, which torch.compile calls, is missing: install openssl"


def held(folder):
    """Bytes that an earlier run has put there."""
    files = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return sum(file.lstat().st_size for file in files)


def disk(environment, torch):
    cpu = "cpu" in torch
    downloaded = DOWNLOADED_FOR_CPU if cpu else DOWNLOADED
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(os.environ.get("PIP_CACHE_DIR") or os.path.join(caches, "pip"))
    installed = INSTALLED_FOR_CPU if cpu else INSTALLED
    needs = [(environment, max(0, installed - held(environment)))]
    needs.append((Path(tempfile.gettempdir()), downloaded))
    if not os.environ.get("PIP_NO_CACHE_DIR"):
        needs.append((cache, downloaded))
    of_file_system = {}
    for folder, size in needs:
        folder = folder.absolute()
        existing = next(each for each in (folder, *folder.parents) if os.path.isdir(each))
        place, total = of_file_system.get(existing.stat().st_dev, (existing, 0))
        of_file_system[existing.stat().st_dev] = place, total + size
    for place, total in of_file_system.values():
        free = shutil.disk_usage(place).free
        if free < total:
            yield (
                f"{total / GIGABYTE:.2g} GB of disk are needed at {place}, but "
                f"{free / GIGABYTE:.2g} are free: make room, set TMPDIR to another disk, or take "
                "torch for the CPU alone, as docs/install.md shows"
            )


def paths(*folders):
    for name, folder in folders:
        found = re.sub(PATH_CHARACTERS, "", str(folder))
        if found:
            yield (
                f"The path of the {name} has {found[0]!r} in it ({folder}), which torch's own "
                "tools do not quote: take one of letters, digits and ./+@~-_"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path, nargs="?", help="folder that is to be made")
    parser.add_argument("torch", nargs="?", help="what pip will install, such as torch==2.13.0")
    options = parser.parse_args()
    if options.environment is None:  # which is there, and builds
        sys.exit("\n".join(compiler()) or None)
    environment = options.environment.absolute()
    folders = [("checkout", Path.cwd()), ("environment", environment)]
    folders.append(("temporary files (TMPDIR)", Path(tempfile.gettempdir())))
    lacking = [
        *python(),
        *compiler(),
        *openssl(),
        *paths(*folders),
        *disk(environment, options.torch),
    ]
    sys.exit("\n".join(lacking) or None)


if __name__ == "__main__":
    main()
