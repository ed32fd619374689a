"""What holds of the CUDA kernels on any machine: their code, run thread by thread on the host, and
what the compiler made of it, where they are part of the build."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from common import (
    assert_matches_float64,
    backward_inputs,
    double,
    each_dtype,
    each_shape,
    sample_inputs,
)
from torch.utils.cpp_extension import CUDA_HOME, load

import lltm_ops
from lltm_ops import _extension

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    load(
        "lltm_cuda_on_host",
        [str(ROOT / "tests" / "cuda_on_host.cpp")],
        extra_include_paths=[str(ROOT / "csrc")],
        build_directory=str(tmp_path_factory.mktemp("cuda_on_host")),
        is_python_module=False,
    )
    return torch.ops.lltm_on_host


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (0, 5), (3, 256), (2, 257), (70_001, 3), (65_535, 1), (1, 65_535 * 256 + 300)],
)
def test_the_grid_comes_by_each_element_once(on_host, rows, columns):
    assert (on_host.visits(rows, columns) == 1).all()


@each_dtype
@each_shape
@pytest.mark.parametrize("write_gates", [False, True])
def test_forward(on_host, dtype, shape, write_gates):
    inputs = sample_inputs(dtype=dtype, shape=shape)
    exact = torch.ops.lltm._forward_with_gates(*double(inputs))
    input, weights, bias, old_h, old_cell = double(inputs)
    gates = (torch.cat([old_h, input], 1) @ weights.T + bias).to(dtype)
    products = gates.clone()
    new_h, new_cell = on_host.forward(gates, old_cell.to(dtype), write_gates)
    assert_matches_float64(new_h, exact[0])
    assert_matches_float64(new_cell, exact[1])
    if write_gates:
        assert_matches_float64(gates, exact[2])
    else:
        assert torch.equal(gates, products)


@each_dtype
@each_shape
@pytest.mark.parametrize("in_sequence", [False, True])
def test_backward(on_host, dtype, shape, in_sequence):
    grad_h, grad_cell, new_cell, gates, *_ = backward_inputs(dtype=dtype, shape=shape)
    d_h = torch.randn_like(grad_h)
    d_cell = torch.randn_like(grad_cell, dtype=torch.promote_types(dtype, torch.float32))
    total_h, total_cell, cell, activated = double([grad_h, grad_cell, new_cell, gates])
    if in_sequence:
        total_h, total_cell = total_h + d_h.double(), total_cell + d_cell.double()
    else:
        d_cell = torch.empty_like(grad_cell)
    i, o, g = activated.chunk(3, 1)
    t = cell.tanh()
    d_new_cell = total_cell + total_h * o * (1 - t**2)
    expected = [d_new_cell * g * i * (1 - i), total_h * t * o * (1 - o)]
    expected.append(d_new_cell * i * torch.where(g > 0, 1, g + 1))
    d_gates = on_host.backward(grad_h, grad_cell, new_cell, gates, d_h, d_cell, in_sequence)
    assert_matches_float64(d_gates, torch.cat(expected, 1))
    assert_matches_float64(d_cell, d_new_cell)


def cuobjdump() -> str | None:
    """The toolkit's, or the one that torch's Triton carries."""
    places = [Path(CUDA_HOME) / "bin"] if CUDA_HOME else []
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    return shutil.which("cuobjdump", path=os.pathsep.join(map(str, places)))


needs_cuda_build = pytest.mark.skipif(
    lltm_ops.build_info()["cuda"] == "not built", reason="built without CUDA"
)


@needs_cuda_build
def test_the_probes_compile(tmp_path):
    program = tmp_path / "probes"
    source = ROOT / "benchmarks" / "probes.cu"
    command = [f"{CUDA_HOME}/bin/nvcc", "-std=c++17", "-arch=sm_90", "-Werror", "all-warnings"]
    subprocess.run([*command, "-o", program, source], check=True)
    assert program.exists()


@needs_cuda_build
def test_kernels_use_no_local_memory():
    """Neither for spilled registers nor for arrays, in any architecture of the build."""
    tool = cuobjdump()
    assert tool is not None, "neither the CUDA toolkit nor Triton has cuobjdump"
    package = Path(lltm_ops.__file__).parent
    library = next(package.glob(f"{_extension.library_name()}.*so"))
    command = [tool, "--dump-resource-usage", library]
    dumped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    architectures = lltm_ops.build_info()["cuda_architectures"]
    found = {}
    for part in dumped.split("Fatbin elf code:")[1:]:
        architecture = re.search(r"arch = sm_(\d+)", part)[1]
        usage = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) .*LOCAL:(\d+)", part)
        found.setdefault(architecture, []).extend(usage)
    assert set(found) == set(re.findall(r"\d+", architectures.replace(".", "")))
    for usage in found.values():
        names = {name for name, _, _ in usage}
        for unit in ("ForwardUnit", "BackwardUnit"):
            assert len([name for name in names if unit in name]) == 8  # 4 dtypes, 2 kinds
        assert [row for row in usage if row[1:] != ("0", "0")] == []
