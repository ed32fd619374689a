"""The documentation builds as a site, without a warning, and nothing is missing from it."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import lltm_ops

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. Links between pages are checked while it is built."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, folder], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_every_page_is_there(site):
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).exists(), page


def test_reference_has_every_public_name(site):
    page = (site / "reference" / "python.html").read_text()
    for name in lltm_ops.__all__:
        assert f'id="lltm_ops.{name}"' in page, name


def test_schemas_are_those_of_the_library(site):
    page = re.sub(r"<[^>]+>", "", (site / "reference" / "schemas.html").read_text())
    for name in ("forward", "backward", "sequence_forward", "sequence_backward"):
        assert f"lltm::{name}(" in page


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.targets, self.anchors = [], set()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id"))
        self.targets += [attributes[key] for key in ("href", "src") if attributes.get(key)]


def test_every_link_leads_somewhere(site):
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = Links()
        pages[path].feed(path.read_text())
    for path, links in pages.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert file.exists(), (path.name, target)
            if url.fragment and file in pages:
                assert unquote(url.fragment) in pages[file].anchors, (path.name, target)
