"""What a recurrent layer can remember and forget: LLTM, nn.LSTM and nn.GRU on three tasks.

recall: say at the end which value came first.
add: say the sum of the two values that were marked.
latest: say which of the marked values came last, and so forget those before it.

Prints a row of a markdown table for each task, layer and learning rate: how many seeds end with a
loss below 0.01, the median and the worst of the losses, and the median at four times the length.
docs/training.md has the figures.
"""

import argparse
import itertools
from statistics import median

import torch
from torch import Tensor, nn
from torch.hub import tqdm

from lltm_ops import LLTM

# The class, what is added to the initial bias of each gate in turn, and whether it is given resets.
# The gates of the LLTM are input, output and candidate, of the LSTM input, forget, candidate and
# output, and of the GRU reset, update and new.
LAYERS: dict[str, tuple[type[nn.Module], tuple[float, ...], bool]] = {
    "LLTM": (LLTM, (), False),
    "LLTM, input gate -2": (LLTM, (-2,), False),
    "LLTM, input gate -4": (LLTM, (-4,), False),
    "LLTM, resets": (LLTM, (), True),
    "LSTM": (nn.LSTM, (), False),
    "LSTM, forget gate +3": (nn.LSTM, (0, 3), False),
    "LSTM, forget gate +5, input gate -5": (nn.LSTM, (-5, 5), False),
    "GRU": (nn.GRU, (), False),
    "GRU, update gate +5": (nn.GRU, (0, 5), False),
}
TASKS = ("recall", "add", "latest")
SOLVED = 0.01  # squared error; who always says the mean has 1/3, 1/6 and 1/3


def batch(task: str, length: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values and marks [length, size, 2], what to say at the end [size], and the marks as bools."""
    values, marks = torch.rand(length, size), torch.zeros(length, size, dtype=torch.bool)
    row = torch.arange(size)
    if task == "add":
        marks[torch.randint(length // 2, (size,)), row] = True
        marks[torch.randint(length // 2, length, (size,)), row] = True
        target = (values * marks).sum(0)
    else:
        values = 2 * values - 1
        if task == "latest":
            marks = torch.rand(length, size) < 1 / 8
        marks[0] = True
        last = (marks * torch.arange(length).unsqueeze(1)).argmax(0)
        target = values[last, row]
    return torch.stack([values, marks.float()], 2), target, marks


def layer_of(name: str, input_size: int, hidden_size: int) -> nn.Module:
    kind, added, _ = LAYERS[name]
    layer = kind(input_size, hidden_size)
    bias = layer.bias_l0 if kind is LLTM else layer.bias_ih_l0
    with torch.no_grad():
        for gate, number in zip(bias.split(hidden_size), added, strict=False):
            gate += number
    return layer


class Model(nn.Module):
    def __init__(self, layer: str, hidden_size: int) -> None:
        super().__init__()
        self.resets = LAYERS[layer][2]
        self.layer = layer_of(layer, 2, hidden_size)
        self.head = nn.Linear(hidden_size, 1)

    def loss(self, task: str, length: int, size: int) -> Tensor:
        input, target, marks = batch(task, length, size)
        output = (self.layer(input, None, marks) if self.resets else self.layer(input))[0]
        return (self.head(output[-1]).squeeze(1) - target).square().mean()


def train(
    task: str, layer: str, rate: float, seed: int, args: argparse.Namespace
) -> tuple[Model, list[float]]:
    """The model, and the loss of each step: on data that it had not seen before."""
    torch.set_num_threads(1)  # so small a layer gains nothing from more
    torch.manual_seed(seed)
    model = Model(layer, args.hidden_size)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = model.loss(task, args.length, args.batch_size)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def final_loss(model: Model, task: str, length: int) -> float:
    torch.manual_seed(-1)  # the same data for all
    return model.loss(task, length, 1000).item()


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=[*LAYERS])
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[0.003, 0.01])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the gradients")
    return parser


def main() -> None:
    args = command_line().parse_args()
    print("| task | layer | learning rate | solved | median | worst | at four times the length |")
    print("|---|---|---|---|---|---|---|")
    for task, layer, rate in tqdm(
        [*itertools.product(args.tasks, args.layers, args.learning_rates)]
    ):
        if LAYERS[layer][2] and task != "latest":
            continue  # nothing to forget
        models = [train(task, layer, rate, seed, args)[0] for seed in range(args.seeds)]
        here = [final_loss(model, task, args.length) for model in models]
        longer = [final_loss(model, task, 4 * args.length) for model in models]
        solved = sum(loss < SOLVED for loss in here)
        figures = f"{median(here):.2g} | {max(here):.2g} | {median(longer):.2g}"
        print(f"| {task} | {layer} | {rate:g} | {solved} of {args.seeds} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
