"""Fresh memory that holds poison, so that a result which is not written shows."""

import ctypes
from pathlib import Path

import torch


def poison_fresh_memory() -> None:
    """From now on, in this process.

    PyTorch's allocator for the CPU fills with 0x7fedbeef where its flag is set, whoever asks it:
    tensors of at::empty, and the scratch of the kernels, which torch.utils.deterministic does not
    reach. That is NaN in float32 and in every other value of half types, and 1.7e308 in float64.
    """
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(libc10, "FLAGS_caffe2_cpu_allocator_do_junk_fill").value = True
    assert torch.empty(1).isnan()
