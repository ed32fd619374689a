"""pyproject.toml takes the version of torch from here."""

import runpy


def dynamic_metadata(settings, project):
    library = runpy.run_path("my_ops/_library.py")
    return {"dependencies": [f"torch=={library['TORCH_MINOR']}.*"]}
