"""The LLTM as an operator of the dispatcher."""

from pathlib import Path

import torch
from torch.utils.cpp_extension import load

SOURCE = Path(__file__).with_name("lltm.cpp")
# No Python module: loading the library runs its TORCH_LIBRARY blocks, and that is all.
load("book_03", [str(SOURCE)], extra_cflags=["-O3"], is_python_module=False)
forward = torch.ops.lltm.forward


if __name__ == "__main__":
    print(torch.ops.lltm.forward.default._schema)
