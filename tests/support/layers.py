"""What the tests of the layer share."""

import pytest
import torch
from torch import nn

STRUCTURES = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 3, "bidirectional": True, "bias": False},
    {"batch_first": True, "num_layers": 2},
]
each_structure = pytest.mark.parametrize("options", STRUCTURES, ids=str)
SLOW_OPTIONS = [{"layer_norm": True}, {"zoneout": 0.3}, {"recurrent_dropout": 0.3}]
assert_close = torch.testing.assert_close
each_form = pytest.mark.parametrize("form", ["padded", "packed"])
each_with_resets = pytest.mark.parametrize("with_resets", [False, True])


def state_of(layer, *batch, **both):
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    return tuple(torch.randn(count, *batch, layer.hidden_size, **both) for _ in range(2))


def call_of(layer, form, with_resets, time, batch):
    """Arguments of the layer; packed, sequences end at each other step."""
    sizes = [min(batch, max(1, batch - step // 2)) for step in range(time)]
    padded = (batch, time) if layer.batch_first else (time, batch)
    rows = padded if form == "padded" else (sum(sizes),)
    return (
        torch.randn(*rows, 5),
        state_of(layer, batch),
        torch.rand(rows) < 0.3 if with_resets else None,
        None if form == "padded" else torch.tensor(sizes, dtype=torch.long),
    )


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, tensor):
        return tensor * self.factor
