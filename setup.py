import os
import runpy
import warnings

from setuptools import __version__ as setuptools_version
from setuptools import setup

if int(setuptools_version.split(".")[0]) < 77:
    raise SystemExit(
        "lltm_ops: expected setuptools 77 or later, which reads the licence in pyproject.toml, "
        f"but got {setuptools_version}: run `python -m pip install 'setuptools>=77'`"
    )
# torch says so when it is imported, and no build needs NumPy.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
try:
    from torch.utils import cpp_extension
except ModuleNotFoundError:
    raise SystemExit(
        "lltm_ops is compiled against the torch that it will run with, and this build sees none. "
        "pip builds in an environment of its own, which has no torch even where yours has one: "
        "install torch if it is missing, then run pip install again, with --no-build-isolation"
    ) from None

# ninja alone would run two more, which slow one another down where there are two processors.
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))

# By its path: importing the package would load the library that is being built.
installed = runpy.run_path("lltm_ops/_find_library.py")
try:
    extension = runpy.run_path("tools/build_extension.py")["extension"]()
except RuntimeError as error:
    raise SystemExit(str(error)) from None
library_name = extension.name.removeprefix("lltm_ops.")
# A folder of objects for each library, so that environments can share a checkout.
build_folder = f"build/{library_name}"


class BuildExtension(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        super().finalize_options()
        # An editable install would compile in a temporary folder, and everything anew each time.
        self.build_temp = f"{build_folder}/objects"

    def run(self) -> None:
        super().run()
        hidden_by = installed["find_library"]()
        if self.inplace and not hidden_by.name.startswith(library_name):
            # Built for this torch with CUDA, and loaded instead of what was asked for now.
            hidden_by.unlink()


setup(
    ext_modules=[extension],
    # The library is tied to this minor version: pip must not bring another.
    install_requires=[f"torch=={installed['torch_minor']()}.*"],
    cmdclass={"build_ext": BuildExtension},
    options={
        "build": {"build_base": build_folder},
        # Wheels for several torches can lie side by side.
        "bdist_wheel": {
            "py_limited_api": "cp310",
            "build_number": library_name.removeprefix("_C_torch").replace("_", "."),
        },
    },
)
