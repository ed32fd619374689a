"""Trains a model of the characters of a text, on several processes: DDP or, with --fsdp, FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py --fsdp README.md

The batch of a step does not depend on the number of processes: each computes its rows of it, so
the model learns what it would learn on one process, except for rounding. Training goes on from the
last checkpoint in --output, which any number of processes may have written, with DDP or FSDP2. At
the end, the bits per character of a tenth of the text that was kept say what was learned.
"""

import argparse
import gc
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lltm_ops

LAYERS = {"LLTM": lltm_ops.LLTM, "LSTM": nn.LSTM, "GRU": nn.GRU}


class Model(nn.Module):
    """Logits of each next character, from characters [batch, time]."""

    def __init__(self, characters: int, layer: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.rnn = LAYERS[layer](64, 256, batch_first=True)
        self.head = nn.Linear(256, characters)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(characters))[0])


class Training(Stateful):
    """What a checkpoint holds. torch.distributed.checkpoint calls the methods."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), learning_rate)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def parallel(model: Model, fsdp: bool) -> nn.Module:
    """The model as it averages gradients over processes; with FSDP2, each holds a shard of it."""
    if not fsdp:
        return DistributedDataParallel(model)
    # The outputs are views, and FSDP2 warns of writing into them, which nothing here does.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


def batches_of(text: Tensor, batch_size: int, length: int = 64) -> Tensor:
    """[batches, batch_size, length + 1]: row i of a batch goes on in row i of the next."""
    chunks = text.unfold(0, length + 1, length)
    count = len(chunks) // batch_size
    return chunks[: count * batch_size].unflatten(0, (batch_size, count)).transpose(0, 1)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train_step(training: Training, batch: Tensor) -> float:
    """One step on this process' rows of the batch. Returns the loss of all rows."""
    training.optimizer.zero_grad()
    loss = loss_of(training.model, batch.chunk(dist.get_world_size())[dist.get_rank()])
    loss.backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), max_norm=1.0)
    training.optimizer.step()
    training.step += 1
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(args: argparse.Namespace, device: torch.device) -> None:
    vocabulary, text = torch.tensor([*args.text.read_bytes()]).unique(return_inverse=True)
    batches = batches_of(text.to(device), args.batch_size)
    tenth = max(1, len(batches) // 10)
    batches, unseen = batches[:-tenth], batches[-tenth:]
    torch.manual_seed(args.seed)
    model = parallel(Model(len(vocabulary), args.layer).to(device), args.fsdp)
    training = Training(model, args.learning_rate)
    # Written last, so a checkpoint that was cut short has none.
    complete = list(args.output.glob("step_*/.metadata"))
    if complete:
        dcp.load({"training": training}, checkpoint_id=max(complete).parent)
    say = print if dist.get_rank() == 0 else lambda *_: None
    while training.step < args.steps:
        loss = train_step(training, batches[training.step % len(batches)])
        if training.step % args.save_every == 0 or training.step == args.steps:
            folder = args.output / f"step_{training.step:08}"
            dcp.save({"training": training}, checkpoint_id=folder)
            say(f"step {training.step:5}: bits per character {loss / math.log(2):.5f}")
    with torch.no_grad():
        losses = [loss_of(model, batch).item() for batch in unseen]
    say(f"bits per character of unseen text: {sum(losses) / len(losses) / math.log(2):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a file, of which each byte is a character")
    parser.add_argument("--layer", choices=LAYERS, default="LLTM")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--output", type=Path, default=Path("runs/train_distributed"))
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    if args.batch_size % dist.get_world_size() != 0:
        sys.exit("--batch-size must be a multiple of the number of processes")
    train(args, device)
    # A DDP that outlived the group would destroy it while holding the GIL, which a thread of gloo
    # may still need: both would wait forever.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
