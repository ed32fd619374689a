"""The LLTM in plain PyTorch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def forward(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """One step. Returns the new state, new_h and new_cell."""
    pre_activations = F.linear(torch.cat([old_h, input], dim=1), weights, bias)
    input_gate, output_gate, candidate = pre_activations.chunk(3, dim=1)
    new_cell = old_cell + F.elu(candidate) * torch.sigmoid(input_gate)
    new_h = torch.tanh(new_cell) * torch.sigmoid(output_gate)
    return new_h, new_cell


class LLTMCell(nn.Module):
    """The parameters of a step, and a call as of nn.LSTMCell."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.weights = nn.Parameter(torch.empty(3 * hidden_size, hidden_size + input_size))
        self.bias = nn.Parameter(torch.empty(3 * hidden_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden_size), 1 / math.sqrt(hidden_size))

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return forward(input, self.weights, self.bias, *state)


def profile(steps: int = 200) -> torch.autograd.profiler_util.EventList:
    """The operators of some training steps, with the time that each took."""
    cell, input = LLTMCell(32, 128), torch.randn(16, 32)
    state = torch.zeros(16, 128), torch.zeros(16, 128)
    with torch.profiler.profile() as profiler:
        for _ in range(steps):
            sum(cell(input, state)).sum().backward()
    return profiler.key_averages()


if __name__ == "__main__":
    torch.set_num_threads(1)  # so that no time is spent on waiting for one another
    print(profile().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40))
