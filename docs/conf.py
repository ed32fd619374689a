"""Sphinx makes the site of these pages: make docs."""

import re

import torch

import lltm_ops

project = "lltm_ops"
version = release = lltm_ops.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Headings get the anchors that GitHub gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["substitution"]


def schemas() -> str:
    """The schemas that the library registers, an argument a line."""
    found = [str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("lltm::")]
    found.sort(key=lambda schema: (schema.startswith("lltm::_"), schema))
    # A comma inside of a default is followed by no type and name.
    return "\n\n".join(re.sub(r", (?=\S+ \w)", ",\n    ", schema) for schema in found)


myst_substitutions = {"schemas": f"```text\n{schemas()}\n```"}

# lltm_ops.onnx needs a large package, its docstrings do not.
autodoc_mock_imports = ["onnxscript"]
# Else LLTM.forward would have the text of nn.Module.forward.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
# The site does not link to other sites for names that are not ours.
nitpick_ignore_regex = [(r"py:.*", r"(?!lltm_ops).*")]

html_theme = "furo"
html_title = f"lltm_ops {version}"
html_copy_source = False
html_use_index = False
html_show_copyright = False
# Lines of 100 columns fit without scrolling.
html_theme_options = {"light_css_variables": {"code-font-size": "75%"}}
