"""Sphinx makes the site of these pages: make docs."""

import lltm_ops

project = "lltm_ops"
version = release = lltm_ops.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Headings get the anchors that GitHub gives them.
myst_heading_anchors = 4
# Pages link to what is none of the site, too. test_docs.py checks that every link leads somewhere.
suppress_warnings = ["myst.xref_missing"]


# lltm_ops.onnx needs a large package, its docstrings do not.
autodoc_mock_imports = ["onnxscript"]
# Inherited, LLTM.forward would have the text of nn.Module.forward.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
# "Returns:" names the results, their types are in the signature.
napoleon_use_rtype = False
# An argument a line.
maximum_signature_line_length = 80
# The site does not link to other sites for names that are not ours.
nitpick_ignore_regex = [(r"py:.*", r"(?!lltm_ops).*")]

html_theme = "furo"
html_title = f"lltm_ops {version}"
html_copy_source = False
html_use_index = False
html_show_copyright = False
# Lines of 100 columns fit without scrolling.
html_theme_options = {"light_css_variables": {"code-font-size": "75%"}}
