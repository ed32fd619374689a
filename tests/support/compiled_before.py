"""A compiler for tests of whole builds, which compiles few sources of the library a second time."""

from __future__ import annotations

import shlex
from pathlib import Path

from common import CXX, ROOT

from lltm_ops._find_library import find_library

STAND_IN = """\
#!/bin/bash
# {compiler}, but of a source of csrc this is the object that lies in {objects}.
for argument; do
  [[ $argument = *.cpp ]] && source=${{argument##*/csrc/}}
  [[ $previous = -o ]] && output=$argument
  previous=$argument
done
object={objects}/csrc/${{source%.cpp}}.o
[[ " {compiled_anew} " = *" $source "* ]] && object=
if [ -e "$object" ]; then cp "$object" "$output"; else exec {compiler} "$@"; fi
"""


def write_compiler(folder: Path, compiled_anew: str = "") -> str:
    """Its path, for the variable CXX. It hands out the objects of the library that Python loads,
    but for sources whose names in csrc are given, with spaces between them.

    Where objects are gone, as beside an installed wheel, it compiles.
    """
    library = find_library()
    assert library is not None
    objects = ROOT / "build" / library.name.split(".")[0] / "objects"
    path = folder / "compiled_before"
    text = STAND_IN.format(
        compiler=shlex.quote(CXX),
        objects=shlex.quote(str(objects)),
        compiled_anew=compiled_anew,
    )
    path.write_text(text)
    path.chmod(0o755)
    return str(path)
