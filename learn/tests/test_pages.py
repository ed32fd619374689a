"""What the pages say is so: what they link to or name is there, and their commands are tried."""

import re

import pytest
from common import ROOT, blocks, missing_links

LEARN = ROOT / "learn"
CHAPTERS = sorted((LEARN / "book").glob("*/README.md"))
PAGES = [*sorted(LEARN.glob("*.md")), *CHAPTERS]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(LEARN)))

TRIED = {
    # make test and make learn-test do this.
    "make .venv/.torch",
    ".venv/bin/pip install pytest",
    ".venv/bin/pip install -r learn/requirements.txt",
    # test_book.py runs each chapter that has a program.
    *(f".venv/bin/python learn/book/run.py {number}" for number in range(1, len(CHAPTERS))),
    # test_new_package.py does this, but for the upload.
    "python3 learn/new_package.py --name=my_ops --output=../my_ops",
    "python3 learn/new_package.py --name=my_ops --like=ema_update --operator=track_",
    "cd ../my_ops",
    "python -m pip install --no-build-isolation -e .",
    "python -m pytest",
    *"".join(blocks(LEARN / "release_your_own.md", "sh")).splitlines(),
}


@pytest.mark.smoke
@each_page
def test_links_lead_somewhere(page):
    assert not missing_links(page)


@each_page
def test_commands_are_tried(page):
    assert {line for block in blocks(page, "sh") for line in block.splitlines()} <= TRIED


@each_page
def test_no_other_kind_of_block(page):
    """A language that no test looks for would be a block that nobody tries."""
    languages = set(re.findall(r"^ *```(\w+)$", page.read_text(), re.M))
    assert languages <= {"python", "cpp", "toml", "sh", "text"}


@each_page
def test_named_tests_exist(page):
    code = "".join(path.read_text() for path in LEARN.rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert f"def {name}(" in code, name
