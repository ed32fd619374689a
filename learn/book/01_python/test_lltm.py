import math

import lltm
import torch


def test_one_unit_by_hand():
    x, h, c = 0.5, -0.25, 2.0
    w_h, w_x, b = [0.1, -0.2, 0.3], [0.4, 0.5, -0.6], [0.7, -0.8, 0.9]
    p = [w_h[k] * h + w_x[k] * x + b[k] for k in range(3)]
    sigmoid = [1 / (1 + math.exp(-value)) for value in p]
    new_cell = c + sigmoid[0] * (p[2] if p[2] > 0 else math.exp(p[2]) - 1)
    new_h = math.tanh(new_cell) * sigmoid[1]

    weights = torch.tensor([w_h, w_x]).T
    step = lltm.forward(*map(torch.tensor, ([[x]], weights.tolist(), b, [[h]], [[c]])))
    torch.testing.assert_close(torch.cat(step), torch.tensor([[new_h], [new_cell]]))


def test_learns_to_add_up():
    """The cell forgets nothing, so sums over time come easily to it."""
    torch.manual_seed(0)
    cell, read = lltm.LLTMCell(1, 16), torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *read.parameters()], lr=0.01)
    losses = []
    for _ in range(200):
        numbers, state = torch.rand(10, 32, 1), (torch.zeros(32, 16), torch.zeros(32, 16))
        for number in numbers:
            state = cell(number, state)
        loss = (read(state[1]) - numbers.sum(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 100
