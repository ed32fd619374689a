"""The documentation builds as a site, without a warning, and nothing is missing from it."""

import re
import sys
from html import unescape

import pytest
import torch
from common import ROOT, printed

import lltm_ops

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")
# The tests share the site.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. Links between pages are checked while it is built."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    printed(sys.executable, "-m", "sphinx", *options, DOCS, folder)
    return folder


def test_every_page_is_there(site):
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).exists(), page


def test_reference_has_every_public_name(site):
    page = (site / "reference" / "python.html").read_text()
    for name in lltm_ops.__all__:
        assert f'id="lltm_ops.{name}"' in page, name


def test_schemas_are_those_of_the_library(site):
    page = without_tags(site / "reference" / "schemas.html")
    schemas = [str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("lltm::")]
    assert len(schemas) >= 7
    for schema in schemas:
        assert schema.replace(" ", "") in re.sub(r"\s", "", page)


def without_tags(page):
    return unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_link_to_a_file_leads_to_a_page_that_shows_it(site):
    assert 'href="source/csrc/ops/library.cpp.html"' in (site / "architecture.html").read_text()
    assert "TORCH_LIBRARY(lltm, m)" in without_tags(site / "source/csrc/ops/library.cpp.html")


def test_link_to_figures_leads_to_a_table(site):
    target = "source/docs/benchmarks/zen4/cell.csv.html"
    assert f'href="../../{target}"' in (site / "benchmarks/zen4/README.html").read_text()
    page = (site / target).read_text()
    assert "<th>lltm_ops</th>" in page and "<td>16x32x128</td>" in page
