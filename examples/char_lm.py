"""Trains a character-level language model with an LLTM layer, and shows what the layer can do.

The model reads a novel (or ``--text``) in chunks, each from a state of zeros: an LLTM has no forget
gate, so a cell state carried from chunk to chunk only ever adds up, in training past 100,000.

Afterwards the trained model runs in four ways, nn.LSTM and nn.GRU learn the same text, and all of
them try to repeat the first of 100 numbers, for which nothing may fade.
"""

import argparse
import copy
import functools
import io
import math
import signal
import statistics
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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

import lltm_ops

try:
    import demo_report
    import memory_tasks
    from tqdm import tqdm
    from ways_to_run import compare, seconds_per_call, step_by_step
except ImportError as error:
    sys.exit(f"char_lm.py: {error.name} is missing: pip install tqdm matplotlib")

# All three run as they are made, and with gates set to keep what comes first. docs/training.md
# has more of them, and more seeds.
RECALL = (
    "LLTM",
    "LLTM, input gate -4",
    "LSTM",
    "LSTM, forget gate +5, input gate -5",
    "GRU",
    "GRU, update gate +5",
)
CHECKPOINT, PICTURE, SAMPLE = "checkpoint.pt", "learning.png", "sample.txt"


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


def train(
    training: Training, corpus: Corpus, args: argparse.Namespace, checkpoint: Path | None = None
) -> bool:
    """Trains up to ``--steps``, and saves on the way; false if Ctrl-C ended it."""
    size = args.batch_size * args.length
    first = len(training.bits)
    layer = type(training.model.rnn).__name__
    bar = tqdm(
        desc=layer,
        total=args.steps * size,
        initial=first * size,
        unit="char",
        unit_scale=True,
        mininterval=0.5,
        leave=False,
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
                    f"{layer:4} step {step + 1:5}: bits per character {recent:.3f} in training, "
                    f"{bits:.3f} in validation"
                )
                if checkpoint:
                    save(training, checkpoint)
            if stop.is_set():
                break
    if checkpoint:
        save(training, checkpoint)
    return not stop.is_set()


@torch.no_grad()
def sample(model: CharLM, vocabulary: str, prompt: str, args: argparse.Namespace) -> str:
    """Characters drawn one by one from what the model expects after the prompt."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(args.seed)
    tokens, state, text = encode(prompt, vocabulary)[None], None, ""
    for _ in range(args.sample_length):
        output, state = model.rnn(model.embedding(tokens.to(device)), state)
        logits = model.head(output[0, -1])
        probabilities = torch.softmax(logits.cpu() / args.temperature, dim=0)
        tokens = torch.multinomial(probabilities, 1, generator=generator)[None]
        text += vocabulary[int(tokens)]
    return text


def show_sample(model: CharLM, corpus: Corpus, args: argparse.Namespace) -> None:
    prompt = args.prompt or corpus.opening
    written = sample(model, corpus.vocabulary, prompt, args)
    shown = (
        f"The LLTM was given these words:\n{textwrap.indent(prompt, '    ')}\n\n"
        f"It wrote on, character by character (temperature {args.temperature:g}):\n"
        f"{textwrap.indent(written, '    ')}\n"
    )
    print(f"\n{shown}")
    write(args.output / SAMPLE, shown.encode())


def time_training(
    trainings: dict[str, Training], corpus: Corpus, args: argparse.Namespace
) -> dict[str, float]:
    """Prints a table of what the layers learned, and how fast; seconds per step."""
    timed = {layer: copy.deepcopy(training) for layer, training in trainings.items()}
    loop = step_by_step(trainings["LLTM"].model, lltm_ops.forward)
    timed["LLTM, cell in a loop"] = Training.of(loop, {}, corpus.vocabulary, args)
    batch = corpus.batches[0]
    steps = {layer: functools.partial(train_step, training) for layer, training in timed.items()}
    times = seconds_per_call(steps, batch)
    characters = batch[:, 1:].numel()
    print("\nLearning the same text:")
    print(f"{'':22}{'parameters':>12}{'bits per character':>20}{'epoch':>10}{'characters/s':>14}")
    for layer, seconds in times.items():
        parameters = sum(p.numel() for p in timed[layer].model.parameters())
        known = trainings.get(layer)
        bits = f"{known.validation_bits[-1][1]:.3f}" if known else ""
        print(
            f"{layer:22}{parameters:12,}{bits:>20}{seconds * len(corpus.batches):8.1f} s"
            f"{characters / seconds:14,.0f}"
        )
    print("bits per character: of the validation text, after as many steps; epoch: training only.")
    return times


def recall(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Losses while each layer learns to say the first of 100 values, and its error at the end."""
    settings = memory_tasks.command_line().parse_args([f"--steps={args.recall_steps}"])
    losses, errors = {}, {}
    for layer in RECALL:
        model, losses[layer] = memory_tasks.train("recall", layer, 0.01, args.seed, settings)
        errors[layer] = memory_tasks.final_loss(model, "recall", settings.length)
        print(f"{layer:36}squared error {errors[layer]:.5f}", flush=True)
    print(f"{'always the mean':36}squared error {demo_report.CHANCE:.5f}")
    return losses, errors


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
    add("--recall-steps", "of memory", type=positive_int, metavar="N", default=600)
    add("--skip-compare", "only train, and print a sample", action="store_true")
    add("--anew", "without --resume: replace what is in --output", action="store_true")
    return parser


def prepare(args: argparse.Namespace) -> tuple[Training, Corpus]:
    corpus = Corpus.of(read_text(args.text), args.batch_size, args.length, args.device)
    encode(args.prompt or "", corpus.vocabulary)
    make_output(args.output)
    checkpoint = args.output / CHECKPOINT
    anew = args.anew and not args.resume
    check_resume(args, checkpoint.exists() and not anew)
    torch.manual_seed(args.seed)
    training = Training.of(
        new_model(corpus, args), config_of(corpus, args), corpus.vocabulary, args
    )
    if args.resume:
        load(training, checkpoint, args.device)
    if anew:
        for name in (CHECKPOINT, PICTURE, SAMPLE):
            (args.output / name).unlink(missing_ok=True)
    return training, corpus


def heading(text: str) -> None:
    print(f"\n--- {text}", flush=True)


def stopped(training: Training, args: argparse.Namespace) -> int:
    print(
        f"Stopped after step {len(training.bits)} of the first layer. The same options and "
        f"--resume continue from {args.output} (after a plain make demo: make demo "
        "DEMO_ARGS=--resume)."
    )
    return 130


def run(args: argparse.Namespace) -> int:
    training, corpus = prepare(args)
    print(
        f"{corpus.batches.numel():,} characters, {len(corpus.vocabulary)} different ones; "
        f"{sum(p.numel() for p in training.model.parameters()):,} parameters; {args.device}; "
        f"{args.threads} CPU thread{'s' * (args.threads > 1)}"
    )
    if args.device.type == "cuda" and lltm_ops.build_info()["cuda"] == "not built":
        print("lltm_ops was built without CUDA (no toolkit?): slower formulas run in its place.")
    print("The times below are those of the default options on an idle core.")
    heading(f"1 of 4: an LLTM learns {args.text.name} (a minute and a half)")
    done = train(training, corpus, args, args.output / CHECKPOINT)
    trainings = {"LLTM": training}
    demo_report.draw(trainings, {}, args.output / PICTURE)
    if not done:
        return stopped(training, args)
    try:
        show_sample(training.model, corpus, args)
        return 0 if args.skip_compare else compare_all(trainings, corpus, args)
    except KeyboardInterrupt:
        return stopped(training, args)


def compare_all(trainings: dict[str, Training], corpus: Corpus, args: argparse.Namespace) -> int:
    training = trainings["LLTM"]
    heading("2 of 4: the trained model runs in several ways (half a minute)")
    agree, calls = compare(training.model, corpus.validation[: args.batch_size, :-1].contiguous())
    heading("3 of 4: nn.LSTM and nn.GRU learn the same text (three and a half minutes)")
    for layer in ("LSTM", "GRU"):
        torch.manual_seed(args.seed)
        peer = Training.of(new_model(corpus, args, layer), {}, corpus.vocabulary, args)
        trainings[layer] = peer
        if not train(peer, corpus, args):
            return stopped(training, args)
    steps = time_training(trainings, corpus, args)
    heading("4 of 4: all of them try to repeat the first of 100 numbers (a minute)")
    losses, errors = recall(args)
    demo_report.draw(trainings, losses, args.output / PICTURE)
    demo_report.print_end(
        [
            demo_report.about_text(trainings),
            demo_report.about_recall(losses, errors),
            demo_report.about_speed(steps, calls),
        ],
        {
            "picture": args.output / PICTURE,
            "checkpoint": args.output / CHECKPOINT,
            "sample": args.output / SAMPLE,
        },
    )
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
