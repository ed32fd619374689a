import runpy

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension
except ModuleNotFoundError:
    raise SystemExit(
        "lltm_ops is compiled against the torch it will run with, and there is none here: install "
        "torch first, then run `pip install --no-build-isolation .`"
    ) from None

setup(
    ext_modules=[runpy.run_path("lltm_ops/_extension.py")["extension"]()],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
