"""What the errors of a build look like."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("folders", "header"), [([], "torch/extension.h"), (include_paths(), "Python.h")]
)
def test_missing_header(folders, header):
    command = ["c++", "-fsyntax-only", "lltm.cpp", *(f"-I{path}" for path in folders)]
    result = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    assert f"fatal error: {header}: No such file or directory" in result.stderr


CALL = "void kernel(); void call() { kernel(); }"
CHECK = """
#include <c10/util/Exception.h>
void check(const std::string& what) { TORCH_CHECK(what.empty(), what); }
"""


@pytest.mark.parametrize(
    ("source", "abi", "first", "message"),
    [
        (CALL, 1, "import torch", "undefined symbol: _Z6kernelv"),
        (CHECK, 0, "import torch", "undefined symbol: _ZN3c106detail14torchCheckFail"),
        (CHECK, 1, "", "libc10.so: cannot open shared object file: No such file or directory"),
        (CHECK, 1, "import torch", None),
    ],
    ids=["a source was forgotten", "the other ABI", "torch was not imported", "all is well"],
)
def test_loading(source, abi, first, message, tmp_path):
    (tmp_path / "code.cpp").write_text(source)
    options = [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-std=c++20", "-shared", "-fPIC", "-o", "code.so"]
    options += [f"-I{path}" for path in include_paths()]
    options += [f"-L{path}" for path in library_paths()]
    subprocess.run(["c++", "code.cpp", *options, "-lc10"], cwd=tmp_path, check=True)
    load = f"{first}\nimport ctypes, os\nctypes.CDLL('./code.so', os.RTLD_NOW)"
    result = subprocess.run(
        [sys.executable, "-c", load], cwd=tmp_path, capture_output=True, text=True
    )
    assert (message in result.stderr) if message else result.returncode == 0
