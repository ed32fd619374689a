"""Tensors of any strides and values, in storage whose other bytes are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Elements before and behind a view: a kernel that reads them computes nan.
GUARD = 16

# Each gives the strides for sizes, in elements.
LAYOUTS = (
    "contiguous",
    "offset",  # from an odd element on
    "transposed",  # the first dimension lies closest
    "permuted",  # in any order
    "rows apart",
    "strided",  # elements apart
    "expanded",  # some dimensions of stride 0
    "overlapping",  # windows
)

VALUES = ("normal", "large", "small", "zeros", "integers", "subnormal", "wild")

SPECIALS = ("0", "-0", "subnormal", "smallest", "largest", "-largest", "inf", "-inf", "nan")


def special_value(name: str, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    names = {
        "subnormal": info.smallest_normal * info.eps,
        "smallest": info.smallest_normal,
        "largest": info.max,
        "-largest": info.min,
    }
    return names[name] if name in names else float(name)


def dense_strides(sizes: tuple[int, ...], order: list[int]) -> list[int]:
    """order: of dimensions, the one that lies closest last."""
    strides, stride = [0] * len(sizes), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride *= max(1, sizes[dim])
    return strides


def strides_of(layout: str, sizes: tuple[int, ...], choose: random.Random) -> list[int]:
    order = list(range(len(sizes)))
    if layout == "transposed":
        order.reverse()
    if layout == "permuted":
        choose.shuffle(order)
    strides = dense_strides(sizes, order)
    if layout == "rows apart" and len(sizes) > 1:
        padded = (*sizes[:-1], sizes[-1] + choose.randint(1, 5))
        strides = dense_strides(padded, order)
    if layout == "strided":
        factor = choose.randint(2, 3)
        strides = [stride * factor for stride in strides]
    if layout == "expanded":
        expanded = choose.randrange(1, 2 ** len(sizes))
        strides = [0 if expanded >> dim & 1 else stride for dim, stride in enumerate(strides)]
    if layout == "overlapping":
        strides = [choose.randint(1, 3) for _ in sizes]
    return strides


@dataclass
class Maker:
    """Makes the arguments of a call, each of the next layout, and watches over them."""

    dtype: torch.dtype
    values: str
    layouts: list[str]
    seed: int
    storages: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # and copies

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)

    def tensor(self, kind: str, *sizes: int) -> Tensor:
        return self._view(self._values(kind, sizes).to(self.dtype), torch.nan)

    def booleans(self, *sizes: int) -> Tensor:
        return self._view(torch.rand(sizes, generator=self.generator) < 0.25, True)

    def integers(self, values: list[int]) -> Tensor:
        return self._view(torch.tensor(values, dtype=torch.int64), 2**40, keeps_values=True)

    def put_special(self, name: str, tensors: list[Tensor]) -> None:
        """Into one or two elements of one tensor, often at an end: padding begins there."""
        tensor = self.choose.choice(tensors)
        for _ in range(self.choose.randint(1, 2)):
            if tensor.numel() > 0:
                index = tuple(
                    self.choose.choice((self.choose.randrange(size), -1)) for size in tensor.shape
                )
                tensor[index] = special_value(name, self.dtype)

    def watch(self) -> None:
        """From now on nothing may change."""
        self.storages = [(storage, storage.clone()) for storage, _ in self.storages]

    def changed(self) -> bool:
        return any(not torch.equal(now, before) for now, before in self.storages)

    def _view(self, values: Tensor, around: Any, keeps_values: bool = False) -> Tensor:
        layout = self.layouts[len(self.storages) % len(self.layouts)]
        if keeps_values and layout in ("expanded", "overlapping"):
            layout = "strided"
        sizes = tuple(values.shape)
        strides = strides_of(layout, sizes, self.choose)
        begin = GUARD + (self.choose.randrange(1, GUARD, 2) if layout == "offset" else 0)
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        storage = torch.full((begin + max(last, 0) + 1 + GUARD,), around, dtype=values.dtype)
        if values.numel() > 0:
            places = torch.arange(storage.numel()).as_strided(sizes, strides, begin)
            storage[places.flatten()] = values.flatten()
        self.storages.append((storage.view(torch.uint8), storage))
        return storage.as_strided(sizes, strides, begin)

    def _values(self, kind: str, sizes: tuple[int, ...]) -> Tensor:
        def normal(scale: float = 1.0) -> Tensor:
            return scale * torch.randn(sizes, generator=self.generator, dtype=torch.float64)

        info = torch.finfo(self.dtype)
        if self.values == "zeros":
            return torch.zeros(sizes, dtype=torch.float64)
        if self.values == "integers":
            return normal(1.5).round()
        if self.values == "subnormal":
            return normal(info.smallest_normal / 8)
        if self.values == "wild":
            exponents = torch.rand(sizes, generator=self.generator, dtype=torch.float64) * 2 - 1
            return normal() * torch.tensor(info.max, dtype=torch.float64) ** (0.45 * exponents)
        if kind == "gates":
            input_gate, output_gate, candidate = normal(1.5).chunk(3, -1)
            elu = torch.nn.functional.elu(candidate)
            return torch.cat([input_gate.sigmoid(), output_gate.sigmoid(), elu], -1)
        scale = {"large": 12.0, "small": 1e-3}.get(self.values, 1.0)
        if kind == "weights":
            scale /= max(1, sizes[-1]) ** 0.5
        return normal(scale)
