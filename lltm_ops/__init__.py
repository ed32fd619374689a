"""The LLTM recurrent cell as a PyTorch operator, for CPU and CUDA.

Importing this makes ``torch.ops.lltm.*`` live: from Python, TorchScript, torch.compile and C++.
"""

from lltm_ops import _fake_tensors, _flops
from lltm_ops._library import build_info
from lltm_ops._version import __version__
from lltm_ops.cell import LLTMCell
from lltm_ops.functional import (
    backward,
    forward,
    reference,
    sequence_backward,
    sequence_forward,
)
from lltm_ops.layer import LLTM

_fake_tensors.register()
_flops.register()

__all__ = [
    "LLTM",
    "LLTMCell",
    "__version__",
    "backward",
    "build_info",
    "forward",
    "reference",
    "sequence_backward",
    "sequence_forward",
]
