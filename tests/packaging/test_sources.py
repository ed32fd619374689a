"""The sources in csrc: their names, what includes what, and how much there is to read."""

import re
from pathlib import Path

import pytest
from common import BUILD_EXTENSION, ROOT, program

CSRC = ROOT / "csrc"
FILES = [path.relative_to(CSRC) for path in sorted(CSRC.rglob("*.*"))]
PAIRS = "cpu/primitives/product_bfloat16.cpp"
# The most files and lines of each part. A change that needs more raises them, and says why in its
# message.
MOST = {
    "ops": (19, 2100),
    "cpu": (18, 3440),
    "cuda": (17, 2370),
    "a step forward": (19, 2565),
    "a sequence forward": (25, 3395),
}
# A reader begins with the file of the CPU's kernel and the file of the schemas. product.h has two
# sources.
READ = {
    "a step forward": ("cpu/lltm_forward.cpp", "ops/library.cpp", PAIRS),
    "a sequence forward": ("cpu/lltm_sequence_forward.cpp", "ops/library.cpp", PAIRS),
}


def includes(file: Path) -> list[Path]:
    text = (CSRC / file).read_text()
    return [Path(name) for name in re.findall('^#include "(.+)"', text, re.MULTILINE)]


def read_from(*names: str) -> set[Path]:
    """These files and all that they include; a header brings its source."""
    found: set[Path] = set()
    following = [Path(name) for name in names]
    while following:
        file = following.pop()
        if file in FILES and file not in found:
            found.add(file)
            following += [*includes(file), file.with_suffix(".cpp")]
    return found


@pytest.mark.parametrize("part", MOST)
def test_how_much_there_is_to_read(part):
    files = read_from(*READ[part]) if part in READ else {f for f in FILES if f.parts[0] == part}
    lines = sum((CSRC / file).read_text().count("\n") for file in files)
    most = MOST[part]
    found = len(files), lines
    assert all(map(int.__le__, found, most)), f"{part} has {found} files and lines, not {most}"


def test_every_source_file_has_a_base_name_of_its_own():
    names = [Path(source).name for source in program(BUILD_EXTENSION).sources(cuda=True)]
    assert len(set(names)) == len(names)
    assert {file.name for file in FILES if file.suffix in (".cpp", ".cu")} == set(names)


def layer(file: Path) -> int:
    """By the name of a file in csrc: what operators share, the cell, sequences, dispatch keys."""
    if file.name in ("autocast.cpp", "autograd.cpp", "library.cpp", "meta.cpp", "vmap.cpp"):
        return 3
    if file.name.startswith("lltm_sequence") or file.name == "lltm_backward.cpp":
        return 2  # a step backward is a sequence of one step
    return 1 if file.name.startswith("lltm") else 0


@pytest.mark.parametrize("file", FILES, ids=str)
def test_files_of_csrc_include_only_what_is_below(file):
    """docs/architecture.md: whoever reads the cell opens nothing of a sequence, whoever reads a
    building block no operator, and a backend depends on no other."""
    for include in includes(file):
        assert include.parts[0] in ("ops", file.parts[0])
        assert layer(include) <= layer(file)
        if file.parent.name == "primitives":
            assert include.parent == file.parent
