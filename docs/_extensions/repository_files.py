"""Links to files of the repository lead to pages that show these files.

The pages in docs are written for readers of the repository as well, so they link to files such as
../csrc/ops/lltm.h. On the site each linked file has a page below source/, with its lines numbered,
or with a table if it is a CSV file. A folder has none, so its name stands there without a link.
"""

import csv
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

ROOT = Path(__file__).resolve().parent.parent.parent


def lead_to_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Takes the links that MyST left for downloads, and those that it cannot resolve."""
    env = app.env
    folder = env.doc2path(env.docname).parent
    for node in list(doctree.findall(is_link_of_myst)):
        target = node["reftarget"].partition("#")[0]
        if node["refdomain"] == "doc":
            if target in env.found_docs:
                continue
            target = app.srcdir / f"{target}.md"
        path = Path(os.path.normpath(folder / target))
        if path.is_dir():
            node.replace_self(node.children)
        elif path.is_file() and path.is_relative_to(ROOT):  # of others, MyST warns
            page = env.config.root_doc if path == ROOT / "README.md" else page_of(path)
            uri = app.builder.get_relative_uri(env.docname, page)
            shown = {} if page == env.config.root_doc else {"file": path}
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri, **shown))


def is_link_of_myst(node: nodes.Node) -> bool:
    kinds = (addnodes.download_reference, addnodes.pending_xref)
    return isinstance(node, kinds) and node["reftype"] == "myst"


def page_of(path: Path) -> str:
    return f"source/{path.relative_to(ROOT)}"


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    doctrees = map(app.env.get_doctree, app.env.found_docs)
    links = (node for doctree in doctrees for node in doctree.findall(nodes.reference))
    for path in {node["file"] for node in links if "file" in node}:
        title = escape(str(path.relative_to(ROOT)))
        body = table(path) if path.suffix == ".csv" else numbered_lines(path, app)
        yield page_of(path), {"title": title, "body": f"<h1>{title}</h1>{body}"}, "page.html"


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
        path.read_text(), language, force=True, linenos="inline"
    )


def setup(app: Sphinx) -> ExtensionMetadata:
    # Before Sphinx copies what is to be downloaded.
    app.connect("doctree-read", lead_to_pages, priority=400)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
