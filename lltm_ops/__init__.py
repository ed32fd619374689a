"""The LLTM recurrent cell as a PyTorch operator, for CPU and CUDA.

Importing this makes ``torch.ops.lltm.*`` live: from Python, TorchScript, torch.compile and C++.
"""

from lltm_ops import _fake_tensors, _library
from lltm_ops._library import build_info
from lltm_ops._version import __version__
from lltm_ops.functional import backward, forward, reference
from lltm_ops.modules import LLTMCell

_library.load()
_fake_tensors.register()

__all__ = ["LLTMCell", "__version__", "backward", "build_info", "forward", "reference"]
