"""Loads the compiled operators, once, and says what they were built for."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from lltm_ops import _extension
from lltm_ops._version import __version__

_REBUILD = "build it with `pip install --no-build-isolation .` in a checkout of lltm_ops"


def _is_loaded() -> bool:
    # Loading the same operators twice does not raise: the process aborts.
    return hasattr(torch.ops.lltm, "forward")


def load() -> None:
    """Makes ``torch.ops.lltm`` live, unless it is already.

    Raises:
        ImportError: if there is no library for the running torch, or it does not load.
    """
    if _is_loaded():
        return
    if os.environ.get("LLTM_OPS_JIT") == "1":
        _extension.load_just_in_time()
        return
    package = Path(__file__).parent
    name = _extension.library_name()
    library = next(package.glob(f"{name}.*"), None)
    if library is None:
        built = sorted(re.findall(r"_C_torch(\d)(\d+)\.", " ".join(map(str, package.glob("_C_*")))))
        found = " and ".join(f"torch {major}.{minor}" for major, minor in built)
        raise ImportError(
            f"lltm_ops: expected a library built for torch {torch.__version__} in {package}, "
            f"but got {'one for ' + found if found else 'none'}: {_REBUILD}"
        )
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        # torch keeps the linker's own words ("undefined symbol") in the cause.
        reason = error.__cause__ or error
        raise ImportError(
            f"lltm_ops: {library} does not load with torch {torch.__version__} ({reason}): "
            f"{_REBUILD}"
        ) from error


def build_info() -> dict[str, str]:
    """What was built and what it runs on, for a bug report.

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
