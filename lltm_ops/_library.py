"""Loads the compiled operators once, and describes their build."""

from __future__ import annotations

import os
import platform
import re
import runpy
import struct
from pathlib import Path
from typing import Any

import torch

from lltm_ops._find_library import find_library
from lltm_ops._version import __version__

# There in a checkout and in an unpacked source distribution.
_BUILD = Path(__file__).resolve().parent.parent / "tools" / "build_extension.py"
_REBUILD = (
    "build it with `pip install --no-build-isolation .` in a checkout of lltm_ops, or in its "
    "source distribution, unpacked"
)
# The folder of a checkout hides an installed package from a Python that is started next to it.
_BUILD_HERE = (
    "this is a checkout, so either build here with `python setup.py build_ext --inplace`, or "
    "install the package and start Python in another folder, without this one on PYTHONPATH"
)


def _is_loaded() -> bool:
    # Loading the same operators twice does not raise: the process aborts.
    return hasattr(torch.ops.lltm, "forward")


def _others(package: Path) -> str:
    """Lists the libraries that are there: ``those for torch 2.11 (cpu, cu13), 2.12 (cpu)``."""
    variants: dict[tuple[int, int], list[str]] = {}
    for path in sorted(package.glob("_C_torch*so")):
        if match := re.match(r"_C_torch(\d+)_(\d+)_(\w+)\.", path.name):
            variants.setdefault((int(match[1]), int(match[2])), []).append(match[3])
    found = (f"{x}.{y} ({', '.join(names)})" for (x, y), names in sorted(variants.items()))
    return f"those for torch {', '.join(found)}" if variants else "none"


def _missing_bytes(library: Path) -> int:
    """How many a full disk or a download that was cut has left out: mapping them ends the process.

    The table of sections is the last that a linker writes.
    """
    with library.open("rb") as file:
        header = file.read(64)
        size = file.seek(0, 2)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return 0  # the linker says what else it is
    table, bytes_of_one, count = struct.unpack_from("=Q10xHH", header, 40)
    return max(0, int(table + bytes_of_one * count - size))


def load() -> Any:
    """Makes ``torch.ops.lltm`` live, unless it is already, and returns it.

    Raises:
        ImportError: if there is no library for the running torch, or it does not load, or has no
            operators.
    """
    if _is_loaded():
        return torch.ops.lltm
    if os.environ.get("LLTM_OPS_JIT", "0").lower() in ("1", "on", "yes", "true"):
        _build_just_in_time()
        return torch.ops.lltm
    library = find_library()
    if library is None:
        package = Path(__file__).parent
        if not package.is_dir():
            raise ImportError(
                f"lltm_ops: expected a folder, because the system loads a library from a file, but "
                f"got {package} inside an archive: install the package, or unpack the archive"
            )
        raise ImportError(
            f"lltm_ops: expected a library built for torch {torch.__version__} in {package}, "
            f"but got {_others(package)}: "
            f"{_BUILD_HERE if _BUILD.is_file() else _REBUILD}"
        )
    cause, reason = None, "it has no torch.ops.lltm.forward"
    try:
        if missing := _missing_bytes(library):
            raise OSError(f"its last {missing} bytes are missing")
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        # torch keeps the linker's own words ("undefined symbol") in the cause.
        cause, reason = error, str(error.__cause__ or error)
    if not _is_loaded():
        raise ImportError(
            f"lltm_ops: {library} does not load with torch {torch.__version__} ({reason}): "
            f"{_REBUILD}"
        ) from cause
    return torch.ops.lltm


def _build_just_in_time() -> None:
    if not _BUILD.is_file():
        raise ImportError(
            "lltm_ops: LLTM_OPS_JIT=1 compiles the C++ sources of a checkout, but this package was "
            f"installed without them (there is no {_BUILD}): start Python in a checkout, or unset "
            "it"
        )
    runpy.run_path(str(_BUILD))["load_just_in_time"]()


def build_info() -> dict[str, str]:
    """Describes the build and the torch that it runs on, for a bug report.

    Returns:
        ``lltm_ops``, ``python`` and ``torch``: versions at run time; ``built_for_torch``,
        ``compiler``: of the build; ``cuda``: the CUDA version of the build or ``"not built"``;
        ``cuda_architectures``; ``cpu_capability``: what torch found in this CPU.
    """
    built = dict(line.split("=", 1) for line in torch.ops.lltm._build_info().splitlines())
    return {
        "lltm_ops": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **built,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
