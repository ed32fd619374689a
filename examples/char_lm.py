"""Trains a character-level language model with an LLTM layer, then runs it four ways.

The model reads Python's own documentation (or ``--text``) in chunks. An LLTM has no forget gate, so
its cell state only ever adds up: carried from chunk to chunk it grew past 100,000, and validation
ended at 4.8 bits per character. Every chunk starts from zeros instead, which brings it to 2.0.

Afterwards the trained model runs eagerly, through torch.jit.script, torch.compile and torch.export,
beside the same model in plain PyTorch: all have to agree, and each is timed. Last, the same model
with nn.LSTM and with nn.GRU in place of the layer learns the same text.
"""

import argparse
import copy
import functools
import io
import math
import signal
import statistics
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from language_model import (
    CharLM,
    Corpus,
    Training,
    UsageError,
    add_option,
    check_resume,
    config_of,
    encode,
    loading,
    loss_of,
    make_output,
    new_model,
    positive_float,
    positive_int,
    read_text,
    same_kind,
    training_options,
    write,
)
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import lltm_ops

try:
    from matplotlib.figure import Figure
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"char_lm.py: {error.name} is missing: pip install lltm_ops[demo]")

Way = Callable[[Tensor], Tensor]
CHECKPOINT = "checkpoint.pt"
# Trained weights amplify the rounding of one step in the next.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


class LoopOverTime(nn.Module):
    """What the layer computes, step by step: by its operator for one step, or in plain PyTorch."""

    def __init__(self, layer: lltm_ops.LLTM, step: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layer = layer
        self.step = step

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        h = cell = input.new_zeros(len(input), self.layer.hidden_size)
        outputs = []
        for x in input.unbind(1):
            h, cell = self.step(x, self.layer.weights_l0, self.layer.bias_l0, h, cell)
            outputs.append(h)
        return torch.stack(outputs, dim=1), None


def step_by_step(model: CharLM, step: Callable[..., tuple[Tensor, Tensor]]) -> CharLM:
    """A copy that runs the layer so."""
    model = copy.deepcopy(model)
    model.rnn = LoopOverTime(model.rnn, step)
    return model


@torch.no_grad()
def validate(model: CharLM, chunks: Tensor, batch_size: int) -> float:
    """Bits per character."""
    total = sum(loss_of(model, batch, "sum").item() for batch in chunks.split(batch_size))
    return total / chunks[:, 1:].numel() / math.log(2)


def train_step(training: Training, chunks: Tensor) -> float:
    training.optimizer.zero_grad()
    loss = loss_of(training.model, chunks)
    loss.backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), max_norm=1.0)
    training.optimizer.step()
    training.scheduler.step()
    return loss.item()


def state_of(training: Training) -> dict[str, Any]:
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "step": len(training.bits),
        "config": training.config,
        "vocabulary": training.vocabulary,
        "bits": training.bits,
        "validation_bits": training.validation_bits,
    }


def save(training: Training, path: Path) -> None:
    file = io.BytesIO()
    torch.save(state_of(training), file)
    write(path, file.getvalue())


def load(training: Training, path: Path, device: torch.device) -> None:
    with loading(path):
        saved = torch.load(path, map_location=device, weights_only=True)
        training.check_config(path, saved["config"])
        expected = state_of(training)
        expected["optimizer"]["state"] = {  # which Adam has from its first step on
            i: {"step": torch.tensor(0.0), "exp_avg": parameter, "exp_avg_sq": parameter}
            for i, parameter in enumerate(training.model.parameters())
        }
        expected["bits"] = [0.0] * len(saved["bits"])
        expected["validation_bits"] = [(0, 0.0)] * len(saved["validation_bits"])
        if not same_kind(saved, expected):
            raise TypeError("what was saved is not what this program saves")
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        training.scheduler.load_state_dict(saved["scheduler"])
        training.bits = saved["bits"]
        training.validation_bits = saved["validation_bits"]


@contextmanager
def interrupts_as_request() -> Iterator[threading.Event]:
    """Ctrl-C sets the event and cuts no step in half; a second one interrupts as usual."""
    requested = threading.Event()

    def request(*_: object) -> None:
        requested.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, request)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, previous)


def train(training: Training, corpus: Corpus, args: argparse.Namespace) -> bool:
    """Trains up to ``--steps``; false if Ctrl-C ended it. Leaves a checkpoint and a picture."""
    checkpoint = args.output / CHECKPOINT
    size = args.batch_size * args.length
    first = len(training.bits)
    bar = tqdm(
        total=args.steps * size, initial=first * size, unit="char", unit_scale=True, mininterval=0.5
    )
    with interrupts_as_request() as stop, bar:
        for step in range(first, args.steps):
            loss = train_step(training, corpus.batches[step % len(corpus.batches)])
            if not math.isfinite(loss):
                sys.exit(f"The loss is {loss} after step {step}: try a smaller --learning-rate.")
            training.bits.append(loss / math.log(2))
            bar.set_postfix(loss=f"{loss:.3f}", bpc=f"{training.bits[-1]:.3f}", refresh=False)
            bar.update(size)
            if (step + 1) % args.validate_every == 0 or step + 1 == args.steps:
                bits = validate(training.model, corpus.validation, args.batch_size)
                training.validation_bits.append((step + 1, bits))
                recent = statistics.fmean(training.bits[-args.validate_every :])
                bar.write(
                    f"step {step + 1:5}: bits per character {recent:.3f} in training, "
                    f"{bits:.3f} in validation"
                )
                save(training, checkpoint)
            if stop.is_set():
                break
    save(training, checkpoint)
    plot(training, args.output / "loss.png")
    return not stop.is_set()


def plot(training: Training, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    smoothed = accumulate(training.bits, lambda mean, bits: 0.95 * mean + 0.05 * bits)
    axes.plot(range(1, len(training.bits) + 1), list(smoothed), label="training, smoothed")
    if training.validation_bits:
        axes.plot(*zip(*training.validation_bits, strict=True), "o-", label="validation")
    axes.set(xlabel="step", ylabel="bits per character", title="Character-level LLTM")
    axes.grid(alpha=0.3)
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, dpi=150)
    write(path, file.getvalue())


@torch.no_grad()
def sample(
    model: CharLM, vocabulary: str, prompt: str, length: int, temperature: float, seed: int
) -> str:
    """The prompt, and characters drawn one by one from what the model expects after it."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens, state = encode(prompt, vocabulary)[None], None
    text = prompt
    for _ in range(length):
        output, state = model.rnn(model.embedding(tokens.to(device)), state)
        logits = model.head(output[0, -1])
        probabilities = torch.softmax(logits.cpu() / temperature, dim=0)
        tokens = torch.multinomial(probabilities, 1, generator=generator)[None]
        text += vocabulary[int(tokens)]
    return text


def script(model: CharLM) -> Way:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.script.* is deprecated")
        return torch.jit.script(model)


def export(model: CharLM, tokens: Tensor) -> Way:
    """Exported for any number of rows and characters."""
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("time")},)
    return torch.export.export(model, (tokens,), dynamic_shapes=shapes).module()


def seconds_per_call(
    ways: dict[str, Callable[[Tensor], Any]], argument: Tensor
) -> dict[str, float]:
    """The median of each one's best round: other programs can only add to the time of a round.

    The ways take turns, so that a quiet moment is nobody's alone.
    """
    timers = {
        name: Timer(
            "way(argument)",
            globals={"way": way, "argument": argument},
            num_threads=torch.get_num_threads(),
        )
        for name, way in ways.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for timer in timers.values():
        timer.timeit(3)  # compiles, and warms the caches
    for _ in range(10):
        for name, timer in timers.items():
            times[name].append(timer.blocked_autorange(min_run_time=0.1).median)
    return {name: min(values) for name, values in times.items()}


@torch.no_grad()
def compare(model: CharLM, chunks: Tensor) -> bool:
    """Prints a table of all ways to run the model; whether they agree."""
    tokens = chunks[:, :-1].contiguous()
    ways: dict[str, Way] = {"eager": model}
    if sys.version_info < (3, 14):
        ways["torch.jit.script"] = script(model)
    else:
        print("torch.jit.script is left out: PyTorch does not support it on Python 3.14 and later.")
    ways["torch.compile"] = torch.compile(model, fullgraph=True)
    ways["torch.export"] = export(model, tokens)
    count = len(ways)
    ways["cell in a loop"] = step_by_step(model, lltm_ops.forward)
    ways["plain PyTorch"] = step_by_step(model, lltm_ops.reference)

    times = seconds_per_call(ways, tokens)
    expected = model(tokens)
    failures = []
    print(f"\nOne call, for {tokens.shape[1]} characters of each of {tokens.shape[0]} texts:")
    print(f"{'':18}{'difference':>12}{'time per call':>15}{'speed-up':>10}")
    for name, way in ways.items():
        actual = way(tokens)
        difference = (actual - expected).abs().max().item()
        ratio = times["plain PyTorch"] / times[name]
        print(f"{name:18}{difference:12.1e}{times[name] * 1e3:12.2f} ms{ratio:9.2f}x")
        try:
            torch.testing.assert_close(actual, expected, **TOLERANCE)
        except AssertionError as error:
            failures.append(f"{name} does not agree with eager: {error}")
    print("difference: largest of a logit from eager; speed-up: over plain PyTorch.")
    print("\n".join(failures) or f"The {count} ways agree, and plain PyTorch with them.")
    return not failures


def learn(model: CharLM, corpus: Corpus, args: argparse.Namespace) -> Training:
    """Does what :func:`train` does, without a checkpoint, for a model to compare with."""
    training = Training.of(model, {}, corpus.vocabulary, args)
    with tqdm(total=args.steps, unit="step", desc=type(model.rnn).__name__, leave=False) as bar:
        for step in range(args.steps):
            loss = train_step(training, corpus.batches[step % len(corpus.batches)])
            training.bits.append(loss / math.log(2))
            bar.update()
    bits = validate(model, corpus.validation, args.batch_size)
    training.validation_bits.append((args.steps, bits))
    return training


def compare_layers(training: Training, corpus: Corpus, args: argparse.Namespace) -> None:
    """Prints a table of what LLTM, LSTM and GRU learn, and how fast."""
    trainings = {"LLTM": training}
    for rnn in ("LSTM", "GRU"):
        torch.manual_seed(args.seed)
        trainings[rnn] = learn(new_model(corpus, args, rnn), corpus, args)
    timed = {rnn: copy.deepcopy(training) for rnn, training in trainings.items()}
    before = step_by_step(training.model, lltm_ops.forward)
    timed["LLTM, cell in a loop"] = Training.of(before, {}, corpus.vocabulary, args)
    batch = corpus.batches[0]
    steps = {rnn: functools.partial(train_step, training) for rnn, training in timed.items()}
    times = seconds_per_call(steps, batch)
    characters = batch[:, 1:].numel()
    print("\nLearning the same text:")
    print(f"{'':22}{'parameters':>12}{'bits per character':>20}{'epoch':>10}{'characters/s':>14}")
    for rnn, seconds in times.items():
        parameters = sum(p.numel() for p in timed[rnn].model.parameters())
        known = trainings.get(rnn)
        bits = f"{known.validation_bits[-1][1]:.3f}" if known else ""
        print(
            f"{rnn:22}{parameters:12,}{bits:>20}{seconds * len(corpus.batches):8.1f} s"
            f"{characters / seconds:14,.0f}"
        )
    print("bits per character: of the validation text, after as many steps; epoch: training only.")


def usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        lltm_ops.LLTMCell(1, 1, device=device)(torch.zeros(1, 1, device=device))[0].item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{name} cannot be used: {reason}") from error
    return device


def command_line() -> argparse.ArgumentParser:
    parser = training_options(__doc__.splitlines()[0], "runs/char_lm")
    add = functools.partial(add_option, parser)
    add(
        "--device",
        "as cpu or cuda:0",
        type=usable_device,
        default="cuda" if torch.cuda.is_available() else "cpu",
    )
    add("--validate-every", "steps; saves, too", type=positive_int, metavar="N", default=200)
    add("--prompt", "beginning of the sample; if not given, that of the validation text")
    add("--sample-length", "characters to generate", type=positive_int, metavar="N", default=400)
    add("--temperature", "1: as predicted; less: safer", type=positive_float, default=0.7)
    add("--skip-compare", "only train, and print a sample", action="store_true")
    return parser


def prepare(args: argparse.Namespace) -> tuple[Training, Corpus]:
    corpus = Corpus.of(read_text(args.text), args.batch_size, args.length, args.device)
    encode(args.prompt or "", corpus.vocabulary)
    make_output(args.output)
    checkpoint = args.output / CHECKPOINT
    check_resume(args, checkpoint.exists())
    torch.manual_seed(args.seed)
    training = Training.of(
        new_model(corpus, args), config_of(corpus, args), corpus.vocabulary, args
    )
    if args.resume:
        load(training, checkpoint, args.device)
    return training, corpus


def run(args: argparse.Namespace) -> int:
    training, corpus = prepare(args)
    print(
        f"{corpus.batches.numel():,} characters, {len(corpus.vocabulary)} different ones; "
        f"{sum(p.numel() for p in training.model.parameters()):,} parameters; {args.device}; "
        f"{args.threads} CPU thread{'s' * (args.threads > 1)}"
    )
    if args.device.type == "cuda" and lltm_ops.build_info()["cuda"] == "not built":
        print("lltm_ops was built without CUDA (no toolkit?): slower formulas run in its place.")
    if not train(training, corpus, args):
        print(f"Stopped after step {len(training.bits)}; --resume continues from {args.output}.")
        return 130
    model = training.model.eval()
    print(f"\nA sample, temperature {args.temperature}:")
    prompt = args.prompt or corpus.opening
    print(sample(model, corpus.vocabulary, prompt, args.sample_length, args.temperature, args.seed))
    if args.skip_compare:
        return 0
    agree = compare(model, corpus.validation[: args.batch_size])
    model.train()
    compare_layers(training, corpus, args)
    return 0 if agree else 1


def main(argv: list[str] | None = None) -> int:
    parser = command_line()
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        return run(args)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
