"""Each test of the book fails with the code of the chapter before, and passes with its own."""

import re
from importlib.util import find_spec

import pytest
from common import ROOT, blocks, program

book = program(ROOT / "examples" / "book" / "run.py")

PAGES = sorted((ROOT / "docs" / "book").glob("[01]*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
# make test-all installs the extra.
NEEDS = {
    "11_triton": pytest.mark.skipif(find_spec("triton") is None, reason="needs the extra book")
}
each_chapter = pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=folder.name, marks=NEEDS.get(folder.name, ()))
        for number, folder in enumerate(book.CHAPTERS)
    ],
)


def compiles(test):
    """Slow, and one after the other: chapters share what was compiled."""
    return pytest.mark.slow(pytest.mark.xdist_group("book")(test))


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
def test_the_other_ways_to_build():
    chapter = book.CHAPTERS[1]
    result = book.run(chapter, *book.PYTEST, chapter / "test_builds.py")
    assert result.returncode == 0, result.stdout


@each_page
def test_code_of_the_page_is_that_of_the_program(page):
    """The page may leave lines out, where three dots say so. A box has code of chapter 12."""
    files = [
        path.read_text()
        for chapter in (page.stem, "12_stable_abi")
        for path in (ROOT / "examples" / "book" / chapter).rglob("*")
        if path.suffix in {".py", ".cpp", ".h", ".cu", ".toml", ".txt", ".yml"}
    ]
    quoted = [block for language in ("python", "cpp", "toml") for block in blocks(page, language)]
    assert quoted
    for block in quoted:
        for part in re.split(r"^ *(?://|#) \.\.\.\n", block, flags=re.M):
            assert any(part.strip("\n") in text for text in files), part


def test_every_chapter_has_a_page_and_a_program():
    folders = {path.name for path in (ROOT / "examples" / "book").glob("[01]*")}
    assert {page.stem for page in PAGES} == folders


@pytest.mark.parametrize("page", [*PAGES, PAGES[0].parent / "index.md"], ids=lambda page: page.stem)
def test_page_is_short(page):
    assert len(page.read_text().split()) <= 1000


@each_page
def test_page_keeps_to_the_plan(page):
    text = page.read_text()
    assert re.search(r"\A# \d+ [A-Z].*\n\n## The failure\n", text)
    assert "\n## What the package does beyond this\n" in text
