"""Starts a package of operators, or adds an operator to it: copies what is in template/ under other
names.

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
import tempfile
from pathlib import Path

LEARN = Path(__file__).resolve().parent
ROOT = LEARN.parent
# What all packages have is in both, and a folder for each choice and each example has the rest.
TEMPLATE = LEARN / "template"
TEMPLATE_NAME = "my_ops"
# Operators to start from, by what is special about them.
EXAMPLES = {
    "masked_softmax": "computes rows, on CPU and GPU",
    "segment_sum": "number and lengths, whose values are checked; CPU, stable ABI",
    "ema_update": "writes into an argument; CPU, stable ABI",
}
TEMPLATE_AUTHOR = "Your Name"
# The first of each is the default.
CHOICES = {
    "abi": ["stable", "torch"],
    "build": ["setuptools", "cmake"],
    "kernel": ["cuda", "triton"],
}
NO_CUDA = {r" \(and a CUDA toolkit, if the GPU is to be used\)": ""}
# What a choice changes in texts that are not its own.
CHANGES = {
    "torch": {r'register\("(\w+)_forward"': r'register("\1"'},
    "cmake": {
        r'"?setuptools(?:>=77")?(,?) wheel': r"scikit-build-core\1 cmake",
        "after make test": "after make test and pip install scikit-build-core",
    },
    "triton": {
        '"numpy"': """"numpy", "triton; sys_platform == 'linux'\"""",
        "ninja and pytest installed:": "ninja, pytest, triton and NumPy installed. Without a GPU, "
        "a test runs the\nkernels in Triton's interpreter:",
        **NO_CUDA,
    },
    "segment_sum": NO_CUDA,
    "ema_update": NO_CUDA,
    # The namespace is taken by the first operator.
    "add": {r"TORCH_LIBRARY\(": "TORCH_LIBRARY_FRAGMENT("},
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


def why_no_operator(name: str, folders: list[Path]) -> str | None:
    """Why an operator cannot have that name; None if it can."""
    if not re.fullmatch(r"[a-z](_?[a-z0-9])*", name):
        return "expected lower case letters, digits and single underscores, and a letter first"
    if keyword.iskeyword(name) or not is_namespace(name):
        return "Python, C or C++ uses it"
    files = (path for folder in folders for path in folder.rglob("*.*"))
    code = [path for path in files if path.suffix in (".py", ".h", ".cpp", ".cu")]
    uses = [path.name for path in code if re.search(rf"\b_?{name}\b", path.read_text("utf-8"))]
    return f"{uses[0]} uses it" if uses else None


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
        if path.suffix == ".h":  # operators share it
            return
        before, kind = path.read_text("utf-8"), text.split()[0]
        goes_on = kind in ("from", "-") and before.splitlines()[-1].startswith(kind)
        is_code = path.suffix == ".py" and kind != "from"
        text = before + ("" if goes_on else "\n\n" if is_code else "\n") + text
    path.write_text(text, "utf-8")


def changed(text: str, *choices: str) -> str:
    for choice in choices:
        for old, new in CHANGES.get(choice, {}).items():
            text = re.sub(old, new, text)
    return text


def renamed(text: str, names: dict[str, str]) -> str:
    """In one go: a new name may have an old one in it."""
    return re.sub("|".join(names), lambda match: names[match[0]], text)


def create(
    name: str,
    output: Path,
    abi: str = "stable",
    build: str = "setuptools",
    kernel: str = "cuda",
    signed: str | None = None,
    like: str = "masked_softmax",
    operator: str | None = None,
) -> None:
    """Writes the package of that name into a folder, which is new or empty.

    If the package is there, it gets the operator as another one.

    Raises:
        ValueError: if the folder has other files, or cannot be built in; or if the operator cannot
            be made.
        OSError: if it cannot be written.
    """
    operator = operator or like
    if re.search(r"[$:\n]", str(output)):
        raise ValueError("ninja builds in no path with $, : or the end of a line")
    adds = (output / name / "_arguments.py").is_file()
    if output.is_dir() and any(output.iterdir()) and not adds:
        raise ValueError(f"expected a new or an empty folder, or {name} with the stable ABI")
    if (output / "csrc" / f"{operator}.cpp").exists():
        raise ValueError(f"the package has an operator {operator}")
    if like != "masked_softmax" and (abi, kernel) != ("stable", "cuda"):
        raise ValueError(f"{like} has the stable ABI, and no kernels for a GPU")
    choices = [like] if adds else [f"{build}_build", ".", like, f"{kernel}_kernel"]
    folders = [TEMPLATE / choice / part for choice in choices for part in ("both", f"{abi}_abi")]
    if operator != like and (reason := why_no_operator(operator, folders)):
        raise ValueError(f"{operator} cannot be the name of an operator: {reason}")
    # What a build has left there, and kernels in CUDA unless they are wanted.
    patterns = (TEMPLATE / "both" / ".gitignore").read_text().replace("/", "").split()
    if kernel != "cuda" or (output / name / "_triton.py").exists():
        patterns.append("cuda")
    names = {
        TEMPLATE_NAME: name,
        "masked_softmax": operator,
        like: operator,
        like.title().replace("_", ""): operator.title().replace("_", ""),
    }
    if signed is not None:
        names[f'"{TEMPLATE_AUTHOR}"'] = json.dumps(signed, ensure_ascii=False)
    with tempfile.TemporaryDirectory() as made:
        for folder in filter(Path.is_dir, folders):
            shutil.copytree(
                folder, made, ignore=shutil.ignore_patterns(*patterns), copy_function=join,
                dirs_exist_ok=True,
            )  # fmt: skip
        for path in filter(Path.is_file, Path(made).rglob("*")):
            text = changed(path.read_text("utf-8"), abi, build, kernel, like, *["add"] * adds)
            path.write_text(renamed(text, names), "utf-8")
            target = output / renamed(str(path.relative_to(made)), names)
            target.parent.mkdir(parents=True, exist_ok=True)
            join(path, target)
    if not adds:
        text = (ROOT / "LICENSE").read_text("utf-8")
        text = re.sub(r"\d+, the lltm_ops authors", lambda _: signed or TEMPLATE_AUTHOR, text)
        (output / "LICENSE").write_text(text, "utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="of package and namespace")
    parser.add_argument("--output", help="a new folder, or the package's; ../NAME unless given")
    parser.add_argument("--operator", help="its name; that of --like unless given")
    examples = "; ".join(f"{name}: {what}" for name, what in EXAMPLES.items())
    parser.add_argument("--like", choices=EXAMPLES, default="masked_softmax", help=examples)
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
    operator = (options.operator or options.like).removesuffix("_")
    is_new = not (output / name).exists()
    try:
        create(
            name, output, options.abi, options.build, options.kernel, signed, options.like, operator
        )
    except (OSError, ValueError) as error:
        parser.error(f"--output={given} cannot be written: {error}")
    if is_new and shutil.which("git"):
        subprocess.run(["git", "init", "--quiet", output], check=True)
    said = (
        f"{operator} of the package {name} is in {given}. Activate an environment with torch, "
        "setuptools, wheel, ninja and pytest (this checkout's, after make test: . "
        ".venv/bin/activate), and go on with:\n\n"
        f"  cd {shlex.quote(given)}\n"
        "  python -m pip install --no-build-isolation -e .\n"
        "  python -m pytest\n\n"
        "learn/start_your_own.md says what to change first."
    )
    print(changed(said, options.build))
    if signed is None:
        print("No author was found: replace Your Name in pyproject.toml and LICENSE.")


if __name__ == "__main__":
    main()
