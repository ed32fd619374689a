"""Loads the compiled library. It works with one minor version of torch, and its name says which."""

from pathlib import Path

import torch

TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])
NAME = f"_C_torch{TORCH_MINOR.replace('.', '_')}"


def load() -> None:
    """Makes ``torch.ops.my_ops`` live, or raises an ImportError that says why not."""
    folder = Path(__file__).parent
    library = next(folder.glob(f"{NAME}.*"), None)
    build = "build it with `pip install --no-build-isolation .`"
    if library is None:
        found = ", ".join(sorted(path.name for path in folder.glob("_C_torch*"))) or "none"
        raise ImportError(
            f"my_ops: expected a library for torch {torch.__version__} in {folder}, "
            f"but got {found}: {build}"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise ImportError(
            f"my_ops: {library} does not load with torch {torch.__version__} "
            f"({error.__cause__ or error}): {build}"
        ) from error
