"""Trains an LLTM, nn.LSTM and nn.GRU side by side: which is faster, and which learns what?

In two minutes, on two cores: all three learn a novel, sentence by sentence, while their time is
taken. The trained LLTM runs in four ways. All three learn to repeat the first of 50 numbers.
"""

import argparse
import itertools
import math
import os
import signal
import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import memory_tasks
import torch
from language_model import (
    CharLM,
    bits_per_character,
    encode,
    loss_of,
    packed,
    padded,
    read_novel,
    sentences_of,
    vocabulary_of,
    write,
)
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm
from ways_to_run import agree, compare

import lltm_ops

LAYERS = {"LLTM": lltm_ops.LLTM, "nn.LSTM": nn.LSTM, "nn.GRU": nn.GRU}
COLORS = {"LLTM": "tab:red", "nn.LSTM": "tab:blue", "nn.GRU": "slategrey"}
# Who learns in which form. Both forms have the same results.
RACE = {
    "LLTM, packed": packed,
    "nn.LSTM, packed": packed,
    "nn.LSTM, padded": padded,
    "nn.GRU, packed": packed,
    "nn.GRU, padded": padded,
}
# Those that take all steps.
READERS = {"LLTM": "LLTM, packed", "nn.LSTM": "nn.LSTM, padded", "nn.GRU": "nn.GRU, padded"}
BATCH_SIZE, EMBEDDING_SIZE, HIDDEN_SIZE, LEARNING_RATE = 16, 64, 128, 0.02
BAR = "{desc:16} |{bar}| {n_fmt:>3} of {total_fmt} steps{postfix}"

RECALL = {
    "as initialised": {"LLTM": "LLTM", "nn.LSTM": "LSTM", "nn.GRU": "GRU"},
    "gates set to keep": {
        "LLTM": "LLTM, input gate -4",
        "nn.LSTM": "LSTM, forget gate +5, input gate -5",
        "nn.GRU": "GRU, update gate +5",
    },
}
SEEDS, RECALL_LENGTH, RECALL_RATE, WINDOW = range(3), 50, 0.003, 20
Solved = dict[tuple[str, str], list[int | None]]


class Corpus:
    """The sentences of the novel; the last tenth is for validation."""

    def __init__(self) -> None:
        text = read_novel()
        self.vocabulary = vocabulary_of(text)
        sentences = [encode(sentence, self.vocabulary) for sentence in sentences_of(text)]
        tenth = len(sentences) // 10
        self.training, self.validation = sentences[:-tenth], sentences[-tenth:]

    def batches(self, steps: int, seed: int) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        count = len(self.training)
        epochs = math.ceil(steps * BATCH_SIZE / count)
        order = torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])
        return [[self.training[i] for i in rows] for rows in order.split(BATCH_SIZE)[:steps]]


class Learner:
    """A model that counts the bits per character, and the seconds, of its own steps."""

    def __init__(self, name: str, corpus: Corpus, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        layer = LAYERS[name.split(",")[0]]
        self.name, self.form = name, RACE[name]
        self.model = CharLM(len(corpus.vocabulary), EMBEDDING_SIZE, HIDDEN_SIZE, layer)
        self.optimizer = torch.optim.Adam(self.model.parameters(), LEARNING_RATE)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.bits: list[float] = []
        self.seconds = 0.0

    def learn(self, sentences: list[Tensor]) -> None:
        inputs, targets = self.form(sentences)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = loss_of(self.model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.seconds += time.perf_counter() - start
        self.scheduler.step()
        self.bits.append(loss.item() / math.log(2))

    def seconds_for(self, steps: int) -> float:
        return self.seconds / len(self.bits) * steps


def steps_that_fit(corpus: Corpus, batches: list[list[Tensor]], seconds: float) -> int:
    """How many fit into the seconds, with what the readers need after the race."""
    times = []
    for name in READERS.values():
        learner = Learner(name, corpus, len(batches), seed=0)
        learner.learn(batches[0])  # the first call prepares what all later ones use
        learner.seconds, learner.bits = 0.0, []
        for batch in batches[:5]:
            learner.learn(batch)
        times.append(learner.seconds_for(1))
    lltm, *others = times
    each = len(RACE) * lltm + sum(max(0, other - lltm) for other in others)
    return max(1, min(len(batches), int(seconds / each)))


class Samples:
    """What the LLTM writes at a few points of its training."""

    def __init__(self, vocabulary: str, steps: int) -> None:
        self.vocabulary = vocabulary
        self.points = {max(1, round(part * steps)) for part in (0.03, 0.1, 0.3, 1)}
        self.written: list[str] = []

    def show(self, learner: Learner) -> None:
        steps = len(learner.bits)
        if isinstance(learner.model.rnn, lltm_ops.LLTM) and steps in self.points:
            text = write(learner.model, self.vocabulary, "She ", length=80, temperature=0.5)
            self.written.append(f"LLTM after {steps:3} steps: {text}")
            tqdm.write(self.written[-1])


def race(
    learners: list[Learner], batches: list[list[Tensor]], passed: Callable[[Learner], object]
) -> dict[str, float]:
    """Until the first has taken all steps; the seconds that each needs for them.

    The next step belongs to the learner that has used the least time, so all bars move as if each
    learner had a machine of its own.
    """
    steps = len(batches)
    bars = {
        learner.name: tqdm(desc=learner.name, total=steps, bar_format=BAR, disable=None)
        for learner in learners
    }
    while all(len(learner.bits) < steps for learner in learners):
        learner = min(learners, key=lambda learner: learner.seconds)
        learner.learn(batches[len(learner.bits)])
        bar = bars[learner.name]
        bar.set_postfix_str(f"would take {learner.seconds_for(steps):.1f} s", refresh=False)
        bar.update()
        passed(learner)
    for bar in bars.values():
        bar.close()
    return {learner.name: learner.seconds_for(steps) for learner in learners}


def print_times(times: dict[str, float], steps: int) -> None:
    print(f"\n{steps} steps of training take:")
    for name, seconds in times.items():
        print(f"{name:18}{seconds:8.1f} s {seconds / times['LLTM, packed']:6.1f} times as long")


def steps_until_solved(layer: str, seed: int, steps: int) -> int | None:
    """The loss of a step is on new data, so the mean of the last ones says what was learned."""
    options = [f"--steps={steps}", f"--length={RECALL_LENGTH}"]
    args = memory_tasks.command_line().parse_args(options)
    losses = memory_tasks.train("recall", layer, RECALL_RATE, seed, args)[1]
    for step in range(WINDOW, steps + 1):
        if statistics.fmean(losses[step - WINDOW : step]) < memory_tasks.SOLVED:
            return step
    return None


def recall(steps: int) -> Solved:
    """Steps until it recalls, or None, for each seed of each layer and start."""
    cases = [(start, layer) for start, layers in RECALL.items() for layer in layers]
    with ProcessPoolExecutor(
        min(6, os.cpu_count() or 1),
        torch.multiprocessing.get_context("spawn"),
        signal.signal,  # Ctrl-C ends the processes, too
        (signal.SIGINT, signal.SIG_DFL),
    ) as pool:
        futures = {
            case: [
                pool.submit(steps_until_solved, RECALL[case[0]][case[1]], seed, steps)
                for seed in SEEDS
            ]
            for case in cases
        }
        every = [future for futures in futures.values() for future in futures]
        for future in tqdm(every, desc="recall", unit="run", leave=False, disable=None):
            future.result()
        return {case: [future.result() for future in futures[case]] for case in cases}


def print_recall(solved: Solved, steps: int) -> None:
    print(f"Steps until it succeeds, of {steps}, with each of three seeds:")
    for (start, layer), found in solved.items():
        shown = "".join(f"{step or '-':>6}" for step in found)
        print(f"{RECALL[start][layer]:38}{shown}")


def draw(
    path: Path,
    times: dict[str, float],
    readers: dict[str, Learner],
    bits: dict[str, float],
    solved: Solved,
    steps: int,
) -> None:
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    time_axis, text_axis, recall_axis = figure.subplots(1, 3)

    for name, seconds in sorted(times.items(), key=lambda item: item[1], reverse=True):
        alpha = 0.5 if "padded" in name else 1.0
        bar = time_axis.barh(name, seconds, color=COLORS[name.split(",")[0]], alpha=alpha)
        ratio = seconds / times["LLTM, packed"]
        label = f" {seconds:.0f} s" + (f" ({ratio:.1f} times)" if ratio != 1 else "")
        time_axis.bar_label(bar, [label])
    time_axis.set_xlim(0, 1.4 * max(times.values()))
    time_axis.set_title("Speed: training on sentences of any length", loc="left")
    time_axis.set_xlabel(f"seconds for {len(readers['LLTM'].bits)} steps (shorter is better)")

    for layer, learner in readers.items():
        smooth = itertools.accumulate(learner.bits, lambda mean, value: 0.9 * mean + 0.1 * value)
        label = f"{layer}: {bits[layer]:.2f} on unseen text"
        text_axis.plot([*smooth], color=COLORS[layer], label=label)
    text_axis.set_ylim(top=2 * min(bits.values()))
    text_axis.legend(frameon=False)
    text_axis.set_title("Text: guessing the next character of a novel", loc="left")
    text_axis.set(xlabel="step of training", ylabel="bits per character (lower is better)")
    text_axis.grid(alpha=0.3)

    never = 1.12 * steps
    for row, ((_, layer), found) in enumerate(solved.items()):
        for seed, step in zip(SEEDS, found, strict=True):
            height = row + 0.2 * (seed - 1)
            recall_axis.plot(step or never, height, "o" if step else "x", color=COLORS[layer])
    recall_axis.set_yticks(range(len(solved)), [f"{layer}\n{start}" for start, layer in solved])
    recall_axis.invert_yaxis()
    recall_axis.axvspan(1.02 * steps, 1.22 * steps, color="0.93", zorder=0)
    recall_axis.set_xlim(0, 1.22 * steps)
    ticks = [round(steps * part / 4) for part in range(4)]
    recall_axis.set_xticks([*ticks, never], [*map(str, ticks), f"not in\n{steps}"])
    recall_axis.set_title(f"Memory: repeating the first of {RECALL_LENGTH} numbers", loc="left")
    recall_axis.set_xlabel("steps until it succeeds, three seeds (fewer is better)")
    recall_axis.grid(alpha=0.3, axis="x")

    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    titles = " | ".join(axis.get_title(loc="left") for axis in figure.axes)
    figure.savefig(path, dpi=110, metadata={"Title": titles})


def conclusions(
    times: dict[str, float],
    bits: dict[str, float],
    solved: Solved,
    ways: dict[str, tuple[float, float]],
) -> list[str]:
    ratio = {name: f"{seconds / times['LLTM, packed']:.1f}" for name, seconds in times.items()}
    best, *others = sorted(bits, key=bits.__getitem__)
    able = {
        start: ", ".join(
            f"{layer} {len(SEEDS) - solved[start, layer].count(None)}" for layer in layers
        )
        for start, layers in RECALL.items()
    }
    difference = max(difference for difference, _ in ways.values())
    return [
        f"Speed: the LLTM takes {times['LLTM, packed']:.1f} s on packed sentences. nn.LSTM takes "
        f"{ratio['nn.LSTM, packed']} times as long, because each step of its backward fills a "
        "tensor as large as the whole batch (PyTorch issue 149194). On padded sentences, which "
        f"avoid that, it takes {ratio['nn.LSTM, padded']} times as long. A part of this is that "
        "it has four gates, and the LLTM three.",
        f"Text: {best} guesses best, with {bits[best]:.2f} bits per character of unseen text; "
        + " and ".join(f"{layer} needs {bits[layer]:.2f}" for layer in others)
        + ".",
        f"Memory: of {len(SEEDS)} seeds, so many learn to repeat the first of {RECALL_LENGTH} "
        "numbers: " + "; ".join(f"{start}, {counts}" for start, counts in able.items()) + ".",
        f"Ways to run: {', '.join(ways)} differ by {difference:.1g} at most.",
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of each training, at most (400)")
    parser.add_argument("--seconds", type=float, default=70, help="for the novel, about (70)")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0, help="of the models that read the novel")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # matrices of this size gain little from more
    print("1 of 3: an LLTM, nn.LSTM and nn.GRU learn Jane Austen's Persuasion, by sentences.")
    corpus = Corpus()
    batches = corpus.batches(args.steps, args.seed)
    batches = batches[: steps_that_fit(corpus, batches, args.seconds)]
    learners = {name: Learner(name, corpus, len(batches), args.seed) for name in RACE}
    samples = Samples(corpus.vocabulary, len(batches))
    times = race([*learners.values()], batches, samples.show)
    print_times(times, len(batches))
    readers = {layer: learners[name] for layer, name in READERS.items()}
    print("nn.LSTM and nn.GRU take their remaining steps, padded, to compare what was learned.")
    for learner in readers.values():
        remaining = batches[len(learner.bits) :]
        for batch in tqdm(remaining, desc=learner.name, unit="step", leave=False, disable=None):
            learner.learn(batch)
    bits = {
        layer: bits_per_character(learner.model, corpus.validation)
        for layer, learner in readers.items()
    }
    model = readers["LLTM"].model
    torch.save(model.state_dict(), args.output / "model.pt")
    (args.output / "sample.txt").write_text("\n".join(samples.written) + "\n")

    print("\n2 of 3: the trained LLTM runs in several ways, which must agree.", flush=True)
    ways = compare(model, padded(corpus.validation[:BATCH_SIZE])[0])

    print(f"\n3 of 3: all learn to repeat the first of {RECALL_LENGTH} numbers.", flush=True)
    solved = recall(args.steps)
    print_recall(solved, args.steps)

    picture = args.output / "demo.png"
    draw(picture, times, readers, bits, solved, args.steps)
    print("\nWhat this run found")
    for sentence in conclusions(times, bits, solved, ways):
        print(textwrap.fill(sentence, 100, initial_indent="- ", subsequent_indent="  "))
    print(f"\nThe picture: {picture}. The model and what it wrote are there, too.")
    print("docs/training.md says when to choose an LLTM. make test runs the tests.")
    return 0 if agree(ways) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
