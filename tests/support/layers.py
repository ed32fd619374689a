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
each_slow_option = pytest.mark.parametrize("slow", SLOW_OPTIONS, ids=str)


def state_of(layer, *batch, **both):
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    return tuple(torch.randn(count, *batch, layer.hidden_size, **both) for _ in range(2))


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, tensor):
        return tensor * self.factor
