"""What README and docs say is so: their code runs, and what they name is there."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import shell_blocks
from common import ROOT, blocks, missing_links, needs_torchscript

import lltm_ops

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# By what stands in a block. make test-all installs the extra.
NEEDS = {
    "onnxruntime": pytest.mark.skipif(
        find_spec("onnxruntime") is None, reason="needs the extra onnx"
    ),
    "torch.jit": needs_torchscript,
}
PYTHON_BLOCKS = [
    pytest.param(
        block,
        id=f"{page.name}-{number}",
        marks=[mark for word, mark in NEEDS.items() if word in block],
    )
    for page in PAGES
    for number, block in enumerate(blocks(page, "python"))
]
# Those of cpp.md belong together: test_cmake runs them. Those of debugging.md print something.
SHELL_LINES = sorted(
    {
        line.strip()
        for page in PAGES
        if page.name not in ("cpp.md", "debugging.md")
        for block in blocks(page, "sh")
        for line in block.splitlines()
    }
)


# Torch has deprecated what it calls itself: the first when torch.onnx copies, the second in jvp.
IGNORED = [
    f"-Wignore:`{name}` is deprecated:FutureWarning"
    for name in ("isinstance(treespec, LeafSpec)", "torch.jit.script")
]


@pytest.mark.parametrize("code", PYTHON_BLOCKS)
def test_python_block_runs(code, tmp_path):
    result = subprocess.run(
        [sys.executable, *IGNORED, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr


# By make fresh, test_packaging and test_train_distributed.
TRIED_ELSEWHERE = {
    ".venv/bin/torchrun --standalone --nproc-per-node 2 examples/train_distributed.py README.md",
    "sudo apt-get install g++ make python3-dev python3-venv",
    "pip install --no-build-isolation .",
    "pip install dist/lltm_ops-*-py3-none-*.whl",
}


@pytest.mark.parametrize("line", SHELL_LINES)
def test_shell_line_is_a_target_or_tried_elsewhere(line):
    """The targets themselves are tried by being run."""
    if line in TRIED_ELSEWHERE:
        return
    command = re.sub(r"^(\w+=\S+ )*make", "make --dry-run", line)
    assert command != line
    subprocess.run(command, shell=True, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("commands", "lines"), shell_blocks.RELEASE + shell_blocks.ERRORS)
def test_shell_block_prints_what_stands_below_it(commands, lines, tmp_path):
    """test_packaging runs those that need a debug build."""
    shell_blocks.assert_prints(commands, lines, tmp_path)


def test_no_shell_block_is_left_out():
    every = shell_blocks.RELEASE + shell_blocks.DEBUG + shell_blocks.ERRORS
    shown = [block for block, _ in every]
    assert blocks(ROOT / "docs" / "debugging.md", "sh") == shown


@each_page
def test_no_other_kind_of_block(page):
    """A language that no test here runs would be a block that nobody runs."""
    languages = set(re.findall(r"^ *```(\w+)$", page.read_text(), re.M))
    assert languages <= {"python", "sh", "text"}


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    assert not missing_links(page)


@each_page
def test_named_tests_exist(page):
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), name
    files = list((ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert any(f"def {name}(" in file.read_text() for file in files), name


def test_the_changelog_begins_with_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(\S+)\]", changelog, re.M)[1] == lltm_ops.__version__


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    names = re.findall(r"^\.\. \S+:: (?:lltm_ops\.)?(\w+)$", page, re.M)
    assert set(lltm_ops.__all__) <= set(names)


def test_every_row_of_works_with_names_a_test():
    table = (ROOT / "docs" / "works_with.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert all(re.search(r"`tests/[\w/]+\.py::\w+` \|$", row) for row in rows)


def test_every_limit_names_a_test_or_says_that_it_has_none():
    limits = re.split(r"^- ", (ROOT / "docs" / "limits.md").read_text(), flags=re.M)[1:]
    assert len(limits) > 30
    says = r"`tests/[\w/]+\.py::\w+`\)$|\(\*no test\*\)$|Tried by hand"
    for limit in limits:
        assert re.search(says, " ".join(limit.partition("\n\n")[0].split())), limit
