"""What every test shares: devices, dtypes, sample inputs, layouts, tolerances, the reference."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import lltm_ops
from lltm_ops._find_library import find_library

ROOT = Path(__file__).resolve().parents[2]
BUILD_EXTENSION = ROOT / "tools" / "build_extension.py"


def names_of(name: str) -> tuple[str, ...]:
    """The arguments of an operator that inputs are made for: all but output_mask."""
    arguments = getattr(torch.ops.lltm, name).default._schema.arguments
    return tuple(a.name for a in arguments if a.name != "output_mask")


ARGUMENTS = names_of("forward")[:5]  # those of sample_inputs
SEQUENCE_ARGUMENTS = names_of("sequence_forward")

# What make hands down to a make that it runs.
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
# Like torch's own tools.
CXX = os.environ.get("CXX") or "c++"
# By the version that torch.jit itself asks for: there, some modules can be scripted, and some not.
HAS_TORCHSCRIPT = sys.version_info < (3, 14)
needs_torchscript = pytest.mark.skipif(
    not HAS_TORCHSCRIPT, reason="TorchScript ends with Python 3.13"
)
# What needs a GPU runs where there is one. conftest.py says what was left out.
needs_cuda = pytest.mark.needs_cuda
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
each_device = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# (batch, input_features, state_size), by what they are in the list for. test_tiles.py has the sizes
# beside those by which the CPU kernels divide; these take its products through each of their paths,
# with values of any kind, and run on all devices.
SHAPES = {
    "ordinary": (3, 5, 4),
    "one of each": (1, 1, 1),
    "no batch": (0, 5, 4),
    "no input": (3, 0, 4),
    "a unit beyond a vector": (2, 3, 17),
    "few rows, two blocks of units and a rest": (5, 33, 259),
    "a whole vector of rows, terms in pairs": (16, 6, 10),
    "a row and a term beyond": (17, 7, 10),
    "rows that nearly fill a vector": (47, 300, 70),
    "four panels of rows and a rest": (300, 8, 178),
    "two chains of terms": (70, 334, 202),
    "two chains of terms, not in pairs": (40, 301, 230),
    "rows of weights of 12 KiB": (20, 3048, 24),
    "one row of many terms": (1, 2600, 17),
    "many rows of few terms": (2100, 3, 8),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)

# The only tolerances, for results of size about 1, relative to the float64 reference on the same
# values. Low precision rounds the gates to 8 (bfloat16) or 11 (float16) bits.
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page of the docs, also of an indented list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), re.M | re.S)
    return [re.sub(f"^{indent}", "", block, flags=re.M) for indent, block in found]


def missing_links(page: Path) -> list[str]:
    """The links of a page to files, or to headings of pages, that are not there."""
    prose = re.sub(r"`[^`\n]+`", "", _without_blocks(page))  # a lambda of C++ looks like a link
    missing = []
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not link.startswith("http") and (
            not target.exists() or (anchor and anchor not in _anchors(target))
        ):
            missing.append(link)
    return missing


def _without_blocks(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)


def _anchors(page: Path) -> set[str]:
    """What GitHub and MyST call the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _without_blocks(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def program(path: Path) -> Any:
    """A file that is no module of a package, as a module of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def message(op: Callable[..., Any], arguments: Sequence[Any], kinds: Any = RuntimeError) -> str:
    with pytest.raises(kinds) as error:
        op(*arguments)
    return str(error.value)


def environment(**more: str) -> dict[str, str]:
    """For a process that finds the package which is tested here."""
    parent = str(Path(lltm_ops.__file__).parent.parent)
    path = os.pathsep.join([parent, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path} | more


def printed(*command: Any, **options: Any) -> str:
    """What a command prints that does not fail."""
    result = subprocess.run(command, capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout[-9000:] + result.stderr[-9000:]
    return result.stdout


def run_python(
    code: str, folder: Path, variables: dict[str, str], executable: Any = sys.executable
) -> tuple[int, str]:
    """The exit status, and what it printed or, if it failed, what it complained of."""
    result = subprocess.run(
        [executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True
    )
    return result.returncode, result.stderr if result.returncode else result.stdout


def load_beside_library(name: str, *sources: str) -> None:
    """Builds sources of tests/ that call functions of the library, and loads what they register.

    The next run of the tests finds what this one has built.
    """
    build_extension = program(BUILD_EXTENSION)
    library = find_library()
    folder = f"-L{library.parent}", f"-Wl,-rpath,{library.parent}"
    build_extension.build_and_load(
        name,
        [str(ROOT / "tests" / source) for source in sources],
        ROOT / "build" / "tests" / library.name / name,
        extra_cflags=[
            build_extension.STANDARD,
            # It finds what it finds in the library, in code for CUDA that is compiled here.
            "-Werror=missing-field-initializers",
            f"-I{ROOT / 'tests'}",
        ],
        extra_ldflags=[*folder, f"-l:{library.name}"],
    )


def composite(op: Any) -> Callable[..., Any]:
    """The formulas by which a device without kernels runs an operator.

    XPU is such a device: its entries in the dispatch table are the composite formulas.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XPU)
    return functools.partial(op.default.redispatch, keys)


def sample_inputs(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (3, 5, 4),
    requires_grad: bool = False,
) -> list[Tensor]:
    """The tensors of lltm::forward, the same values for each device and (rounded) dtype."""
    batch, input_features, state_size = shape
    generator = torch.Generator().manual_seed(0)
    scale = 1 / max(1, state_size + input_features) ** 0.5

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*size, generator=generator, dtype=torch.float64) * scale
        return values.to(device, dtype).requires_grad_(requires_grad)

    return [
        normal(batch, input_features),
        normal(3 * state_size, state_size + input_features, scale=scale),
        normal(3 * state_size),
        normal(batch, state_size),
        normal(batch, state_size),
    ]


# The numbers among the arguments of every operator, in their order. Not their defaults, so that
# whoever forgets one computes something else; exact in every dtype, as the fuzzer's reference is.
NUMBERS: list[float] = []


def cell_inputs(*args: Any, **options: Any) -> list[Any]:
    """All arguments of lltm::forward."""
    return [*sample_inputs(*args, **options), *NUMBERS]


def backward_inputs(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (3, 5, 4),
    requires_grad: bool = False,
) -> list[Any]:
    """Arguments of lltm::backward that belong together."""
    inputs = cell_inputs(device, dtype, shape)
    new_h, new_cell, gates = torch.ops.lltm._forward_with_gates(*inputs)
    input, weights, _, old_h, *_ = inputs
    tensors = [new_h * 0.5 + 0.3, new_cell * 0.3 - 0.2, new_cell, gates, input, weights, old_h]
    return [*(t.detach().requires_grad_(requires_grad) for t in tensors), *NUMBERS]


# (time, batch, input_features, state_size), likewise.
SEQUENCE_SHAPES = {
    "ordinary": (5, 3, 5, 4),
    "one of each": (1, 1, 1, 1),
    "no steps": (0, 3, 5, 4),
    "no batch": (4, 0, 5, 4),
    "no input": (4, 3, 0, 4),
    "one row, units beyond two vectors": (9, 1, 7, 33),
    "two rows": (12, 2, 16, 100),
    "a row beyond a vector, too few steps to pack for": (7, 17, 6, 40),
    "more than one chunk of steps": (1100, 1, 2, 33),
    "rows that threads divide": (20, 40, 8, 270),
    "weights that are not packed, where L2 has less than 4.8 MB": (8, 2, 6, 1100),
}
# They take long, so the first and the last kind stand for all, except in float32.
LARGE_SEQUENCE_SHAPES = list(SEQUENCE_SHAPES.values())[-3:]
# Packed or not, in both directions, with resets or without.
SEQUENCE_KINDS = list(itertools.product(("padded", "packed"), (False, True), (False, True)))
SequenceKind = tuple[str, bool, bool]


SEQUENCE_CASES = [
    (dtype, shape, kind)
    for dtype, shape, kind in itertools.product(DTYPES, SEQUENCE_SHAPES.values(), SEQUENCE_KINDS)
    if dtype == torch.float32
    or shape not in LARGE_SEQUENCE_SHAPES
    or kind in (SEQUENCE_KINDS[0], SEQUENCE_KINDS[-1])
]


def name_of_kind(kind: SequenceKind) -> str:
    form, reverse, resets = kind
    return f"{form}{' reverse' if reverse else ''}{' resets' if resets else ''}"


each_sequence_kind = pytest.mark.parametrize("kind", SEQUENCE_KINDS, ids=name_of_kind)


def sequence_inputs(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int, int] = (5, 3, 5, 4),
    kind: SequenceKind = ("padded", False, False),
    requires_grad: bool = False,
) -> list[Any]:
    """Arguments of lltm::sequence_forward. If packed, the rows become fewer over the steps."""
    time, batch, input_features, state_size = shape
    form, reverse, with_resets = kind
    sizes = [max(1, batch - step * batch // (time + 1)) for step in range(time)]
    packed = form == "packed" and batch > 0 and time > 0
    rows = (sum(sizes),) if packed else (time, batch)
    count = math.prod(rows)
    cell = sample_inputs(device, dtype, (count, input_features, state_size))
    input, weights, bias, _, _ = cell
    _, _, _, h0, c0 = sample_inputs(device, dtype, (batch, input_features, state_size))
    tensors = [input.reshape(*rows, input_features), weights, bias, h0, c0]
    resets = None
    if with_resets:
        generator = torch.Generator().manual_seed(1)
        resets = (torch.rand(rows, generator=generator) < 0.2).to(device)
    return [
        *(tensor.detach().requires_grad_(requires_grad) for tensor in tensors),
        torch.tensor(sizes) if packed else None,
        reverse,
        resets,
        *NUMBERS,
    ]


def sequence_backward_inputs(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int, int] = (5, 3, 5, 4),
    kind: SequenceKind = ("padded", False, False),
    requires_grad: bool = False,
) -> list[Any]:
    """Arguments of lltm::sequence_backward that belong together."""
    inputs = sequence_inputs(device, dtype, shape, kind)
    output, cells, h_n, c_n, gates = torch.ops.lltm._sequence_forward_with_gates(*inputs)
    input, weights, _, h0, _, *options = inputs
    grads = [output * 0.5 + 0.3, cells * 0.3 - 0.2, h_n * 0.4 - 0.3, c_n * 0.2 + 0.1]
    tensors = [*grads, output, cells, gates, input, weights, h0]
    return [*(t.detach().requires_grad_(requires_grad) for t in tensors), *options]


def exact_gradients(operator: Operator, *sample: Any) -> tuple[Tensor, ...]:
    """What backward has to compute of operator.backward_inputs(*sample), by the reference."""
    inputs = double(operator.inputs(*sample, requires_grad=True))
    outputs = operator.reference(*inputs)
    gradients_of_outputs = double(operator.backward_inputs(*sample)[: len(outputs)])
    return torch.autograd.grad(outputs, inputs[:5], gradients_of_outputs, materialize_grads=True)


def sequence_reference(
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    h0: Tensor,
    c0: Tensor,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lltm::sequence_forward as a loop over the reference of the cell, row by row of the batch."""
    sizes = [len(h0)] * len(input) if batch_sizes is None else batch_sizes.tolist()
    steps = input.flatten(0, -2).split(sizes)
    lengths = [sum(size > row for size in sizes) for row in range(len(h0))]
    starts = [0, *itertools.accumulate(len(step) for step in steps)]
    hs: dict[int, Tensor] = {}
    cells: dict[int, Tensor] = {}
    last = []
    for row, length in enumerate(lengths):
        h, cell = h0[row : row + 1], c0[row : row + 1]
        for t in reversed(range(length)) if reverse else range(length):
            place = starts[t] + row
            if resets is not None and resets.flatten()[place]:
                h, cell = torch.zeros_like(h), torch.zeros_like(cell)
            x = steps[t][row : row + 1]
            h, cell = lltm_ops.reference(x, weights, bias, h, cell)
            hs[place], cells[place] = h, cell
        last.append((h, cell))
    h_n, c_n = map(torch.cat, zip((h0[:0], c0[:0]), *last, strict=True))
    empty = [h0[:0]]
    output, all_cells = (
        torch.cat([states[place] for place in sorted(states)] or empty) for states in (hs, cells)
    )
    sizes_of_output = (*input.shape[:-1], h0.shape[1])
    return output.view(sizes_of_output), all_cells.view(sizes_of_output), h_n, c_n


class Operator(NamedTuple):
    """The cell, or sequences of a kind: what the tests of both operators need. Shapes are those of
    sequences; the cell leaves out the time."""

    kind: SequenceKind | None = None

    def __str__(self) -> str:
        return "cell" if self.kind is None else name_of_kind(self.kind)

    def named(self, name: str) -> Any:
        return getattr(torch.ops.lltm, name if self.kind is None else f"sequence_{name}")

    forward = property(lambda self: self.named("forward"))
    backward = property(lambda self: self.named("backward"))

    @property
    def forward_with_gates(self) -> Any:
        return getattr(torch.ops.lltm, f"_{self.forward.__name__}_with_gates")

    @property
    def reference(self) -> Callable[..., tuple[Tensor, ...]]:
        return lltm_ops.reference if self.kind is None else sequence_reference

    @property
    def arguments(self) -> tuple[str, ...]:
        return names_of(self.forward.__name__)

    @property
    def backward_arguments(self) -> tuple[str, ...]:
        return names_of(self.backward.__name__)

    def inputs(self, *args: Any, **options: Any) -> list[Any]:
        return self.sample(cell_inputs, sequence_inputs, *args, **options)

    def backward_inputs(self, *args: Any, **options: Any) -> list[Any]:
        return self.sample(backward_inputs, sequence_backward_inputs, *args, **options)

    def sample(
        self,
        of_cell: Callable[..., list[Any]],
        of_sequence: Callable[..., list[Any]],
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        shape: tuple[int, int, int, int] = (5, 3, 5, 4),
        requires_grad: bool = False,
    ) -> list[Any]:
        if self.kind is None:
            return of_cell(device, dtype, shape[1:], requires_grad)
        return of_sequence(device, dtype, shape, self.kind, requires_grad)

    def assert_match(
        self,
        actual: Sequence[Tensor],
        expected: Sequence[Tensor],
        dtype: torch.dtype,
        rows: int = 1,
    ) -> None:
        """Results of any dtype against float64; those of the cell may be sums over rows."""
        if self.kind is not None:
            assert_sequences_match(actual, expected, dtype)
            return
        tolerance = {name: value * max(1, rows) ** 0.5 for name, value in TOLERANCES[dtype].items()}
        for ours, exact in zip(actual, expected, strict=True):
            assert ours.dtype == dtype
            assert_matches_float64(ours, exact.detach(), **tolerance)


CELL = Operator()
PADDED = Operator(("padded", False, False))
OPERATORS = [CELL, *(Operator(kind) for kind in SEQUENCE_KINDS)]
each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)


def expand_rows(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor


def offset(tensor: Tensor, elements: int = 1) -> Tensor:
    """Begins so many elements after the beginning of its memory."""
    flat = torch.cat([tensor.new_zeros(elements), tensor.flatten()])
    return flat[elements:].view(tensor.shape)


LAYOUTS = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "transposed": lambda t: (
        t.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    ),
    "offset": offset,
    "strided": lambda t: torch.stack([t, t.flip(0)], dim=-1)[..., 0],
    "expanded": expand_rows,
}


def double(arguments: list[Any]) -> list[Any]:
    """The same values in float64 on the CPU, requiring grad like the originals."""

    def one(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        if not argument.is_floating_point():
            return argument.cpu()
        copy = argument.detach().to("cpu", torch.float64)
        return copy.requires_grad_(argument.requires_grad)

    return [one(argument) for argument in arguments]


def with_options(op: Callable[..., Any], inputs: list[Any]) -> Callable[..., Any]:
    """op as a function of its first tensors, for what differentiates by all arguments."""
    return lambda *tensors: op(*tensors, *inputs[len(tensors) :])


def weighted_loss(outputs: Sequence[Tensor]) -> Tensor:
    def weighted(output: Tensor, start: float) -> Tensor:
        weight = torch.linspace(start, 1, output.numel(), dtype=torch.float64)
        return (output * weight.view(output.shape).to(output.device, output.dtype)).sum()

    starts = (-1.0, 0.5, -0.5, 0.3)[: len(outputs)]
    return sum(map(weighted, outputs, starts), torch.zeros(()))


def gradients(op, inputs: list[Any]) -> list[Tensor | None]:
    """Gradients of a loss that weighs every output element differently; None where not required."""
    weighted_loss(op(*inputs)).backward()
    return [t.grad for t in inputs if isinstance(t, Tensor) and t.is_floating_point()]


def assert_matches_float64(actual: Tensor, expected: Tensor, **tolerance: float) -> None:
    """actual, of any dtype and device, against a float64 reference."""
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    tolerance = tolerance or TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.detach().to("cpu", torch.float64), expected, **tolerance)


# Each step amplifies the rounding of the step before it. Relative to the largest value, the error
# may grow to so many times the tolerance.
GROWTH = 10


def assert_sequences_match(
    actual: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Compares results of many steps, or sums over them, by the size of the largest."""
    for ours, exact in zip(actual, expected, strict=True):
        assert ours.dtype == dtype
        scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
        tolerance = TOLERANCES[dtype]["atol"] * GROWTH * scale
        assert_matches_float64(ours, exact.detach(), rtol=0, atol=tolerance)
