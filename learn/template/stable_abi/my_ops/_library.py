"""Loads the compiled libraries. They work with torch 2.11 and each later one."""

import functools
from pathlib import Path
from typing import Any

import torch


@functools.cache
def load() -> Any:
    """Returns ``torch.ops.my_ops``, or raises an ImportError that says why not."""
    folder = Path(__file__).parent
    build = "build it with `pip install --no-build-isolation .`"
    libraries = list(folder.glob("_C.*"))
    if not libraries:
        expected = f"expected a library _C in {folder}"
        raise ImportError(f"my_ops: {expected}, but got none: {build}")
    if torch.version.cuda is not None:
        # One for each major version of CUDA. Without it, the operators have no kernel for a GPU.
        libraries += folder.glob(f"_C_cuda{torch.version.cuda.split('.')[0]}.*")
    for library in libraries:
        try:
            torch.ops.load_library(library)
        except OSError as error:
            raise ImportError(
                f"my_ops: {library} does not load with torch {torch.__version__} "
                f"({error.__cause__ or error}): {build}"
            ) from error
    return torch.ops.my_ops
