"""Links to files of the repository lead to pages that show these files.

The pages in docs are written for readers of the repository as well, so they link to
../csrc/ops/lltm.h, or to a folder. On the site each linked file has a page below source/, with its
lines numbered, or with a table if it is a CSV file, and each linked folder has a page that lists
it. A path in backticks becomes a link too, and so does a test, as in
tests/ops/test_values.py::test_name.
"""

import csv
import os
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.typing import ExtensionMetadata

ROOT = Path(__file__).resolve().parent.parent.parent
# A path in backticks is one of the repository if it begins with one of these.
FOLDERS = ("benchmarks", "cmake", "csrc", "examples", "lltm_ops", "tests")

NOT_LISTED = (".*", "__pycache__", "*.so", "build", "dist", "*.egg-info")


def mark_links(app: Sphinx, doctree: nodes.document) -> None:
    """Takes the links that MyST left for downloads, and those that it cannot resolve."""
    env = app.env
    folder = env.doc2path(env.docname).parent
    for node in list(doctree.findall(is_link_of_myst)):
        target, _, fragment = node["reftarget"].partition("#")
        if node["refdomain"] == "doc":
            if target in env.found_docs:
                continue
            path = app.srcdir / f"{target}.md"
            fragment = node["reftargetid"]
        else:
            path = Path(os.path.normpath(folder / target))
        if not path.exists() or not path.is_relative_to(ROOT):
            continue  # MyST warns of it.
        document = document_of(path, env)
        if document is None:
            node.replace_self(pending_link(path, *node.children))
        else:
            node["refdomain"], node["reftarget"] = "doc", document
            node["reftargetid"] = fragment or None

    path_of_file = re.compile(rf"((?:{'|'.join(FOLDERS)})/[\w./]*)(?:::(\w+))?")
    for node in list(doctree.findall(nodes.literal)):
        match = path_of_file.fullmatch(node.astext())
        if match and (ROOT / match[1]).exists() and may_become_a_link(node):
            node.replace_self(pending_link(ROOT / match[1], node.deepcopy(), definition=match[2]))


def is_link_of_myst(node: nodes.Node) -> bool:
    kinds = (addnodes.download_reference, addnodes.pending_xref)
    return isinstance(node, kinds) and node["reftype"] == "myst"


def may_become_a_link(node: nodes.Node) -> bool:
    kinds = (addnodes.pending_xref, nodes.reference, nodes.title)
    return not isinstance(node.parent, kinds) and not isinstance(node.parent.parent, kinds)


def pending_link(
    path: Path, *children: nodes.Node, definition: str | None = None
) -> addnodes.pending_xref:
    return addnodes.pending_xref(
        "", *children, reftype="repository-file", reftarget=path, definition=definition
    )


def document_of(path: Path, env: BuildEnvironment) -> str | None:
    """The page of the documentation that stands for the file or the folder, if one does."""
    if path in (ROOT, ROOT / "README.md"):
        return env.config.root_doc
    document = env.path2doc(path / "README.md" if path.is_dir() else path)
    return document if document in env.found_docs else None


def page_of(path: Path, env: BuildEnvironment) -> str:
    name = f"source/{path.relative_to(ROOT)}"
    return document_of(path, env) or (f"{name}/index" if path.is_dir() else name)


def resolve_link(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contnode: nodes.Element
) -> nodes.Element | None:
    if node["reftype"] != "repository-file":
        return None
    if app.builder.format != "html":
        return contnode
    uri = app.builder.get_relative_uri(node["refdoc"], page_of(node["reftarget"], env))
    if node["definition"]:
        uri += line_of(node["definition"], node["reftarget"])
    return nodes.reference("", "", contnode, internal=True, refuri=uri)


def line_of(name: str, path: Path) -> str:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.match(rf"\s*(?:def|class) {name}\b", line):
            return f"#line-{number}"
    return ""


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    env = app.env
    left = {
        node["reftarget"]
        for document in env.found_docs
        for node in env.get_doctree(document).findall(addnodes.pending_xref)
        if node["reftype"] == "repository-file"
    }
    done = set()
    while left:
        path = left.pop()
        done.add(path)
        if document_of(path, env) is not None:
            continue
        if path.is_dir():
            entries = entries_of(path)
            left.update(set(entries) - done)
            body = listing(path, entries, app)
        elif path.suffix == ".png":
            target = app.outdir / "source" / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            body = f'<img src="{path.name}" alt="{path.name}">'
        elif path.suffix == ".csv":
            body = table(path)
        else:
            body = numbered_lines(path, app)
        title = escape(str(path.relative_to(ROOT)))
        yield page_of(path, env), {"title": title, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def entries_of(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if not any(fnmatch(path.name, pattern) for pattern in NOT_LISTED)
    )


def listing(folder: Path, entries: list[Path], app: Sphinx) -> str:
    here = page_of(folder, app.env)
    lines = (
        f'<li><a href="{app.builder.get_relative_uri(here, page_of(path, app.env))}">'
        f"{escape(path.name)}{'/' if path.is_dir() else ''}</a></li>"
        for path in entries
    )
    return f"<ul>{''.join(lines)}</ul>"


def table(path: Path) -> str:
    """Returns a CSV file as a table in the theme's style."""

    def line(row: list[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"

    with path.open(newline="") as stream:
        header, *rows = csv.reader(stream)
    lines = "".join([line(header, "th"), *(line(row, "td") for row in rows)])
    return f'<div class="table-wrapper"><table class="docutils">{lines}</table></div>'


def numbered_lines(path: Path, app: Sphinx) -> str:
    try:
        language = get_lexer_for_filename(path.name).aliases[0]
    except ClassNotFound:
        language = "text"
    return app.builder.highlighter.highlight_block(
        path.read_text(errors="replace"), language, force=True, linenos="inline", lineanchors="line"
    )


def setup(app: Sphinx) -> ExtensionMetadata:
    # Before Sphinx copies what is to be downloaded.
    app.connect("doctree-read", mark_links, priority=400)
    app.connect("missing-reference", resolve_link)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
