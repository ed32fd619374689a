"""Calls of all kinds for an hour: their numbers stay right, memory stays flat, and nothing hangs.

    python tests/tools/soak.py --minutes=60

Three kinds of rounds take turns: calls and wrong arguments on several threads, calls that signals
interrupt, and forked children. Each call has to repeat the answer that it gave before the first
round, alone and on one thread; the fuzzer and the tests show that this answer is right.

In the first half of the time each call of this process uses one thread, because only then may the
calls of a forked child use several (docs/limits.md). In the second half it is the other way round.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("ops", "support")]

import common
import test_errors

import lltm_ops

SECONDS_OF_A_ROUND = 0.5
TIMEOUT = 300  # seconds after which a round hangs, also on a busy machine
MOST_THREADS = 4  # that call at once, and of each call
FEWEST_TURNS = 12  # in each half
# By how much the median of what the process holds may grow from the second third of all turns on.
SLACK = {"MiB": 8, "threads": 1, "files": 0}
Operator = Callable[..., Any]
# Ends the process, with the stacks of its threads, unless it is called again in time.
watch = partial(faulthandler.dump_traceback_later, exit=True)


def inference(op: Operator, arguments: list[Any]) -> list[Tensor]:
    return list(op(*arguments))


def training(op: Operator, arguments: list[Any], create_graph: bool = False) -> list[Tensor]:
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    outputs = list(op(*arguments))
    # Small, because float16 holds the sum over the rows of all steps.
    weights = [output.detach() * 0.05 + 0.03 for output in outputs]
    found = torch.autograd.grad(
        outputs, leaves, weights, create_graph=create_graph, materialize_grads=True
    )
    if create_graph:
        loss = sum((0.01 * gradient).square().sum() for gradient in found)
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return [result.detach() for result in (*outputs, *found)]


def second_derivative(op: Operator, arguments: list[Any]) -> list[Tensor]:
    return training(op, arguments, create_graph=True)


LAYERS = ["LLTM", *["scripted LLTM"] * common.HAS_TORCHSCRIPT]
KINDS = [(what, way) for what in ["cell", "sequence", *LAYERS] for way in (inference, training)]
KINDS += [("cell", second_derivative), ("sequence", second_derivative)]
CELLS = [(1, *shape) for shape in [*common.SHAPES.values(), (4000, 3, 5), (1, 2000, 33)]]
SEQUENCES = [*common.SEQUENCE_SHAPES.values(), (3000, 1, 2, 5), (2, 2500, 3, 8)]


@dataclass(frozen=True)
class Case:
    name: str
    way: Callable[..., list[Tensor]]
    call: Callable[[], list[Tensor]]  # with arguments that all threads share
    answer: list[Tensor]

    def check(self) -> None:
        # PyTorch's own sums, of second derivatives, depend on the number of threads.
        tolerance = {} if self.way is second_derivative else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(
            self.call(), self.answer, **tolerance, equal_nan=True, msg=lambda m: f"{self.name}: {m}"
        )


def make_case(what: str, way: Callable[..., list[Tensor]], rng: Random) -> Case:
    shapes, dtype = (CELLS if what == "cell" else SEQUENCES), rng.choice(common.DTYPES)
    if way is second_derivative:  # composite formulas, which are slow
        shapes = [shape for shape in shapes if shape[0] * shape[1] * shape[3] <= 4000]
        dtype = torch.float64
    shape = rng.choice(shapes)
    kind = {"cell": None, "sequence": rng.choice(common.SEQUENCE_KINDS)}
    operator = common.Operator(kind.get(what, common.PADDED.kind))
    arguments = operator.inputs("cpu", dtype, shape, requires_grad=way is not inference)
    op = lltm_ops.forward if what == "cell" else lltm_ops.sequence_forward
    if what in LAYERS:
        input, _, _, h0, c0, *_ = arguments
        sizes = input.shape[-1], h0.shape[-1]
        layer = lltm_ops.LLTM(*sizes, num_layers=2, bidirectional=True, dtype=dtype)
        layer.requires_grad_(way is not inference)
        arguments = [input, h0, c0, *layer.parameters()]
        op = partial(call_layer, torch.jit.script(layer) if what == "scripted LLTM" else layer)
    call = partial(way, op, arguments)
    return Case(f"{way.__name__} of {what} {operator} {shape} {dtype}", way, call, call())


def call_layer(layer: Operator, input: Tensor, h0: Tensor, c0: Tensor, *_: Tensor) -> list[Tensor]:
    output, (h_n, c_n) = layer(input, tuple(s.expand(4, *s.shape) for s in (h0, c0)))
    return [output, h_n, c_n]


# An operator and one of its wrong arguments. Checks find the first ones, and kernels the others.
ERRORS = [("forward", case) for case in test_errors.FORWARD_CASES]
ERRORS += [("sequence_forward", case) for case in test_errors.SEQUENCE_VALUE_CASES]


def message(name: str, case: str) -> str:
    try:
        getattr(torch.ops.lltm, name)(*test_errors.arguments_of(name, case))
    except RuntimeError as error:
        return str(error)
    raise AssertionError(f"{name}, {case}: no error")


class Soak:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.counts: Counter[str] = Counter()
        self.interruptible = False
        torch.set_num_threads(1)
        self.messages = {error: message(*error) for error in ERRORS}
        self.cases = [make_case(*kind, self.rng) for kind in KINDS * 2]

    def run(self, minutes: float, most_threads: int) -> None:
        self.most_threads = most_threads
        torch.set_num_threads(most_threads)
        watch(TIMEOUT)
        # Caches, such as those of each thread's kernels, are filled before memory is watched.
        with ThreadPoolExecutor(MOST_THREADS, "", torch.set_num_threads, (most_threads,)) as pool:
            list(pool.map(Case.check, self.cases * 3))
        for case in self.cases:
            case.check()
        end = time.monotonic() + minutes * 60
        samples: list[dict[str, int]] = []
        while time.monotonic() < end or len(samples) < FEWEST_TURNS:
            for play in ROUNDS:
                watch(TIMEOUT)
                play(self)
            samples.append(held())
            figures = {**self.counts, **samples[-1]}
            print(", ".join(f"{count:,} {what}" for what, count in figures.items()), flush=True)
        third = len(samples) // 3
        for what, slack in SLACK.items():
            numbers = [sample[what] for sample in samples[third:]]
            before, after = map(statistics.median, (numbers[:third], numbers[third:]))
            assert after <= before + slack, f"{what} grew from {before:g} to {after:g}"

    def threads(self, meanwhile: Operator = time.sleep) -> None:
        count = self.rng.randint(1, MOST_THREADS)
        end = time.monotonic() + SECONDS_OF_A_ROUND
        with ThreadPoolExecutor(count) as pool:
            seeds = [self.rng.random() for _ in range(count)]
            threads = [pool.submit(self.call_until, end, seed) for seed in seeds]
            meanwhile(SECONDS_OF_A_ROUND)
            for thread in threads:
                self.counts += thread.result()

    def call_until(self, end: float, seed: float) -> Counter[str]:
        rng, counts = Random(seed), Counter()
        while time.monotonic() < end:
            torch.set_num_threads(rng.randint(1, self.most_threads))
            if rng.random() < 0.15:
                error = rng.choice(ERRORS)
                assert message(*error) == self.messages[error], error
                counts["errors"] += 1
            else:
                rng.choice(self.cases).check()
                counts["calls"] += 1
        return counts

    def signals(self) -> None:
        self.threads(meanwhile=self.call_among_signals)

    def call_among_signals(self, seconds: float) -> None:
        """In the main thread, which runs the handler. The whole process is also stopped twice."""
        end = time.monotonic() + seconds
        kill = f"sleep 0.1; kill -STOP {os.getpid()}; sleep 0.1; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", f"{kill}; {kill}"]):
            signal.signal(signal.SIGALRM, self.handle)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            while time.monotonic() < end:
                try:
                    self.interruptible = True
                    self.rng.choice(self.cases).check()
                    self.interruptible = False
                    self.counts["calls"] += 1
                except KeyboardInterrupt:
                    self.counts["interrupted"] += 1
            signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def handle(self, *_: Any) -> None:
        """Interrupts the call of the main thread, as Ctrl-C does, or makes another call inside."""
        self.counts["signals"] += 1
        interrupts, self.interruptible = self.interruptible and self.rng.random() < 0.5, False
        if not interrupts:
            self.rng.choice(self.cases).check()
        # Anew each time, because with a regular timer slow handlers would interrupt one another.
        signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(0.001, 0.02))
        if interrupts:
            raise KeyboardInterrupt

    def forks(self) -> None:
        seed = self.rng.random()
        # A thread that was joined may still be giving its buffers back to MKL, which holds a lock.
        # A child would have that lock, too, with nobody to release it: its next product would hang.
        while sum(state != "S" for state in states_of_threads()) > 1:
            time.sleep(0.001)
        # A child cannot cancel the watch of its parent, of which it has no thread.
        faulthandler.cancel_dump_traceback_later()
        child = os.fork()
        if child == 0:
            try:
                watch(TIMEOUT / 2)
                torch.set_num_threads(3 if self.most_threads == 1 else 1)
                for case in Random(seed).sample(self.cases, 5):
                    case.check()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        watch(TIMEOUT)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"a forked child ended with {os.waitstatus_to_exitcode(status)}"
        self.counts["forks"] += 1


ROUNDS = [Soak.threads, Soak.signals, Soak.forks]
LIBC = ctypes.CDLL(None)


def held() -> dict[str, int]:
    gc.collect()
    LIBC.malloc_trim(0)  # otherwise glibc keeps memory that calls have freed
    resident = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]
    threads, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    return {"MiB": int(resident) // 1024, "threads": threads, "files": files}


def states_of_threads() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    faulthandler.enable()
    warnings.filterwarnings("ignore", "`torch.jit.", DeprecationWarning)
    # With an arena for each thread, memory would grow with the number of threads there have been.
    # A tensor in a mapping of its own goes back at once; the holes of a heap come and go.
    M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # of malloc.h
    LIBC.mallopt(M_ARENA_MAX, 2)
    LIBC.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    soak = Soak(options.seed)
    for most_threads in (1, MOST_THREADS):
        soak.run(options.minutes / 2, most_threads)
    print("passed")


if __name__ == "__main__":
    main()
