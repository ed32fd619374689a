"""Writes what without_python.cpp reads: inputs, a scripted model, one compiled ahead of time.

A C++ compiler is needed, as for torch.compile.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import lltm_ops


class Model(nn.Module):
    """Two layers in both directions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = lltm_ops.LLTM(5, 6, num_layers=2, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, input: Tensor) -> tuple[Tensor]:
        return (self.head(self.layer(input)[0]),)


def make_inputs() -> dict[str, Tensor]:
    return {
        "step": torch.randn(1, 32),
        "weights": torch.randn(3 * 128, 128 + 32) / 12,
        "bias": torch.randn(3 * 128),
        "old_h": torch.randn(1, 128),
        "old_cell": torch.randn(1, 128),
        "input": torch.randn(17, 4, 5),
        "target": torch.randn(17, 4, 3),
    }


def compile_ahead_of_time(model: nn.Module, file: Path) -> None:
    """For any time and batch."""
    time, batch = torch.export.Dim("time"), torch.export.Dim("batch")
    with torch.no_grad():
        exported = torch.export.export(
            model, (torch.randn(7, 3, 5),), dynamic_shapes=({0: time, 1: batch},)
        )
        torch._inductor.aoti_compile_and_package(exported, package_path=str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, inputs = Model(), make_inputs()
    torch.save(inputs, folder / "inputs.pt")
    torch.save(model.state_dict(), folder / "model.pt")
    if sys.version_info < (3, 14):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", (DeprecationWarning, FutureWarning))
            torch.jit.script(model).save(str(folder / "scripted.pt"))
    else:
        print("scripted.pt is left out: TorchScript ends with Python 3.13")
    compile_ahead_of_time(model, folder / "layer.pt2")


if __name__ == "__main__":
    main()
