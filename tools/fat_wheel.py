"""Packs the package with libraries for several versions of torch into one wheel.

    fat_wheel.py OUTPUT FOLDER...

Each folder has one library, lltm_ops/_C_torch*.so, as setup.py build_ext --build-lib leaves it.
"""

import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class FatWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # The libraries have no Python in them. auditwheel replaces the platform.
        return "py3", "none", super().get_tag()[2]


def requirement(libraries: list[Path]) -> str:
    """What pip has to install beside them, as ``torch>=2.11,<2.16``. install.md says why."""
    minors = {
        tuple(map(int, match.groups()))
        for library in libraries
        if (match := re.match(r"_C_torch(\d+)_(\d+)_", library.name))
    }
    (major, first), (_, last) = min(minors), max(minors)
    gaps = [f"!={major}.{minor}.*" for minor in range(first, last) if (major, minor) not in minors]
    return ",".join([f"torch>={major}.{first}", *gaps, f"<{major}.{last + 1}"])


def main() -> None:
    output, *folders = sys.argv[1:]
    stage = Path(output, "stage")
    libraries = []
    for folder in folders:
        (library,) = Path(folder).glob("lltm_ops/_C_torch*.so")
        libraries.append(library)
    package = stage / "lib" / "lltm_ops"
    package.mkdir(parents=True)
    for library in libraries:
        shutil.copy(library, package)
    setup(
        script_args=["--quiet", "bdist_wheel"],
        distclass=BinaryDistribution,
        install_requires=[requirement(libraries)],
        cmdclass={"bdist_wheel": FatWheel},
        options={
            "egg_info": {"egg_base": str(stage)},
            "build": {"build_base": str(stage), "build_lib": str(stage / "lib")},
            "bdist_wheel": {"dist_dir": output},
        },
    )


if __name__ == "__main__":
    main()
