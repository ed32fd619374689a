"""Each test of the book fails with the code of the chapter before, and passes with its own."""

import re

import pytest
from common import ROOT, blocks, program

book = program(ROOT / "learn" / "book" / "run.py")

PAGES = [folder / "README.md" for folder in sorted(book.BOOK.glob("[01]*"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
MARKS = {"10_cuda": [pytest.mark.gpu]}
each_chapter = pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=folder.name, marks=MARKS.get(folder.name, ()))
        for number, folder in enumerate(book.CHAPTERS)
    ],
)


# One after the other: chapters share what was compiled.
compiles = pytest.mark.xdist_group("book")


@compiles
@each_chapter
def test_passes_after_it_failed(number):
    chapter = book.CHAPTERS[number]
    before = book.test(chapter, book.before(chapter))
    # Without nvcc, a torch with CUDA and a GPU, nothing of the chapter on CUDA runs.
    nothing_ran = chapter.name == "10_cuda" and re.search(r"^\d+ skipped in", before.stdout, re.M)
    assert before.returncode != 0 or nothing_ran, before.stdout
    after = book.test(chapter, chapter)
    assert after.returncode == 0, after.stdout
    # The errors that the page shows are those that its reader gets.
    for line in re.findall(r"^E +(.+?)(?: \.\.\.)?$", PAGES[number].read_text(), re.M):
        assert nothing_ran or line in before.stdout, line
    # Here, because chapters share what was compiled.
    if "__main__" in (chapter / "lltm.py").read_text():
        program = book.run(chapter, chapter / "lltm.py")
        assert program.returncode == 0, program.stdout
        assert program.stdout


@compiles
def test_a_build_that_was_killed_keeps_nobody_waiting():
    for name in ("book", "book_03"):
        (book.EXTENSIONS / name).mkdir(parents=True, exist_ok=True)
        (book.EXTENSIONS / name / "lock").touch()
    for number in (2, 3):
        code = "import faulthandler; faulthandler.dump_traceback_later(600, exit=True); import lltm"
        result = book.run(book.CHAPTERS[number], "-c", code)
        assert result.returncode == 0, result.stdout


@compiles
def test_the_errors_of_a_build():
    chapter = book.CHAPTERS[1]
    result = book.run(chapter, *book.PYTEST, chapter / "test_build_errors.py")
    assert result.returncode == 0, result.stdout


@each_page
def test_code_of_the_page_is_that_of_the_program(page):
    """The page may leave lines out, where three dots say so."""
    folders = [page.parent, ROOT / "learn" / "template"]
    files = [
        path.read_text()
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in {".py", ".cpp", ".h", ".cu", ".toml", ".txt", ".yml"}
    ]
    quoted = [block for language in ("python", "cpp", "toml") for block in blocks(page, language)]
    assert quoted
    for block in quoted:
        for part in re.split(r"^ *(?://|#) \.\.\.\n", block, flags=re.M):
            assert any(part.strip("\n") in text for text in files), part


@each_page
def test_page_is_short(page):
    assert len(page.read_text().split()) <= 1000


@each_page
def test_page_keeps_to_the_plan(page):
    text = page.read_text()
    assert re.search(r"\A# \d+ [A-Z].*\n\n## The failure\n", text)
    assert "\n## What the package does beyond this\n" in text
