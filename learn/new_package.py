"""Starts a package of operators: copies the one in template/ under another name.

start_your_own.md says which ABI to choose, and what to change then; release_your_own.md has the
other choices.
"""

import argparse
import importlib.util
import json
import keyword
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

LEARN = Path(__file__).resolve().parent
ROOT = LEARN.parent
# What all packages have is in both, and a folder for each choice has the rest.
TEMPLATE = LEARN / "template"
TEMPLATE_NAME = "my_ops"
TEMPLATE_AUTHOR = '"Your Name"'
# The first of each is the default.
CHOICES = {
    "abi": ["stable", "torch"],
    "build": ["setuptools", "cmake"],
    "kernel": ["cuda", "triton"],
}
# What a choice changes in texts that are not its own.
CHANGES = {
    "torch": {r'register\("(\w+)_forward"': r'register("\1"'},
    "cmake": {
        r"setuptools(,?) wheel": r"scikit-build-core\1 cmake",
        "after make test": "after make test and pip install scikit-build-core",
    },
    "triton": {
        '"numpy"': """"numpy", "triton; sys_platform == 'linux'\"""",
        r" \(and a CUDA toolkit, if the GPU is to be used\)": "",
    },
}

# What torch calls operators or attributes of torch.ops, the namespaces of C++ that the sources
# need, this project, and, in lower case, as some file systems see them, the package's folders.
TAKEN = """
aten at c10 c10d c10d_functional caffe2 debug_mode_ops debugprims export flex_lib fsdp higher_order
import_module inductor inductor_prims lltm lltm_ops load_library loaded_libraries mkl mkldnn
mkldnn_prepacked name onednn onnx onnx_symbolic prepacked prim prims profiler quantization quantized
quantized_decomposed rngprims sparse static_runtime std streams symm_mem torch
build csrc dist docs tests
"""


def is_namespace(name: str) -> bool:
    """Whether C++ takes it: keywords, types, macros and functions of C are none. True if there is
    no compiler yet to ask."""
    headers = "".join(f"#include <{header}>\n" for header in ("cmath", "cstdint", "cstdlib"))
    compiler = os.environ.get("CXX") or "c++"
    try:
        asked = subprocess.run(
            [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
            input=f"{headers}namespace {name} {{}}\n", capture_output=True, text=True,
        )  # fmt: skip
    except OSError:
        return True
    return asked.returncode == 0


def is_elsewhere(name: str) -> bool:
    """Whether `import name` finds something that is no file of this project."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return False
    places = [spec.origin, *(spec.submodule_search_locations or [])]
    # An environment may lie inside of the checkout.
    return any(
        "site-packages" in place or not Path(place).is_relative_to(ROOT)
        for place in filter(None, places)
    )


def why_not(name: str) -> str | None:
    """Why a package of Python and a namespace of C++ cannot have that name; None if they can."""
    if not re.fullmatch(r"[A-Za-z](_?[A-Za-z0-9])*", name):
        return "expected letters, digits and single underscores between them, and a letter first"
    if name.lower() in TAKEN.split():
        return "torch, this project or a folder of the package uses it"
    if keyword.iskeyword(name) or name in sys.stdlib_module_names or is_elsewhere(name):
        return "Python or a package that is installed uses it"
    return None if is_namespace(name) else "C or C++ uses it"


def author() -> str | None:
    """The name that git signs commits with everywhere, if it has one.

    The configuration of this checkout may name an author of this project.
    """
    command = ["git", "config", "--global", "user.name"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def join(source: str, target: str) -> None:
    """Copies a file, or adds it to one of that name from another folder."""
    text = Path(source).read_text("utf-8")
    path = Path(target)
    if path.exists():
        gap = "\n\n" if path.suffix == ".py" else "\n"
        text = path.read_text("utf-8") + gap + text
    path.write_text(text, "utf-8")


def changed(text: str, *choices: str) -> str:
    for choice in choices:
        for old, new in CHANGES.get(choice, {}).items():
            text = re.sub(old, new, text)
    return text


def create(
    name: str,
    output: Path,
    abi: str = "stable",
    build: str = "setuptools",
    kernel: str = "cuda",
    signed: str | None = None,
) -> None:
    """Writes the package of that name into a folder, which is new or empty.

    Raises:
        ValueError: if the folder is not empty, or cannot be built in.
        OSError: if it cannot be written.
    """
    if re.search(r"[$:\n]", str(output)):
        raise ValueError("ninja builds in no path with $, : or the end of a line")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError("expected a new or an empty folder")
    # What a build has left there, and kernels in CUDA unless they are wanted.
    patterns = (TEMPLATE / "both" / ".gitignore").read_text().replace("/", "").split()
    ignored = shutil.ignore_patterns(*patterns, *["cuda"] * (kernel != "cuda"))
    for choice in (f"{build}_build", ".", f"{kernel}_kernel"):
        for folder in (TEMPLATE / choice / "both", TEMPLATE / choice / f"{abi}_abi"):
            if folder.is_dir():
                shutil.copytree(
                    folder, output, ignore=ignored, copy_function=join, dirs_exist_ok=True
                )
    (output / TEMPLATE_NAME).rename(output / name)
    for path in filter(Path.is_file, output.rglob("*")):
        text = changed(path.read_text("utf-8").replace(TEMPLATE_NAME, name), abi, build, kernel)
        if signed is not None:
            text = text.replace(TEMPLATE_AUTHOR, json.dumps(signed, ensure_ascii=False))
        path.write_text(text, "utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="of package and namespace")
    parser.add_argument("--output", help="a new folder; ../NAME unless given")
    for choice, values in CHOICES.items():
        parser.add_argument(f"--{choice}", choices=values, default=values[0])
    parser.add_argument("--author", help="git's user.name unless given")
    options = parser.parse_args(arguments)
    name = options.name
    if reason := why_not(name):
        parser.error(f"--name={name} cannot be the name of a package: {reason}")
    given = options.output or f"../{name}"
    output = Path(given).expanduser().resolve()
    signed = options.author or author()
    try:
        create(name, output, options.abi, options.build, options.kernel, signed)
    except (OSError, ValueError) as error:
        parser.error(f"--output={given} cannot be written: {error}")
    if shutil.which("git"):
        subprocess.run(["git", "init", "--quiet", output], check=True)
    said = (
        f"The package {name} is in {given}. Activate an environment with torch, setuptools, wheel, "
        "ninja and pytest (this checkout's, after make test: . .venv/bin/activate), and go on "
        "with:\n\n"
        f"  cd {shlex.quote(given)}\n"
        "  python -m pip install --no-build-isolation -e .\n"
        "  python -m pytest\n\n"
        "learn/start_your_own.md says what to change first."
    )
    print(changed(said, options.build))
    if signed is None:
        print("No author was found: replace Your Name in pyproject.toml.")


if __name__ == "__main__":
    main()
