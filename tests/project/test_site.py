"""The documentation builds as a site, without a warning, and nothing is missing from it."""

import sys

import pytest
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
    """The folder of the site."""
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
