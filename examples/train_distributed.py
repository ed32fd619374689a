"""Trains the language model of char_lm.py on many processes, with DDP or FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py --strategy fsdp

The batch of a step is that of char_lm.py, whatever the number of processes: each computes its rows
of it, so that the model learns the same on one process as on many, but for rounding. A checkpoint
is written by all processes together, and read by any number of them.
"""

import argparse
import functools
import gc
import json
import math
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language_model import (
    CharLM,
    Corpus,
    Training,
    UsageError,
    add_option,
    check_resume,
    config_of,
    loading,
    loss_of,
    make_output,
    new_model,
    or_usage_error,
    positive_int,
    put_in_place,
    read_text,
    same_kind,
    training_options,
    write,
)
from safe_checkpoint import SafeReader
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

STEP_FOLDER = "step_????????"


def parallel(model: CharLM, args: argparse.Namespace) -> nn.Module:
    """The model as it averages gradients over processes; with FSDP2, each holds a shard of it."""
    if args.strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    precision = MixedPrecisionPolicy()
    if args.bf16:
        # Gradients are summed, and the loss computed, in float32.
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    # The outputs are views, and FSDP2 warns of writing into them, which nothing here does.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    for layer in model.children():
        fully_shard(layer, mp_policy=precision)
    return fully_shard(model, mp_policy=precision)


@contextmanager
def gradients_averaged(model: nn.Module, averaged: bool) -> Iterator[None]:
    """Whether backward ends in communication, or adds to the gradients of this process alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(averaged)
        yield
    elif averaged:
        yield
    else:
        with model.no_sync():
            yield


def train_step(training: Training, batch: Tensor, args: argparse.Namespace) -> float:
    """One step on this process' rows of the batch; their bits per character."""
    training.optimizer.zero_grad()
    autocasts = args.bf16 and args.strategy == "ddp"
    micro_batches = batch.chunk(dist.get_world_size())[dist.get_rank()].chunk(args.accumulate)
    total = torch.zeros((), device=args.device)
    for i, micro_batch in enumerate(micro_batches, start=1):
        with gradients_averaged(training.model, i == len(micro_batches)):
            with torch.autocast(args.device.type, torch.bfloat16, enabled=autocasts):
                loss = loss_of(training.model, micro_batch) / len(micro_batches)
            loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(training.model.parameters(), max_norm=1.0)
    training.optimizer.step()
    training.scheduler.step()
    return total.item() / math.log(2)


def mean_over_processes(values: list[float], device: torch.device) -> list[float]:
    means = torch.tensor(values, device=device) / dist.get_world_size()
    dist.all_reduce(means)
    return means.tolist()


@torch.no_grad()
def validate(model: nn.Module, chunks: Tensor, batch_size: int) -> float:
    """Bits per character. All processes run the model equally often, as FSDP2 needs it."""
    processes = dist.get_world_size()
    rounds = math.ceil(len(chunks) / batch_size)
    mine = chunks.tensor_split(rounds * processes)[dist.get_rank() :: processes]
    total = torch.stack([loss_of(model, piece, "sum") for piece in mine]).sum()
    dist.all_reduce(total)
    return total.item() / chunks[:, 1:].numel() / math.log(2)


def save(training: Training, folder: Path) -> None:
    """Writes a checkpoint that has its name only once it is complete, then removes those before."""
    checkpoint = folder / f"step_{len(training.bits):08}"
    partial = checkpoint.with_suffix(".partial")
    model, optimizer = get_state_dict(training.model, training.optimizer)
    rest = {
        "config": training.config,
        "scheduler": training.scheduler.state_dict(),
        "bits": training.bits,
    }

    def begin() -> None:
        remove(folder.glob("step_*.partial"))
        partial.mkdir()
        write(partial / "training.json", json.dumps(rest).encode())

    def finish() -> None:
        older = list(folder.glob(STEP_FOLDER))
        put_in_place(partial, checkpoint)
        remove(older)

    try:
        with or_usage_error(f"cannot write to --output {folder}", OSError, dcp.CheckpointException):
            in_first_process(begin)
            # Only tensors, for anything else would be pickled; of Adam's options, only the learning
            # rate changes, and the scheduler knows it.
            tensors = {"model": model, "optimizer": {"state": optimizer["state"]}}
            dcp.save(tensors, checkpoint_id=partial)
            in_first_process(finish)
    except UsageError:
        in_first_process(functools.partial(shutil.rmtree, partial, ignore_errors=True))
        raise


def remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def in_first_process(act: Callable[[], None]) -> None:
    """The others wait for it, and fail if it does."""
    failure: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            act()
        except (OSError, UsageError) as error:
            failure = [error]
    dist.broadcast_object_list(failure)
    if failure[0]:
        raise failure[0]


def latest(folder: Path) -> Path | None:
    """The same for all processes, also where they do not see a new file at the same moment."""
    found = [max(folder.glob(STEP_FOLDER), default=None)]
    dist.broadcast_object_list(found)
    return found[0]


def load(training: Training, checkpoint: Path) -> None:
    """Takes a checkpoint of the same training, of any number of processes and either strategy."""
    with loading(checkpoint, dcp.CheckpointException):
        rest = json.loads((checkpoint / "training.json").read_text())
        training.check_config(checkpoint, rest["config"])
        scheduler = training.scheduler.state_dict()
        bits = [0.0] * len(rest["bits"])
        if not same_kind(rest, rest | {"scheduler": scheduler, "bits": bits}):
            raise TypeError("training.json is not what this program saves")
        model, optimizer = get_state_dict(training.model, training.optimizer)
        tensors = {"model": model, "optimizer": {"state": optimizer["state"]}}
        dcp.load(tensors, storage_reader=SafeReader(checkpoint))
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
        )
        training.scheduler.load_state_dict(rest["scheduler"])
        for group, rate in zip(
            training.optimizer.param_groups, training.scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        training.bits = rest["bits"]


def begin(training: Training, args: argparse.Namespace) -> None:
    """From the latest checkpoint, if there is one and it is wanted."""
    restarted = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0  # by torchrun --max-restarts
    checkpoint = latest(args.output)
    if not restarted:
        check_resume(args, checkpoint is not None)
    if checkpoint:
        load(training, checkpoint)
        report(f"continues after step {len(training.bits)}")


def train(training: Training, corpus: Corpus, args: argparse.Namespace) -> list[float]:
    """Trains up to ``--steps``, and returns how many seconds each step took."""
    seconds = []
    unreported = []
    for step in range(len(training.bits), args.steps):
        start = time.perf_counter()
        batch = corpus.batches[step % len(corpus.batches)]
        unreported.append(train_step(training, batch, args))
        seconds.append(time.perf_counter() - start)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            means = mean_over_processes(unreported, args.device)
            if not all(map(math.isfinite, means)):
                sys.exit(
                    f"The loss is not finite after step {step + 1}: try a smaller --learning-rate."
                )
            training.bits += means
            unreported = []
            save(training, args.output)
            report(f"step {step + 1:5}: bits per character {statistics.fmean(means):.3f}; saved")
    return seconds


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def command_line() -> argparse.ArgumentParser:
    parser = training_options(__doc__.splitlines()[0], "runs/train_distributed")
    add = functools.partial(add_option, parser)
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    add("--strategy", "how processes share the work", choices=("ddp", "fsdp"), default="ddp")
    add("--bf16", "compute in bfloat16, with parameters in float32", action="store_true")
    add("--accumulate", "micro-batches per step", type=positive_int, metavar="N", default=1)
    add("--save-every", "steps", type=positive_int, metavar="N", default=200)
    add("--device", "cuda: one GPU for each process", choices=devices, default=devices[0])
    add("--timeout", "seconds to wait for a process", type=positive_int, metavar="N", default=300)
    return parser


def prepare(args: argparse.Namespace) -> tuple[Training, Corpus]:
    parts = dist.get_world_size() * args.accumulate
    if args.batch_size % parts != 0:
        raise UsageError(
            f"expected --batch-size to be a multiple of {parts}, which is the number of processes "
            f"times --accumulate, but got {args.batch_size}"
        )
    corpus = Corpus.of(read_text(args.text), args.batch_size, args.length, args.device)
    torch.manual_seed(args.seed)
    model = parallel(new_model(corpus, args), args)
    training = Training.of(model, config_of(corpus, args), corpus.vocabulary, args)
    make_output(args.output)
    begin(training, args)
    return training, corpus


def connect(backend: str, timeout: timedelta) -> None:
    """Does what init_process_group does, also where torchrun has restarted the processes.

    It keeps its store then, and in it the addresses of those before.
    """
    store, rank, processes = next(rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"start_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=processes)


@contextmanager
def process_group(args: argparse.Namespace) -> Iterator[None]:
    """What torchrun started, on its devices. Whoever waits in vain for another fails in the end."""
    args.device = torch.device(args.device)
    if args.device.type == "cuda":
        here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if here > gpus:
            raise UsageError(
                f"--device cuda: expected a GPU for each of {here} processes, but there are "
                f"{gpus}: use --device cpu"
            )
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.device)
    backend = "nccl" if args.device.type == "cuda" else "gloo"
    connect(backend, timedelta(seconds=args.timeout))
    try:
        yield
    finally:
        # A DDP that outlived the group would destroy it holding the GIL, which a thread of gloo may
        # still need to free the tensors of the last collective: neither would ever go on.
        gc.collect()
        dist.destroy_process_group()


def run(args: argparse.Namespace) -> None:
    training, corpus = prepare(args)
    report(
        f"{args.strategy}, {dist.get_world_size()} processes on {args.device.type}, "
        f"{args.threads} CPU thread{'s' * (args.threads > 1)} each"
    )
    seconds = train(training, corpus, args)
    bits = validate(training.model, corpus.validation, args.batch_size)
    report(f"bits per character of the validation text: {bits:.3f}")
    if seconds:
        gradients = sum(p.numel() * p.element_size() for p in training.model.parameters())
        report(
            f"{statistics.median(seconds) * 1e3:.2f} ms per step (median), "
            f"{gradients:,} bytes of gradients"
        )


def main(argv: list[str] | None = None) -> None:
    parser = command_line()
    args = parser.parse_args(argv)
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc-per-node 2 train_distributed.py")
    torch.set_num_threads(args.threads)
    try:
        with process_group(args):
            run(args)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
