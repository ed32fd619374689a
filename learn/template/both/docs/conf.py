project = "my_ops"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
