"""The LLTM as an operator of the dispatcher."""

from pathlib import Path

import torch
from torch.utils.cpp_extension import load

FOLDER = Path(__file__).parent
# No Python module: loading the library runs its TORCH_LIBRARY blocks, and that is all.
load("book_03", [str(FOLDER / "lltm.cpp")], extra_cflags=["-O3"], is_python_module=False)
forward = torch.ops.lltm.forward


def build_program() -> str:
    """Builds the program of call.cpp. Returns its path."""
    sources = [str(FOLDER / name) for name in ("call.cpp", "lltm.cpp")]
    return load("book_03_call", sources, is_python_module=False, is_standalone=True)


if __name__ == "__main__":
    print(torch.ops.lltm.forward.default._schema)
