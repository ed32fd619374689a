"""A rollout of reinforcement learning, in which episodes end in mid-sequence: four ways to train.

The LLTM is called once, with `resets`. An nn.LSTM is called for each step, or for each run of steps
in which no episode begins, or once, for episodes that are cut out and padded. For a layer all ways
give the same output. Prints how many times as long each takes as the first.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.benchmark import Timer

from lltm_ops import LLTM

STEPS, ENVIRONMENTS, FEATURES, UNITS = 128, 16, 64, 128
# An episode has so many steps on average.
MEAN_LENGTH = 32


def one_call(layer: nn.Module, input: Tensor, begins: Tensor) -> Tensor:
    return layer(input, None, begins)[0]


def runs(layer: nn.Module, input: Tensor, begins: Tensor, every_step: bool = False) -> Tensor:
    """A call for each run of steps. Before it, the state is zeros where an episode begins."""
    cut = begins.any(1) | every_step
    cut[0] = True
    first = cut.nonzero().squeeze(1)
    zeros = input.new_zeros(1, input.size(1), layer.hidden_size)
    state, outputs = (zeros, zeros), []
    for steps, kept in zip(input.tensor_split(first[1:]), ~begins[first], strict=True):
        state = tuple(tensor * kept[:, None] for tensor in state)
        output, state = layer(steps, state)
        outputs.append(output)
    return torch.cat(outputs)


def cut_and_pad(layer: nn.Module, input: Tensor, begins: Tensor) -> Tensor:
    """Episodes as rows of a batch. Each environment's first step begins one, too."""
    by_environment = begins.t().clone()
    by_environment[:, 0] = True
    first = by_environment.flatten().nonzero().squeeze(1)
    lengths = torch.diff(first, append=first.new_tensor([begins.numel()]))
    rows = input.transpose(0, 1).flatten(0, 1)
    output = layer(pad_sequence(rows.split(lengths.tolist())))[0].transpose(0, 1)
    kept = torch.arange(output.size(1)) < lengths[:, None]
    return output[kept].unflatten(0, (input.size(1), -1)).transpose(0, 1)


def rollout() -> tuple[Tensor, Tensor]:
    begins = torch.rand(STEPS, ENVIRONMENTS) < 1 / MEAN_LENGTH
    return torch.randn(STEPS, ENVIRONMENTS, FEATURES), begins


def trained(way: Callable[..., Tensor], layer: nn.Module, input: Tensor, begins: Tensor) -> None:
    loss = way(layer, input, begins).square().mean()
    torch.autograd.grad(loss, [*layer.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="of which the least is taken")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    input, begins = rollout()
    lltm, lstm = LLTM(FEATURES, UNITS), nn.LSTM(FEATURES, UNITS)
    ways = {
        "LLTM, one call with resets": partial(trained, one_call, lltm),
        "nn.LSTM, a call for each run without a reset": partial(trained, runs, lstm),
        "nn.LSTM, a call for each step": partial(trained, partial(runs, every_step=True), lstm),
        "nn.LSTM, episodes cut and padded": partial(trained, cut_and_pad, lstm),
    }
    timers = {
        name: Timer("way(*rollout)", globals={"way": way, "rollout": (input, begins)})
        for name, way in ways.items()
    }
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer.blocked_autorange(min_run_time=0.05).median)
    ours = min(times["LLTM, one call with resets"])
    print(f"{int(begins.sum())} of {begins.numel()} steps begin an episode")
    for name, measured in times.items():
        print(f"{name}: {1e3 * min(measured):.1f} ms, {min(measured) / ours:.1f} times")


if __name__ == "__main__":
    main()
