"""Runs the test of a chapter with the code of the chapter before, then with the chapter's own, and
last the program of the chapter, if it has something to print."""

import argparse
import fcntl
import os
import subprocess
import sys
from pathlib import Path

BOOK = Path(__file__).parent
CHAPTERS = sorted(path.parent for path in BOOK.glob("*/test_lltm.py"))
EXTENSIONS = BOOK.parent.parent / "build" / "book" / "extensions"
PYTEST = ["-m", "pytest", "-qx", "--tb=short", "--show-capture=no", "--disable-warnings"]


def run(code: Path | None, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python; `import lltm` finds the code of the folder that is given."""
    path = [str(folder) for folder in (code, BOOK) if folder]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    paths = {"PYTHONPATH": os.pathsep.join(path), "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
    # pip puts ninja and cmake beside python.
    paths["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    with open(EXTENSIONS / "running", "w") as running:
        fcntl.flock(running, fcntl.LOCK_EX)
        # A build that was killed leaves its lock, and the next one would wait for it without end.
        for lock in EXTENSIONS.glob("*/lock"):
            lock.unlink()
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | paths,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def before(chapter: Path) -> Path | None:
    """The chapter whose code it goes on from."""
    number = CHAPTERS.index(chapter)
    return CHAPTERS[number - 1] if number else None


def test(chapter: Path, code: Path | None) -> subprocess.CompletedProcess[str]:
    return run(code, *PYTEST, chapter / "test_lltm.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapter", type=int, choices=range(1, len(CHAPTERS) + 1))
    number = parser.parse_args().chapter
    chapter = CHAPTERS[number - 1]
    last = before(chapter)
    print(f"The test of {chapter.name} with {f'the code of {last.name}' if last else 'no code'}")
    print(test(chapter, last).stdout)
    print(f"The same test with the code of {chapter.name}")
    result = test(chapter, chapter)
    print(result.stdout)
    print(run(chapter, chapter / "lltm.py").stdout, end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
