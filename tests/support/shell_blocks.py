"""The shell blocks of docs/debugging.md: they run, and print what stands below them."""

import os
import re
import subprocess
import sys
from pathlib import Path

from common import ROOT

PAGE = (ROOT / "docs" / "debugging.md").read_text()
RELEASE, DEBUG, ERRORS = (
    re.findall(r"^```sh\n(.*?)^```\n```text\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    for part in re.split("^## (?:A debug build|Errors)$", PAGE, flags=re.MULTILINE)
)
(CALL_PY,) = re.findall(
    r"`call.py` mean this file:\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)


def assert_prints(commands: str, lines: str, folder: Path, **environment: str) -> None:
    """In this order, with anything in place of three dots, and anything between lines."""
    (folder / "call.py").write_text(CALL_PY)
    printed = subprocess.run(
        ["bash", "-c", commands.replace(".venv/bin/python", sys.executable)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).stdout
    begin = 0
    for line in lines.splitlines():
        pattern = ".*".join(map(re.escape, line.split("...")))
        found = re.compile(pattern).search(printed, begin)
        assert found, f"{line}\nis not in\n{printed[-8000:]}"
        begin = found.end()
