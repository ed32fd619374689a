"""Trains an LLTM, nn.LSTM and nn.GRU side by side: how accurate, how fast, how much memory?

In two minutes, on two cores: all three learn from sequences that differ in length, who speaks and
which exercise somebody does, and to repeat the first of 50 numbers. The trained LLTM then runs in
four ways. examples/data has the sequences.
"""

import argparse
import datetime
import itertools
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import memory_tasks
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from tqdm import tqdm
from ways_to_run import agree, compare

import lltm_ops

DATA = Path(__file__).with_name("data")
COLORS = {"LLTM": "tab:red", "nn.LSTM": "tab:blue", "nn.GRU": "slategrey"}
# Names of layers in memory_tasks.py.
STARTS = {
    "as initialised": {"LLTM": "LLTM", "nn.LSTM": "LSTM", "nn.GRU": "GRU"},
    "gates set to keep": {
        "LLTM": "LLTM, input gate -4",
        "nn.LSTM": "LSTM, forget gate +5, input gate -5",
        "nn.GRU": "GRU, update gate +5",
    },
}
RATES = (0.002, 0.005, 0.01, 0.02)
HIDDEN_SIZE, SEEDS = 64, range(3)
RECALL_LENGTH, RECALL_RATE, RECALL_STEPS, WINDOW = 50, 0.003, 400, 20
Solved = dict[tuple[str, str], list[int | None]]


BATCH_SIZES = {"speakers": 27, "exercises": 14}
# The start and the learning rate of each layer: the best of demo.py --search.
CHOSEN = {
    ("speakers", "LLTM"): ("as initialised", 0.02),
    ("speakers", "nn.LSTM"): ("as initialised", 0.01),
    ("speakers", "nn.GRU"): ("as initialised", 0.02),
    ("exercises", "LLTM"): ("gates set to keep", 0.02),
    ("exercises", "nn.LSTM"): ("gates set to keep", 0.02),
    ("exercises", "nn.GRU"): ("gates set to keep", 0.02),
}
LEARN, CHOOSE, TEST = range(3)


class Sequences:
    """Those of some parts of a task, each [steps, features], and their labels."""

    def __init__(self, task: str, *parts: int) -> None:
        data = np.load(DATA / f"{task}.npz")
        every = torch.from_numpy(data["steps"]).float().split(data["lengths"].tolist())
        learned = torch.cat(
            [s for s, part in zip(every, data["parts"], strict=True) if part < TEST]
        )
        std, mean = torch.std_mean(learned, 0)
        kept = np.isin(data["parts"], parts)
        self.inputs = [(s - mean) / std for s, keep in zip(every, kept, strict=True) if keep]
        self.labels = torch.from_numpy(data["labels"][kept]).long()
        self.features, self.classes = len(mean), int(data["labels"].max()) + 1

    def batches(self, size: int) -> list[tuple[list[Tensor], Tensor]]:
        """In an order of torch's generator."""
        order = torch.randperm(len(self.inputs)).split(size)
        return [([self.inputs[i] for i in rows], self.labels[rows]) for rows in order]


class Classifier(nn.Module):
    """A recurrent layer, and a linear one after the last step of each sequence."""

    def __init__(self, layer: str, features: int, classes: int) -> None:
        super().__init__()
        self.rnn = memory_tasks.layer_of(layer, features, HIDDEN_SIZE)
        self.head = nn.Linear(HIDDEN_SIZE, classes)

    def forward(self, input: Tensor, lengths: Tensor) -> Tensor:
        output = self.rnn(input)[0]
        return self.head(output[lengths - 1, torch.arange(input.size(1))])


def packed(model: Classifier, inputs: list[Tensor]) -> Tensor:
    state = model.rnn(pack_sequence(inputs, enforce_sorted=False))[1]
    h_n = state[0] if isinstance(state, tuple) else state
    return model.head(h_n[-1])


def padded(model: Classifier, inputs: list[Tensor]) -> Tensor:
    return model(pad_sequence(inputs), torch.tensor([len(input) for input in inputs]))


Form = Callable[[Classifier, list[Tensor]], Tensor]
# Both forms have the same results.
CONTENDERS: dict[str, tuple[str, Form]] = {
    "LLTM, packed": ("LLTM", packed),
    "nn.LSTM, packed": ("nn.LSTM", packed),
    "nn.LSTM, padded": ("nn.LSTM", padded),
    "nn.GRU, packed": ("nn.GRU", packed),
    "nn.GRU, padded": ("nn.GRU", padded),
}


class Learner:
    def __init__(self, task: str, layer: str, form: Form, seed: int, *parts: int) -> None:
        torch.set_num_threads(1)  # matrices of this size gain little from more
        torch.manual_seed(seed)
        self.form, self.batch_size = form, BATCH_SIZES[task]
        self.sequences = Sequences(task, *parts)
        self.model = Classifier(layer, self.sequences.features, self.sequences.classes)

    def train(self, epochs: int, rate: float) -> None:
        optimizer = torch.optim.Adam(self.model.parameters(), rate)
        for _ in range(epochs):
            for batch in self.sequences.batches(self.batch_size):
                optimizer.zero_grad()
                self.loss(*batch).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
                optimizer.step()

    def loss(self, inputs: list[Tensor], labels: Tensor) -> Tensor:
        return F.cross_entropy(self.form(self.model, inputs), labels)

    @torch.no_grad()
    def accuracy(self, sequences: Sequences) -> float:
        guesses = self.form(self.model, sequences.inputs).argmax(1)
        return (guesses == sequences.labels).double().mean().item()


def accuracy(
    task: str, layer: str, start: str, rate: float, seed: int, epochs: int, search: bool
) -> float:
    """The share of right answers, on the sequences that a search keeps, or on the test set."""
    learned, asked = ((LEARN,), CHOOSE) if search else ((LEARN, CHOOSE), TEST)
    learner = Learner(
        task, STARTS[start][layer], packed if layer == "LLTM" else padded, seed, *learned
    )
    learner.train(epochs, rate)
    return learner.accuracy(Sequences(task, asked))


def steps_until_recalled(layer: str, seed: int, steps: int) -> int | None:
    """The loss of a step is on new data, so the mean of the last ones says what was learned."""
    options = [f"--steps={steps}", f"--length={RECALL_LENGTH}"]
    args = memory_tasks.command_line().parse_args(options)
    losses = memory_tasks.train("recall", layer, RECALL_RATE, seed, args)[1]
    for step in range(WINDOW, steps + 1):
        if statistics.fmean(losses[step - WINDOW : step]) < memory_tasks.SOLVED:
            return step
    return None


def for_each_seed(what: str, function: Callable, calls: dict[Any, tuple]) -> dict[Any, list]:
    """What the function returns for the arguments of each key and each seed, on all processors."""
    with ProcessPoolExecutor(
        min(8, os.cpu_count() or 1),
        torch.multiprocessing.get_context("spawn"),
        signal.signal,  # Ctrl-C ends the processes, too
        (signal.SIGINT, signal.SIG_DFL),
    ) as pool:
        futures = {
            key: [pool.submit(function, *before, seed, *after) for seed in SEEDS]
            for key, (before, after) in calls.items()
        }
        every = [future for futures in futures.values() for future in futures]
        for future in tqdm(every, desc=what, unit="run", leave=False, disable=None):
            future.result()
        return {key: [future.result() for future in found] for key, found in futures.items()}


def search(task: str, layer: str, epochs: int) -> None:
    """The same for each layer: two starts and four rates, by the sequences to choose by."""
    cases = itertools.product(STARTS, RATES)
    calls = {case: ((task, layer, *case), (epochs, True)) for case in cases}
    found = for_each_seed("search", accuracy, calls)
    means = {case: statistics.fmean(values) for case, values in found.items()}
    print(f"{task}, {layer}: best {max(means, key=means.__getitem__)}")
    for (start, rate), mean in means.items():
        print(f"    {start:18} {rate:5} {100 * mean:5.1f} %", flush=True)


def kept_for_backward(function: Callable[[], Tensor]) -> float:
    """MiB of the tensors that autograd saves."""
    sizes = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function()  # holds the graph, so that no place is taken twice
    del result
    return sum(sizes.values()) / 2**20


def cost(task: str, rounds: int) -> dict[str, tuple[float, float]]:
    """The median seconds of an epoch, taking turns, and the MiB that a batch keeps for backward."""
    learners = {
        name: Learner(task, STARTS["as initialised"][layer], form, 0, LEARN, CHOOSE)
        for name, (layer, form) in CONTENDERS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    memory = {}
    for name, learner in learners.items():
        batch = learner.sequences.batches(learner.batch_size)[0]
        memory[name] = kept_for_backward(lambda: learner.loss(*batch))  # noqa: B023
        learner.loss(*batch).backward()  # the first call prepares what all later ones use
    for name in list(learners) * rounds:
        start = time.perf_counter()
        learners[name].train(1, RATES[0])
        seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(seconds[name]), memory[name]) for name in learners}


def print_costs(costs: dict[str, dict[str, tuple[float, float]]]) -> None:
    for task, of_task in costs.items():
        ours = of_task["LLTM, packed"][0]
        print(f"\n{task}: an epoch of training, and what a batch keeps for backward")
        for name, (seconds, mebibytes) in of_task.items():
            times = f"{seconds / ours:6.1f} times as long"
            print(f"    {name:18}{seconds:8.3f} s{times}{mebibytes:8.1f} MiB")


def print_accuracies(found: dict[tuple[str, str], list[float]]) -> None:
    print("\nAccuracy on sequences that no layer has seen, with each of three seeds")
    for (task, layer), (start, rate) in CHOSEN.items():
        shown = "".join(f"{100 * value:7.1f} %" for value in found[task, layer])
        print(f"    {task}, {layer:10}{shown}   ({start}, learning rate {rate})")


def print_recall(solved: Solved) -> None:
    print(f"\nSteps until it recalls, of {RECALL_STEPS}, with each of three seeds:")
    for (start, layer), found in solved.items():
        shown = "".join(f"{step or '-':>6}" for step in found)
        print(f"    {STARTS[start][layer]:38}{shown}")


def dots(axis: Any, rows: list[tuple[str, str, list[float]]]) -> None:
    """A row of dots for each label, in the color of its layer, one below the other."""
    for row, (_, layer, values) in enumerate(rows):
        heights = [row + 0.2 * (number - (len(values) - 1) / 2) for number in range(len(values))]
        axis.plot(values, heights, "o", color=COLORS[layer])
    axis.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")


def about() -> str:
    said = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    parts = (
        said[1] if said else "an unnamed processor",
        torch.backends.cpu.get_cpu_capability(),
        "one thread, float32",
        f"torch {torch.__version__}",
        f"lltm_ops {lltm_ops.__version__}",
        datetime.date.today().isoformat(),
    )
    return ", ".join(parts)


def draw(
    path: Path,
    costs: dict[str, dict[str, tuple[float, float]]],
    accuracies: dict[tuple[str, str], list[float]],
    solved: Solved,
) -> None:
    figure = Figure(figsize=(16, 5), layout="constrained")
    time_axis, accuracy_axis, recall_axis = figure.subplots(1, 3, width_ratios=(1.1, 1, 1))

    rows = [
        (f"{task}: {name}", CONTENDERS[name][0], [1e3 * seconds])
        for task, of_task in costs.items()
        for name, (seconds, _) in of_task.items()
    ]
    dots(time_axis, rows)
    for row, (task, name) in enumerate(itertools.product(BATCH_SIZES, CONTENDERS)):
        seconds, ours = costs[task][name][0], costs[task]["LLTM, packed"][0]
        ratio = f"   {seconds / ours:.1f} times" if seconds != ours else ""
        time_axis.annotate(ratio, (1e3 * seconds, row), va="center")
    time_axis.set_xscale("log")
    time_axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    time_axis.set_xlim(
        right=5e3 * max(seconds for t in costs.values() for seconds, _ in t.values())
    )
    time_axis.set_title("Time: sequences that differ in length", loc="left")
    time_axis.set_xlabel("milliseconds an epoch of training (fewer is better)")

    rows = [
        (f"{task}: {layer}", layer, [100 * value for value in accuracies[task, layer]])
        for task, layer in CHOSEN
    ]
    dots(accuracy_axis, rows)
    accuracy_axis.set_title("Accuracy: sequences never seen", loc="left")
    accuracy_axis.set_xlabel("% right, three seeds (more is better)")

    never = 1.12 * RECALL_STEPS
    rows = [
        (f"{layer}\n{start}", layer, [step or never for step in found])
        for (start, layer), found in solved.items()
    ]
    dots(recall_axis, rows)
    recall_axis.axvspan(1.02 * RECALL_STEPS, 1.22 * RECALL_STEPS, color="0.93", zorder=0)
    recall_axis.set_xlim(0, 1.22 * RECALL_STEPS)
    recall_axis.set_xticks([0, 100, 200, 300, never], ["0", "100", "200", "300", "not in\n400"])
    recall_axis.set_title(f"Memory: the first of {RECALL_LENGTH} numbers", loc="left")
    recall_axis.set_xlabel("steps until it recalls, three seeds (fewer is better)")

    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(11)
    figure.supxlabel(about(), x=0.01, ha="left", fontsize=9, color="0.4")
    numbers = {
        "costs": costs,
        "accuracies": {", ".join(key): values for key, values in accuracies.items()},
        "recall": {", ".join(key): found for key, found in solved.items()},
    }
    titles = " | ".join(axis.get_title(loc="left") for axis in figure.axes)
    figure.savefig(path, dpi=200, metadata={"Title": titles, "Description": json.dumps(numbers)})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", action="store_true", help="for starts and rates, and no more")
    parser.add_argument("--epochs", type=int, default=40, help="of each training (40)")
    parser.add_argument("--rounds", type=int, default=3, help="of timing (3)")
    parser.add_argument("--steps", type=int, default=RECALL_STEPS, help="to recall (400)")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR")
    args = parser.parse_args(argv)
    if args.search:
        for case in CHOSEN:
            search(*case, args.epochs)
        return 0
    args.output.mkdir(parents=True, exist_ok=True)

    print("1 of 4: what training costs. Each layer learns packed and padded sequences.")
    costs = {task: cost(task, args.rounds) for task in BATCH_SIZES}
    print_costs(costs)

    print(
        "\n2 of 4: what the layers learn, each with the start and rate that demo.py --search chose."
    )
    calls = {case: ((*case, *chosen), (args.epochs, False)) for case, chosen in CHOSEN.items()}
    accuracies = for_each_seed("training", accuracy, calls)
    print_accuracies(accuracies)

    print(f"\n3 of 4: the layers learn to repeat the first of {RECALL_LENGTH} numbers.")
    cases = itertools.product(STARTS, COLORS)
    calls = {(start, layer): ((STARTS[start][layer],), (args.steps,)) for start, layer in cases}
    solved = for_each_seed("recall", steps_until_recalled, calls)
    print_recall(solved)

    print("\n4 of 4: the LLTM that learned who speaks runs in four ways.")
    start, rate = CHOSEN["speakers", "LLTM"]
    learner = Learner("speakers", STARTS[start]["LLTM"], packed, 0, LEARN, CHOOSE)
    learner.train(args.epochs, rate)
    inputs = learner.sequences.inputs[: learner.batch_size]
    lengths = torch.tensor([len(input) for input in inputs])
    ways = compare(learner.model, pad_sequence(inputs), lengths)

    draw(args.output / "demo.png", costs, accuracies, solved)
    print(f"\nThe picture: {args.output / 'demo.png'}. docs/training.md explains it.")
    return 0 if agree(ways) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
