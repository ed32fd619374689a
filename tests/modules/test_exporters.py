"""Exporters and compilers say no more about our modules than about those of torch.nn."""

import logging
import re

import pytest
import torch
from common import needs_torchscript
from torch import nn
from torch.export import Dim

import lltm_ops


class OfTorch(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.LSTM(5, 6)
        self.stacked = nn.LSTM(5, 6, num_layers=2, bidirectional=True)
        self.cell = nn.LSTMCell(5, 6)

    def forward(self, input, resets, rows, batch_sizes):
        output, state = self.plain(input)
        return output, state, self.stacked(input), self.cell(input[0])


class Ours(nn.Module):
    """The layer alone, stacked, with resets and packed, and the cell."""

    def __init__(self):
        super().__init__()
        self.plain = lltm_ops.LLTM(5, 6)
        self.stacked = lltm_ops.LLTM(5, 6, num_layers=2, bidirectional=True)
        self.cell = lltm_ops.LLTMCell(5, 6)

    def forward(self, input, resets, rows, batch_sizes):
        output, state = self.plain(input)
        return (
            output,
            state,
            self.stacked(input),
            self.stacked(input, None, resets),
            self.plain(rows, state, None, batch_sizes),
            self.cell(input[0]),
        )


ARGUMENTS = torch.randn(7, 3, 5), torch.rand(7, 3) < 0.3, torch.randn(9, 5), torch.tensor([3] * 3)
# nn.LSTM is exported for one number of steps only.
DYNAMIC = {0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO}, {0: Dim.AUTO}


def to_onnx(module, dynamic_shapes):
    pytest.importorskip("onnxscript")
    import lltm_ops.onnx

    torch.onnx.export(
        module, ARGUMENTS, dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False,
        custom_translation_table=lltm_ops.onnx.translation_table(),
    )  # fmt: skip


def to_package(module, folder):
    program = torch.export.export(module, ARGUMENTS, dynamic_shapes=DYNAMIC)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")


EXPORTERS = {
    "onnx": lambda module, _: to_onnx(module, None),
    "onnx, dynamic": lambda module, _: to_onnx(module, DYNAMIC),
    "export": lambda module, _: torch.export.export(module, ARGUMENTS).run_decompositions(),
    "export, dynamic": lambda module, _: torch.export.export(
        module, ARGUMENTS, dynamic_shapes=DYNAMIC
    ).run_decompositions(),
    "export, strict": lambda module, _: torch.export.export(module, ARGUMENTS, strict=True),
    "inductor": lambda module, _: torch.compile(module)(*ARGUMENTS),
    "inductor, dynamic": lambda module, _: torch.compile(module, dynamic=True)(*ARGUMENTS),
    "aot inductor": to_package,
    "jit.trace": lambda module, _: torch.jit.trace(module, ARGUMENTS),
    "jit.script": lambda module, _: torch.jit.script(module),
}
SLOW = "inductor", "inductor, dynamic", "aot inductor"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            how, marks=[pytest.mark.slow] * (how in SLOW) + [needs_torchscript] * ("jit" in how)
        )
        for how in EXPORTERS
    ],
)
def test_says_nothing_that_it_does_not_say_of_torch_nn(how, capfd, caplog, recwarn, tmp_path):
    said = []
    for module in (OfTorch(), Ours()):
        torch._dynamo.reset()
        caplog.clear()
        recwarn.clear()
        capfd.readouterr()
        EXPORTERS[how](module.eval(), tmp_path)
        printed = "".join(capfd.readouterr()).splitlines()
        said.append(
            {re.sub(r"^[IWEC]\d{4} \S+ \d+ ", "", line) for line in printed}
            | {r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING}
            | {str(warning.message) for warning in recwarn}
        )
    assert said[1] - said[0] == set()
