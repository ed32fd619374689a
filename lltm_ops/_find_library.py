"""The name of the compiled library, and where it is. Builds read this file, too, by its path."""

from __future__ import annotations

from pathlib import Path

import torch


def torch_minor() -> str:
    """The version of the running torch up to its minor, such as ``2.13``."""
    return ".".join(torch.__version__.split(".")[:2])


def library_name(cuda: bool) -> str:
    """The name of a library for this torch, ``_C_torch2_13_cpu`` or ``_C_torch2_13_cu13``.

    A library works only with the minor version of torch that it was built for, and its CUDA kernels
    only with the major version of CUDA. So the name says both, and several can lie side by side.
    """
    variant = f"cu{torch.version.cuda.split('.')[0]}" if cuda and torch.version.cuda else "cpu"
    return f"_C_torch{torch_minor().replace('.', '_')}_{variant}"


def find_library() -> Path | None:
    """The library of the package for the running torch: with CUDA kernels, else without."""
    names = dict.fromkeys(library_name(cuda) for cuda in (True, False))
    found = (path for name in names for path in Path(__file__).parent.glob(f"{name}.*so"))
    return next(found, None)
