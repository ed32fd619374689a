"""What holds of the CUDA kernels on any machine: their code, run thread by thread on the host, and
what the compiler made of it, where they are part of the build."""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import (
    CELL,
    CXX,
    LAYOUTS,
    ROOT,
    SEQUENCE_CASES,
    assert_sequences_match,
    backward_inputs,
    cell_inputs,
    double,
    each_dtype,
    each_sequence_kind,
    each_shape,
    load_beside_library,
    offset,
    printed,
    sample_inputs,
    sequence_backward_inputs,
    sequence_inputs,
)
from torch.utils.cpp_extension import CUDA_HOME, include_paths

import lltm_ops
from lltm_ops._find_library import find_library

# The tests share what they compile.
pytestmark = pytest.mark.xdist_group("cuda_on_host")


@pytest.fixture(scope="module")
def on_host():
    load_beside_library(
        "lltm_cuda_on_host", "cuda/cuda_on_host.cpp", "cuda/recurrence/emulator.cpp"
    )
    return torch.ops.lltm_on_host


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (0, 5), (3, 256), (2, 257), (70_001, 3), (65_535, 1), (1, 65_535 * 256 + 300)],
)
def test_the_grid_comes_by_each_element_once(on_host, rows, columns):
    assert (on_host.visits(rows, columns) == 1).all()


def test_indices_have_64_bits(on_host):
    """Those of the recurrence: test_cuda_recurrence.py."""
    on_host.run_far_row()


def test_device_branches_of_the_gates_match_double(tmp_path):
    """Compiled for the host, where division and exp err by up to 2 ulp, as on a GPU."""
    program = tmp_path / "device_gates"
    command = [CXX, "-std=c++20", "-O1", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    command += [f"-isystem{path}" for path in include_paths()]
    printed(*command, ROOT / "tests" / "cuda" / "device_gates.cpp", "-o", program)
    printed(program)


def test_rows_that_a_step_has_not_are_not_reset(on_host):
    resets = torch.ones(2, dtype=torch.bool)
    assert [on_host.is_reset(resets, 1, row) for row in (0, 1)] == [True, False]


@each_dtype
@each_shape
def test_forward(on_host, dtype, shape):
    inputs = cell_inputs(dtype=dtype, shape=shape)
    expected = torch.ops.lltm._forward_with_gates(*double(inputs))
    CELL.assert_match(on_host.forward(*inputs)[:2], expected[:2], dtype)
    CELL.assert_match(on_host.forward_with_gates(*inputs), expected, dtype)


@each_dtype
@each_shape
def test_backward(on_host, dtype, shape):
    inputs = backward_inputs(dtype=dtype, shape=shape)
    expected = torch.ops.lltm.backward(*double(inputs))
    CELL.assert_match(on_host.backward(*inputs), expected, dtype)
    check_masks(on_host.backward, inputs)


def check_masks(backward, inputs):
    """The gradients that are wanted are those that all together give."""
    every = backward(*inputs)
    for mask in itertools.product([False, True], repeat=5):
        for ours, one, wanted in zip(backward(*inputs, mask), every, mask, strict=True):
            assert torch.equal(ours, one) if wanted else ours is None


def recurrence_is_off(on_host):
    on_host.pretend(0, 0, 0, 1, 0)


def recurrence_is_on(
    on_host, *, processors=10_000, kilobytes=227, accepted=1000, least_tiles=1, answers=1000
):
    """From now on the host is such a GPU, and has counted nothing yet."""
    on_host.pretend(processors, kilobytes * 1024, accepted, least_tiles, answers)


each_switch = pytest.mark.parametrize(
    "switch", [recurrence_is_off, recurrence_is_on], ids=lambda switch: switch.__name__
)
SHORT_CASES = [case for case in SEQUENCE_CASES if case[1][0] < 1000]


@pytest.mark.parametrize(("dtype", "shape", "kind"), SHORT_CASES, ids=str)
def test_sequences_step_by_step(on_host, dtype, shape, kind):
    recurrence_is_off(on_host)
    check_sequence(on_host, dtype, shape, kind)
    assert on_host.recurrence_launches() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 3, 32), (6, 3, 5, 64), (4, 11, 0, 96)], ids=str)
@each_sequence_kind
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_sequences_by_the_recurrence(on_host, dtype, shape, kind, tiles):
    recurrence_is_on(on_host, least_tiles=tiles)
    check_sequence(on_host, dtype, shape, kind)
    did_not, ran = on_host.recurrence_launches()
    assert ran >= 3 and did_not == 0


@each_sequence_kind
@pytest.mark.parametrize("limit", ["answers", "accepted"])
@pytest.mark.parametrize("ran", [0, 1])
def test_sequences_of_which_launches_are_refused(on_host, kind, limit, ran):
    """Steps go on one by one, also after launches that were not refused. None is tried again."""
    recurrence_is_on(on_host, **{limit: ran})
    check_sequence(on_host, torch.bfloat16, (6, 3, 5, 64), kind)
    # Forward, which runs in several chunks, forward with gates, and backward are refused once each.
    assert on_host.recurrence_launches() == [3, ran]


REASONS = {
    "": {},
    "the GPU is too small for its batch, or too old": {"processors": 3},
    "cudaErrorUnknown: unknown error": {"answers": 0},
    "cudaErrorNotPermitted: operation not permitted": {"accepted": 0},
}


@pytest.mark.parametrize("sample", [sequence_inputs, sequence_backward_inputs])
@pytest.mark.parametrize("reason", REASONS)
def test_the_first_launch_that_does_not_run_warns(on_host, sample, reason, capfd, recwarn):
    operator = "sequence_forward" if sample is sequence_inputs else "sequence_backward"
    recurrence_is_on(on_host, **REASONS[reason])
    for _ in range(2):
        getattr(on_host, operator)(*sample(dtype=torch.bfloat16, shape=(3, 20, 5, 64)))
    assert sum(on_host.recurrence_launches()) >= 2
    # Torch 2.15 makes these warnings Python's, and older ones print them.
    said = capfd.readouterr().err + "".join(f"Warning: {warning.message}" for warning in recwarn)
    sentence = f"lltm::{operator}: a sequence runs step by step, which is slower than in one kernel"
    assert said.count("Warning: ") == said.count(f"{sentence}: {reason}") == bool(reason)


@pytest.mark.parametrize(
    ("processors", "kilobytes", "tiles"),
    [(132, 227, 1), (12, 227, 1), (11, 227, 2), (7, 227, 4), (132, 99, 1), (8, 99, 2)],
)
def test_the_grid_of_the_recurrence(on_host, processors, kilobytes, tiles):
    """The fewest tiles with which all blocks run at once: more blocks then share the work."""
    recurrence_is_on(on_host, processors=processors, kilobytes=kilobytes)
    batch, units = 20, 64
    inputs = sequence_backward_inputs(dtype=torch.bfloat16, shape=(3, batch, 5, units))
    on_host.sequence_backward(*inputs, [False] * 5)
    (backward,) = on_host.launches()
    forward_inputs = sequence_inputs(dtype=torch.bfloat16, shape=(3, batch, 5, units))
    on_host.sequence_forward_with_gates(*forward_inputs)
    forward = on_host.launches()[-1]
    blocks = -(-batch // (8 * tiles)) * units // 16
    # A block keeps the sums of two steps. Each of its 8 warps has 16 units for each tile, and a
    # unit takes 10 numbers.
    sums = 2 * tiles * 8 * 16 * 10 * 4
    assert backward[:2] == [blocks, sums]
    assert forward[:2] == [blocks, 3 * sums]


@each_switch
def test_everything_runs_on_the_current_stream(on_host, switch):
    switch(on_host)
    on_host.forward(*sample_inputs())
    on_host.backward(*backward_inputs())
    shape = (6, 3, 5, 64)
    on_host.sequence_forward(*sequence_inputs(dtype=torch.bfloat16, shape=shape))
    on_host.sequence_backward(*sequence_backward_inputs(dtype=torch.bfloat16, shape=shape))
    launches = on_host.launches()
    assert len(launches) > 4
    assert {stream for *_, stream in launches} == {7}


HALF = torch.bfloat16
# The dtype, the shape, whether it is packed, and the GPU where that is what it does not fit.
NOT_TAKEN = {
    "too few steps": (HALF, (2, 3, 5, 32), "padded"),
    "another dtype": (torch.float32, (3, 3, 5, 32), "padded"),
    "too many units": (HALF, (3, 1, 2, 1056), "padded"),
    "units that do not fill a block of columns": (HALF, (3, 3, 5, 48), "padded"),
    "too many rows of a packed batch": (HALF, (3, 897, 2, 32), "packed"),
    # In an older GPU the four tiles of forward do not fit. Others use a part of this one.
    "too small an older GPU": (HALF, (3, 20, 5, 64), "padded", {"processors": 7, "kilobytes": 99}),
    "too few processors": (HALF, (3, 20, 5, 64), "padded", {"processors": 3}),
}


@pytest.mark.parametrize("reason", NOT_TAKEN)
def test_sequences_that_the_recurrence_does_not_take(on_host, reason):
    dtype, shape, form, *of_gpu = NOT_TAKEN[reason]
    recurrence_is_on(on_host, **dict(*of_gpu))
    check_sequence(on_host, dtype, shape, (form, False, False))
    did_not, ran = on_host.recurrence_launches()
    assert ran == (reason == "too small an older GPU")  # backward needs less memory
    assert (did_not > 0) == bool(of_gpu)


# The largest. Only with the last does a warp have four blocks of columns.
@pytest.mark.parametrize(
    ("rows", "units", "form"), [(896, 32, "packed"), (897, 32, "padded"), (1, 1024, "padded")]
)
def test_sequences_that_the_recurrence_just_takes(on_host, rows, units, form):
    recurrence_is_on(on_host)
    check_sequence(on_host, HALF, (3, rows, 2, units), (form, False, False))
    assert on_host.recurrence_launches()[1] > 0


@each_switch
@each_sequence_kind
@pytest.mark.parametrize("missing", range(4))
def test_missing_gradients_are_zeros(on_host, switch, kind, missing):
    inputs = sequence_backward_inputs(dtype=torch.bfloat16, shape=(4, 3, 5, 32), kind=kind)
    inputs[missing] = torch.zeros_like(inputs[missing])
    switch(on_host)
    expected = on_host.sequence_backward(*inputs)
    inputs[missing] = None
    for ours, zeros in zip(on_host.sequence_backward(*inputs), expected, strict=True):
        assert torch.equal(ours, zeros)


@pytest.mark.parametrize("missing", range(2))
def test_missing_gradients_of_a_step_are_zeros(on_host, missing):
    inputs = backward_inputs(dtype=torch.bfloat16)
    inputs[missing] = torch.zeros_like(inputs[missing])
    expected = on_host.backward(*inputs)
    inputs[missing] = None
    for ours, zeros in zip(on_host.backward(*inputs), expected, strict=True):
        assert torch.equal(ours, zeros)


def laid_out(inputs, layout):
    """All tensors but batch_sizes, which the last but two is."""
    kept = len(inputs) - 3
    return [
        LAYOUTS[layout](each) if isinstance(each, torch.Tensor) and i != kept else each
        for i, each in enumerate(inputs)
    ]


def check_sequence(on_host, dtype, shape, kind, layout="contiguous"):
    inputs = sequence_inputs(dtype=dtype, shape=shape, kind=kind)
    expected = torch.ops.lltm._sequence_forward_with_gates(*double(inputs))
    inputs = laid_out(inputs, layout)
    assert_sequences_match(on_host.sequence_forward(*inputs)[:-1], expected[:-1], dtype)
    assert_sequences_match(on_host.sequence_forward_with_gates(*inputs), expected, dtype)
    inputs = sequence_backward_inputs(dtype=dtype, shape=shape, kind=kind)
    expected = torch.ops.lltm.sequence_backward(*double(inputs))
    inputs = laid_out(inputs, layout)
    assert_sequences_match(on_host.sequence_backward(*inputs), expected, dtype)


@pytest.mark.parametrize("layout", ["offset", "transposed", "strided"])
@each_switch
@each_sequence_kind
def test_sequences_take_any_strides(on_host, layout, switch, kind):
    switch(on_host)
    check_sequence(on_host, torch.bfloat16, (4, 3, 5, 32), kind, layout)


@pytest.mark.parametrize("elements", [1, 2, 4])
def test_h0_may_begin_anywhere(on_host, elements):
    """The recurrence reads 16 bytes at once, which the emulator refuses at another address."""
    inputs = sequence_inputs(dtype=torch.bfloat16, shape=(4, 3, 5, 32))
    expected = torch.ops.lltm.sequence_forward(*double(inputs))
    recurrence_is_on(on_host)
    inputs[3] = offset(inputs[3], elements)
    assert_sequences_match(on_host.sequence_forward(*inputs)[:-1], expected, torch.bfloat16)
    assert on_host.recurrence_launches() == [0, 1]


@pytest.mark.parametrize(
    ("steps", "features", "units", "copies"),
    [(3, 5, 64, True), (1, 5, 64, False), (3, 8, 64, False), (3, 5, 33, False)],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_products_read_rows_that_begin_at_16_bytes(
    on_host, steps, features, units, copies, backward
):
    """A copy, made once, if it helps: the rows of weights may be as long, or too few read them."""
    make_inputs = sequence_backward_inputs if backward else sequence_inputs
    inputs = make_inputs(dtype=torch.bfloat16, shape=(steps, 2, features, units))
    weights = next(tensor for tensor in inputs if tensor.shape == (3 * units, units + features))
    recurrence_is_off(on_host)
    (on_host.sequence_backward if backward else on_host.sequence_forward)(*inputs)
    products = on_host.products()
    assert len(products) == steps
    ((address, stride),) = {tuple(product) for product in products}
    assert stride == (units if copies else units + features)
    assert (address != weights.data_ptr()) == copies


@each_switch
def test_gradients_of_a_sequence_that_are_wanted(on_host, switch):
    inputs = sequence_backward_inputs(dtype=torch.bfloat16, shape=(3, 3, 5, 32))
    switch(on_host)
    check_masks(on_host.sequence_backward, inputs)


def test_the_cell_state_of_a_sequence_is_not_rounded(on_host):
    """What is added to it is a 512th of it, which bfloat16 cannot hold."""
    steps, size = 64, 32
    weights = torch.zeros(3 * size, 2 * size, dtype=torch.bfloat16)
    bias = torch.tensor([100.0, 0.0, 2.0**-9]).repeat_interleave(size).bfloat16()
    input = torch.zeros(steps, 1, size, dtype=torch.bfloat16)
    h0, c0 = torch.zeros(1, size).bfloat16(), torch.ones(1, size).bfloat16()
    for switch in (recurrence_is_off, recurrence_is_on):
        switch(on_host)
        c_n = on_host.sequence_forward(input, weights, bias, h0, c0)[3]
        assert c_n.unique().item() == 1 + steps * 2.0**-9


CALLS = """
import sys
import torch
from common import composite, sample_inputs
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    for device in sys.argv[1:]:
        arguments = [torch.empty(tensor.shape, device=device) for tensor in sample_inputs()]
        composite(torch.ops.lltm.forward)(*arguments)
"""


@pytest.mark.skipif(lltm_ops.build_info()["cuda"] != "not built", reason="built with CUDA")
@pytest.mark.parametrize(("devices", "warnings"), [(["cpu"], 0), (["cuda", "cuda"], 1)], ids=str)
def test_one_warning_says_that_there_are_no_cuda_kernels(devices, warnings):
    command = [sys.executable, "-c", CALLS, *devices]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests" / "support")
    assert result.returncode == 0, result.stderr
    sentence = (
        "lltm: expected a library with CUDA kernels, but this one was built without, so calls on a "
        "GPU are slow; build it again with CUDA_HOME set"
    )
    assert result.stderr.count(sentence) == warnings


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


def compile_for_a_gpu(*arguments: str | Path) -> None:
    """The options are those of benchmarks/gpu.py."""
    command = [f"{CUDA_HOME}/bin/nvcc", "-std=c++20", "-arch=sm_90", "-Werror", "all-warnings"]
    command += ["--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}", "-x", "cu"]
    command += [f"-isystem={path}" for path in include_paths()]
    subprocess.run([*command, *arguments], check=True)


@needs_cuda_build
def test_the_program_for_a_gpu_compiles(tmp_path):
    program = tmp_path / "check"
    kernel = ROOT / "csrc" / "cuda" / "recurrence" / "lltm_recurrence_kernel.cu"
    compile_for_a_gpu("-o", program, ROOT / "tests/cuda/recurrence/check.cpp", kernel)
    assert program.exists()


def dump(option: str, file: Path) -> str:
    """What cuobjdump says of a file."""
    tool = cuobjdump()
    assert tool is not None, "neither the CUDA toolkit nor Triton has cuobjdump"
    return printed(tool, option, file)


def dumped(option: str) -> dict[str, str]:
    """What cuobjdump says of the library, by architecture."""
    found = {}
    for part in dump(option, find_library()).split("Fatbin elf code:")[1:]:
        architecture = re.search(r"arch = sm_(\d+)", part)[1]
        found[architecture] = found.get(architecture, "") + part
    architectures = lltm_ops.build_info()["cuda_architectures"]
    assert set(found) == set(re.findall(r"\d+", architectures.replace(".", "")))
    return found


# So many instances of each kernel: of dtypes, with gates or without, of 1, 2 and 4 tiles.
KERNELS = {
    "11ForwardUnit": 8,
    "19SequenceForwardUnit": 8,
    "12BackwardUnit": 4,
    "20SequenceBackwardUnit": 4,
    "21forward_kernel_device": 6,
    "22backward_kernel_device": 6,
}


@needs_cuda_build
def test_kernels_use_no_local_memory():
    """No spilled registers and no arrays: then 256 threads of a block always fit."""
    for part in dumped("--dump-resource-usage").values():
        usage = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) .*LOCAL:(\d+)", part)
        counts = {kernel: sum(kernel in name for name, *_ in usage) for kernel in KERNELS}
        assert counts == KERNELS
        assert [row for row in usage if row[1:] != ("0", "0")] == []


@needs_cuda_build
def test_instructions_of_the_recurrence():
    """Tensor cores, one barrier a step, and what blocks exchange goes past the first cache."""
    for sass in dumped("-sass").values():
        kernels = [text for text in sass.split("Function : ")[1:] if "recurrence" in text[:200]]
        assert len(kernels) == 12
        for text in kernels:
            check_instructions(text)


def check_instructions(text: str) -> None:
    # Four blocks of columns of three gates, of two products each, for each tile.
    tiles = int(re.search(r"kernel_deviceILi(\d)E", text)[1])
    dtype = ".BF16" if "BFloat16" in text[:200] else ""
    assert text.count(f"HMMA.16816.F32{dtype} ") == 24 * tiles
    # Two units, of neighbouring lanes, are one word.
    assert set(re.findall(r"SHFL\.BFLY.*, (0x\w+), 0x1f", text)) == {"0x1"}
    # What a step reads and writes, of each gate and each other tensor one line: forward h and
    # the gates; backward cells, two gradients, the gates and theirs.
    lines = 3 + 2 * 3 if "backward_kernel" in text[:200] else 1 + 3
    assert text.count("CCTL.E.PF2") == lines * ((tiles + 1) // 2)
    assert text.count("BAR.SYNC") == 1
    assert "CALL.ABS.NOINC" in text  # the assertion that ends a wait in vain
    looks = re.findall(r"LDG\.E\.128\S*", text)
    assert looks and all("STRONG.GPU" in look for look in looks)
    assert "STG.E.STRONG.GPU" in text
