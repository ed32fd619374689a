"""The model that char_lm.py and train_distributed.py train, and the text that it learns. The rest
is for char_lm.py alone: its options, and how its checkpoint reaches the disk whole."""

import argparse
import contextlib
import functools
import hashlib
import math
import operator
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lltm_ops

# Jane Austen's Persuasion (1818), which is in the public domain.
NOVEL = Path(__file__).with_name("persuasion.txt")
RNNS = {"LLTM": lltm_ops.LLTM, "LSTM": nn.LSTM, "GRU": nn.GRU}

# What a checkpoint must share with the run that resumes from it, beside the text. The number of
# steps is part of it, for the learning rate follows it.
CONFIG = ("steps", "batch_size", "length", "embedding_size", "hidden_size", "learning_rate", "seed")


class UsageError(Exception):
    """Something the user gave cannot be used: the message says what, in one sentence."""


@contextlib.contextmanager
def or_usage_error(sentence: str, *errors: type[BaseException]) -> Iterator[None]:
    """Shows the user the sentence, in place of a traceback, when one of these errors comes up."""
    try:
        yield
    except UsageError:
        raise
    except errors as error:
        reason = getattr(error, "strerror", None)
        raise UsageError(f"{sentence}: {reason}" if reason else sentence) from error


class CharLM(nn.Module):
    """Embedding, a recurrent layer and a linear one: logits of each next character."""

    def __init__(
        self, vocabulary_size: int, embedding_size: int, hidden_size: int, rnn: str = "LLTM"
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.rnn = RNNS[rnn](embedding_size, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, vocabulary_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0])


@dataclass
class Corpus:
    """A text as chunks of characters, each with one more to predict.

    Attributes:
        vocabulary: the distinct characters.
        batches: ``[batches, batch_size, length + 1]``. Row i of one batch goes on in row i of the
            next, so a batch is drawn from all over the text, in an order that needs no random
            numbers.
        validation: ``[chunks, length + 1]``, from the last tenth of the text.
        opening: the first words of the validation part.
        digest: identifies the text.
    """

    vocabulary: str
    batches: Tensor
    validation: Tensor
    opening: str
    digest: str

    @classmethod
    def of(cls, text: str, batch_size: int, length: int, device: torch.device) -> "Corpus":
        least = 10 * max(math.ceil((batch_size * length + 1) / 9), length + 1)
        if len(text) < least:
            raise UsageError(
                f"the text is too short: expected at least {least:,} characters for --batch-size "
                f"{batch_size} and --length {length}, but got {len(text):,}"
            )
        vocabulary = "".join(sorted(set(text)))
        tokens = encode(text, vocabulary).to(device)
        training = len(text) - len(text) // 10
        chunks = tokens[:training].unfold(0, length + 1, length)
        count = len(chunks) // batch_size
        return cls(
            vocabulary,
            chunks[: count * batch_size].view(batch_size, count, length + 1).transpose(0, 1),
            tokens[training:].unfold(0, length + 1, length),
            first_words(text[training:]),
            hashlib.sha256(text.encode()).hexdigest(),
        )


@dataclass
class Training:
    """Everything that a checkpoint restores.

    Attributes:
        bits: bits per character of each step.
        validation_bits: step, and bits per character of the validation text after it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    config: dict[str, Any]
    vocabulary: str
    bits: list[float] = field(default_factory=list)
    validation_bits: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: nn.Module, config: dict[str, Any], vocabulary: str, args: argparse.Namespace
    ) -> "Training":
        """At its beginning."""
        optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
        return cls(model, optimizer, scheduler, config, vocabulary)

    def check_config(self, path: Path, config: dict[str, Any]) -> None:
        """Raises UsageError unless a checkpoint with this configuration is of this training."""
        for name, expected in self.config.items():
            if (got := config.get(name)) != expected:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"--resume: {path} was trained on another text"
                    if name == "text"
                    else f"--resume: {path} was trained with {option} {got!r}, not {expected}"
                )


def first_words(text: str, characters: int = 40) -> str:
    """Whole words where the text has some, and so many characters at the least."""
    words = re.search(rf"(?<=\s)[^\W\d_].{{{characters - 1}}}\S*", text, re.DOTALL)
    return words[0] if words else text[:characters]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read --text {path}: {reason}") from error


def encode(text: str, vocabulary: str) -> Tensor:
    index = {character: i for i, character in enumerate(vocabulary)}
    if unknown := sorted(set(text) - set(vocabulary)):
        raise UsageError(f"--prompt has characters that the text has not: {''.join(unknown)!r}")
    return torch.tensor([index[character] for character in text])


def loss_of(model: nn.Module, chunks: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(chunks[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), chunks[:, 1:].flatten(), reduction=reduction)


def between(least: int | float, most: int | float) -> Callable[[str], int | float]:
    kind = type(least)
    noun = "a whole number" if kind is int else "a number"

    def parse(value: str) -> int | float:
        try:
            number = kind(value)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            wanted = f"expected {noun} from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{wanted}, but got {value}")
        return number

    return parse


positive_int = between(1, 99_999_999)
positive_float = between(1e-30, 1e30)  # well inside the range of float32


def add_option(parser: argparse.ArgumentParser, option: str, help: str, **settings: Any) -> None:
    shown = " (%(default)s)" if "default" in settings else ""
    parser.add_argument(option, help=help + shown, **settings)


def training_options(description: str, output: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add = functools.partial(add_option, parser)
    novel = "UTF-8 text; if not given, Jane Austen's Persuasion"
    parser.add_argument("--text", help=novel, type=Path, metavar="FILE", default=NOVEL)
    add("--output", "what training leaves", type=Path, metavar="DIR", default=output)
    add("--resume", "continue from the checkpoint in --output", action="store_true")
    # Several threads gain little on matrices of this size, and come to a halt on a busy machine.
    add("--threads", "of a CPU", type=between(1, 1024), metavar="N", default=1)
    add("--steps", "training steps in all", type=positive_int, metavar="N", default=800)
    add("--batch-size", "chunks per step", type=positive_int, metavar="N", default=32)
    add("--length", "characters per chunk", type=positive_int, metavar="N", default=64)
    add("--embedding-size", "inputs of the layer", type=between(1, 65_536), metavar="N", default=64)
    add("--hidden-size", "state of the layer", type=between(1, 65_536), metavar="N", default=256)
    add("--learning-rate", "falls to 0 from", type=positive_float, metavar="X", default=0.01)
    seed = between(0, 2**63 - 1)
    add("--seed", "on a CPU, the same gives the same model", type=seed, metavar="N", default=0)
    return parser


def config_of(corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    return {"text": corpus.digest} | {name: getattr(args, name) for name in CONFIG}


def new_model(corpus: Corpus, args: argparse.Namespace, rnn: str = "LLTM") -> CharLM:
    sizes = len(corpus.vocabulary), args.embedding_size, args.hidden_size
    problem = "there is no memory for a model with --embedding-size {} and --hidden-size {}"
    with or_usage_error(problem.format(*sizes[1:]), RuntimeError, MemoryError):
        return CharLM(*sizes, rnn).to(args.device)


def make_output(folder: Path) -> None:
    with or_usage_error(f"cannot write to --output {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def check_resume(args: argparse.Namespace, found: bool) -> None:
    """No training goes on without a checkpoint, and none begins over one."""
    if args.resume and not found:
        raise UsageError(f"--resume: there is no checkpoint in {args.output}")
    if found and not args.resume:
        raise UsageError(
            f"there is a checkpoint in {args.output} already: expected --resume or another --output"
        )


def loading(checkpoint: Path) -> contextlib.AbstractContextManager[None]:
    """Whatever is wrong with a checkpoint, the user learns which it is."""
    problem = f"--resume: {checkpoint} is not a complete checkpoint of this program"
    return or_usage_error(problem, Exception)


def same_kind(saved: Any, expected: Any) -> bool:
    """Whether types, keys, lengths and shapes are the same throughout: loading checks not all."""
    if isinstance(expected, Tensor):
        what = operator.attrgetter("shape", "dtype", "layout")
        return isinstance(saved, Tensor) and what(saved) == what(expected)
    if type(saved) is not type(expected):
        return False
    if isinstance(expected, dict):
        return saved.keys() == expected.keys() and all(
            same_kind(saved[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(saved) == len(expected) and all(map(same_kind, saved, expected))
    return True


def sync(path: Path) -> None:
    """Waits until a file, or what a folder lists, is on the disk and survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(finished: Path, path: Path) -> None:
    """Renames a file or folder, which has its new name only once it is on the disk."""
    sync(finished)
    finished.replace(path)
    sync(path.parent)


def write(path: Path, data: bytes) -> None:
    """Replaces the file in one go: whenever this is cut short, one whole file remains."""
    partial = path.with_suffix(".tmp")
    with or_usage_error(f"cannot write {path}", OSError):
        try:
            partial.write_bytes(data)
            put_in_place(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
