"""Prints what `make` gives to pip unless TORCH says it.

That is PyTorch's build for the CPU, a tenth of the size of PyPI's, unless there is a GPU, a
variable asks for CUDA, or the index cannot be reached from here.
"""

import os
import shutil
import urllib.request

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def default():
    if shutil.which("nvidia-smi") or os.environ.get("CUDA_HOME") or os.environ.get("FORCE_CUDA"):
        return TORCH
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5).close()
    except (OSError, ValueError):  # a malformed proxy is a ValueError
        return TORCH
    return f"{TORCH} --extra-index-url {CPU_INDEX}"


if __name__ == "__main__":
    print(default())
