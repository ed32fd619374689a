"""Starts a package of operators: copies the one of the book's last chapter under another name.

`make new NAME=my_ops OUTPUT=../my_ops` runs this. docs/start_your_own.md says which ABI to choose,
and what to change then.
"""

import argparse
import ctypes
import importlib.util
import json
import keyword
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What both packages have, and a folder for each ABI.
TEMPLATE = ROOT / "examples" / "book" / "11_package"
TEMPLATE_NAME = "my_ops"
TEMPLATE_AUTHOR = '"Your Name"'

CPP_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
char8_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
constinit continue decltype default delete do double dynamic_cast else enum explicit export extern
false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr
operator or or_eq private protected public register reinterpret_cast requires return short signed
sizeof static static_assert static_cast struct switch template this thread_local throw true try
typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
# What torch calls operators or attributes of torch.ops, the namespaces of C++ that the sources
# need, and this project.
TAKEN = """
aten at c10 c10d c10d_functional caffe2 debug_mode_ops debugprims export flex_lib fsdp higher_order
import_module inductor inductor_prims lltm lltm_ops load_library loaded_libraries mkl mkldnn
mkldnn_prepacked name onednn onnx onnx_symbolic prepacked prim prims profiler quantization quantized
quantized_decomposed rngprims sparse static_runtime std streams symm_mem torch
"""
# In lower case, as some file systems see them.
FOLDERS = ("build", "csrc", "dist", "tests")


def module_elsewhere(name: str) -> bool:
    """Whether `import name` finds something that is no file of this project."""
    if name in sys.stdlib_module_names:
        return True
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
    if keyword.iskeyword(name):
        return "it is a keyword of Python"
    if name in CPP_KEYWORDS.split():
        return "it is a keyword of C++"
    if name in TAKEN.split():
        return "torch or this project uses it"
    if name.lower() in FOLDERS:
        return "a folder of the package has it"
    if module_elsewhere(name):
        return "Python has a module of that name"
    if name.endswith("_t") or name.isupper() or name.startswith("Py_"):
        return "C and torch keep such names for types and macros"
    # Such a function would be next to the namespace.
    if hasattr(ctypes.CDLL(None), name):
        return "C has a function of that name"
    return None


def template_files(abi: str) -> dict[Path, Path]:
    """Maps each file of the package to the template's, but for what a build has left there."""
    lines = (TEMPLATE / "both" / ".gitignore").read_text().split()
    ignored = [pattern.strip("/") for pattern in lines]
    return {
        path.relative_to(folder): path
        for folder in (TEMPLATE / "both", TEMPLATE / f"{abi}_abi")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(
            fnmatch(part, pattern) for part in path.relative_to(folder).parts for pattern in ignored
        )
    }


def author() -> str | None:
    """The name that git signs commits with everywhere, or what is typed; None if there is neither.

    The configuration of this checkout may name an author of this project.
    """
    command = ["git", "config", "--global", "user.name"]
    try:
        name = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        name = ""
    if not name and sys.stdin.isatty():
        print("The author of the package: ", end="", flush=True)
        name = sys.stdin.readline().strip()
    return name or None


def write(name: str, output: Path, abi: str, signed: str | None) -> None:
    """Writes the package of that name into a folder, which is new or empty."""
    for file, source in template_files(abi).items():
        text = source.read_text("utf-8").replace(TEMPLATE_NAME, name)
        if signed is not None:
            text = text.replace(TEMPLATE_AUTHOR, json.dumps(signed, ensure_ascii=False))
        target = output / str(file).replace(TEMPLATE_NAME, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")


def create(name: str, output: Path, abi: str = "stable", signed: str | None = None) -> None:
    """Makes the folder and writes the package, or leaves everything as it was.

    Raises:
        ValueError: if the folder is not empty, or cannot be built in.
        OSError: if it cannot be written.
    """
    if re.search(r"[$:\n]", str(output)):
        raise ValueError("ninja builds in no path with $, : or the end of a line")
    existed = output.is_dir()
    if existed and any(output.iterdir()):
        raise ValueError("expected a new or an empty folder")
    output.mkdir(exist_ok=existed)
    try:
        write(name, output, abi, signed)
    except BaseException:
        shutil.rmtree(output)
        if existed:
            output.mkdir()
        raise


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="", help="of package and namespace")
    parser.add_argument("--output", default="", help="a new folder; ../NAME unless given")
    parser.add_argument("--abi", default="", help="stable, for every torch, unless given; or torch")
    parser.add_argument("--author", default="", help="git's user.name, or asked for, unless given")
    options = parser.parse_args(arguments)
    name = options.name
    if not name:
        parser.exit(2, "error: NAME is missing: make new NAME=my_ops OUTPUT=../my_ops\n")
    if reason := why_not(name):
        parser.exit(2, f"error: NAME={name} cannot be the name of a package: {reason}\n")
    abi = options.abi or "stable"
    if abi not in ("stable", "torch"):
        parser.exit(2, f"error: ABI={abi} is unknown: expected stable or torch\n")
    given = options.output or f"../{name}"
    try:
        output = Path(given).expanduser().resolve()
        signed = options.author or author()
        create(name, output, abi, signed)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        parser.exit(2, f"error: OUTPUT={given} cannot be written: {reason}\n")
    print(
        f"The package {name} is in {given}. Activate an environment with torch, setuptools, wheel, "
        "ninja and pytest (this checkout's, after make test: . .venv/bin/activate), and go on "
        "with:\n\n"
        f"  cd {shlex.quote(given)}\n"
        "  python -m pip install --no-build-isolation -e .\n"
        "  python -m pytest\n\n"
        "docs/start_your_own.md says what to change first."
    )
    if signed is None:
        print("No author was found: replace Your Name in pyproject.toml.")


if __name__ == "__main__":
    main()
