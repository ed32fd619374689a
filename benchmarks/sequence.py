"""A whole sequence through the layer, and what else PyTorch offers.

As cell.py: inference, training, and training with all gradients, from a state of zeros. Writes
sequence.csv.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from contest import Contest, run
from torch import Tensor, nn

import lltm_ops

# It takes the instructions that it finds, also where this variable keeps all others from them.
HAS_ONNXRUNTIME = "ATEN_CPU_CAPABILITY" not in os.environ and all(
    find_spec(name) is not None for name in ("onnx", "onnxruntime")
)
# time, batch, input, state
SHAPES = ["128x1x128x128", "128x16x128x128", "64x64x256x512", "50x1x1024x1024"]


class CellLoop(lltm_ops.LLTMCell):
    """The cell in a Python loop."""

    def forward(self, input: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        state, outputs = None, []
        for x in input:
            state = super().forward(x, state)
            outputs.append(state[0])
        return torch.stack(outputs), state


class EagerLoop(lltm_ops.LLTMCell):
    """The mathematics in plain PyTorch, in a Python loop."""

    step = staticmethod(lltm_ops.reference)

    def forward(self, input: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = cell = input.new_zeros(input.shape[1], self.hidden_size)
        outputs = []
        for x in input:
            h, cell = self.step(x, self.weights, self.bias, h, cell)
            outputs.append(h)
        return torch.stack(outputs), (h, cell)


class CompiledLoop(EagerLoop):
    """Each step a call of compiled code. To compile the loop itself unrolls it, for minutes."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        torch._dynamo.reset()
        self.step = torch.compile(lltm_ops.reference, dynamic=False)


class OnnxLSTM(nn.Module):
    """``onnxruntime``'s LSTM: in float32 and in inference, because it has nothing else."""

    def __init__(self, input_size: int, hidden_size: int):
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper

        super().__init__()
        rows = 4 * hidden_size
        parameters = {
            "W": torch.randn(1, rows, input_size),
            "R": torch.randn(1, rows, hidden_size),
            "B": torch.randn(1, 2 * rows),
        }
        scale = hidden_size**-0.5
        float32 = TensorProto.FLOAT
        graph = helper.make_graph(
            [helper.make_node("LSTM", ["input", *parameters], ["output"], hidden_size=hidden_size)],
            "lstm",
            [helper.make_tensor_value_info("input", float32, ["time", "batch", input_size])],
            [helper.make_tensor_value_info("output", float32, ["time", 1, "batch", hidden_size])],
            [
                numpy_helper.from_array((scale * tensor).numpy(), name)
                for name, tensor in parameters.items()
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # Or its threads spin on after a run, on the cores of whoever is timed next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options)

    def forward(self, input: Tensor) -> tuple[Tensor]:
        (output,) = self.session.run(None, {"input": input.numpy()})
        return (torch.from_numpy(output).squeeze(1),)


def contenders(input_size: int, hidden_size: int, options: dict[str, Any]) -> dict[str, nn.Module]:
    classes = {
        "lltm_ops": lltm_ops.LLTM,
        "cell in a loop": CellLoop,
        "eager loop": EagerLoop,
        "compiled loop": CompiledLoop,
        "LSTM": nn.LSTM,
        "GRU": nn.GRU,
    }
    modules = {name: make(input_size, hidden_size, **options) for name, make in classes.items()}
    if HAS_ONNXRUNTIME and options == {"device": "cpu", "dtype": torch.float32}:
        modules["onnxruntime"] = OnnxLSTM(input_size, hidden_size)
    return modules


def contest_of(shape: tuple[int, ...], options: dict[str, Any]) -> Contest:
    time, batch, input_size, hidden_size = shape
    return Contest(
        contenders(input_size, hidden_size, options),
        lambda layer, input: layer(input)[0],
        (torch.randn(time, batch, input_size, **options),),
        (torch.randn(time, batch, hidden_size, **options),),
    )


if __name__ == "__main__":
    if not HAS_ONNXRUNTIME:
        print("without onnxruntime: not installed (pip install onnx onnxruntime), or not limited")
    run(__doc__.splitlines()[0], "sequence", SHAPES, "time x batch x input x state", contest_of)
