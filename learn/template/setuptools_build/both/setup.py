import os
import sys
from glob import glob
from pathlib import Path

from setuptools import __version__ as setuptools_version
from setuptools import setup

if int(setuptools_version.split(".")[0]) < 77:
    raise SystemExit(f"my_ops needs setuptools 77 or later, but this is {setuptools_version}")
try:
    import torch
    from torch.utils import cpp_extension
except ModuleNotFoundError:
    raise SystemExit(
        "my_ops is compiled with the headers of torch, and this build sees "
        "none. pip builds in an environment of its own, which has no torch even where yours has "
        "one: install torch if it is missing, then run `pip install --no-build-isolation .`"
    ) from None

# pip puts ninja beside python, which need not be on PATH.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
sources = glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp")
cuda_sources = glob("csrc/cuda/*.cu")
cuda = bool(cuda_sources and torch.version.cuda and cpp_extension.CUDA_HOME)
print(f"my_ops: torch {torch.__version__}, {'with' if cuda else 'without'} CUDA kernels")
if cuda and not torch.cuda.is_available():  # else torch asks the GPU what to compile for
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
unix = os.name != "nt"  # else MSVC, which takes other flags, and optimizes without one
origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
# -fno-math-errno: for vectors of exp.
cxx_flags = ["-O3", "-g0", "-Wall", "-fno-math-errno"] * unix
nvcc_flags = ["-O3"]


def library(extension, name, sources):
    return extension(
        f"my_ops.{name}",
        sorted(sources),
        extra_compile_args={"cxx": cxx_flags, "nvcc": nvcc_flags},
        extra_link_args=[f"-Wl,-rpath,{origin}/../torch/lib"] * unix,
        py_limited_api=True,
    )


class BuildExtension(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        super().finalize_options()
        # Objects stay there, so that the next build compiles only what has changed.
        self.build_temp = f"build/{torch.__version__}"
