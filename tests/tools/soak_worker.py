"""One process of soak.py: calls of all kinds, at once and interrupted, each with a known answer.

It writes a line of JSON on stdout when it is ready, and one after each round of calls, and ends at
SIGTERM. When its parent is gone it cannot write, and ends, too.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import math
import os
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import test_errors
import torch
from common import (
    DTYPES,
    HAS_TORCHSCRIPT,
    LAYOUTS,
    SEQUENCE_KINDS,
    SEQUENCE_SHAPES,
    SHAPES,
    TOLERANCES,
    sample_inputs,
    sequence_inputs,
)
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

import lltm_ops

ROUND = 0.3  # seconds
CASES_OF_A_KIND = 2
MAX_THREADS = 4  # that call at once, and of each call
Operator = Callable[..., Any]


# What is done with an operator. Arguments belong to all threads.
def inference(op: Operator, arguments: list[Any]) -> list[Tensor]:
    return list(op(*arguments))


def gradient_of(output: Tensor) -> Tensor:
    """Small: float16 holds the sum over the rows of all steps."""
    return output * 0.05 + 0.03


def gradients(
    op: Operator, arguments: list[Any], create_graph: bool = False
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    outputs = list(op(*arguments))
    weights = [gradient_of(output.detach()) for output in outputs]
    # Without steps, a composite formula does not use its weights.
    found = torch.autograd.grad(
        outputs, leaves, weights, create_graph=create_graph, materialize_grads=True
    )
    return leaves, outputs, list(found)


def training(op: Operator, arguments: list[Any]) -> list[Tensor]:
    _, outputs, found = gradients(op, arguments)
    return [output.detach() for output in outputs] + found


def second_derivative(op: Operator, arguments: list[Any]) -> list[Tensor]:
    leaves, _, found = gradients(op, arguments, create_graph=True)
    loss = sum((0.01 * gradient).square().sum() for gradient in found)
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def mapped(op: Operator, arguments: list[Any]) -> list[Tensor]:
    inputs = torch.stack([arguments[0], arguments[0].flip(0)])
    in_dims = (0, *[None] * (len(arguments) - 1))
    return list(torch.func.vmap(op, in_dims)(inputs, *arguments[1:]))


# Its levels belong to the process: PyTorch knows one thread at a time in it.
forward_ad = threading.Lock()


def tangents(op: Operator, arguments: list[Any]) -> list[Tensor]:
    def of_input(input: Tensor) -> Any:
        return op(input, *arguments[1:])

    with forward_ad:
        outputs, along = torch.func.jvp(of_input, (arguments[0],), (arguments[0].flip(0),))
    return [*outputs, *along]


def autocast(op: Operator, arguments: list[Any]) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return training(op, arguments)


def by_operators(op: Operator, arguments: list[Any]) -> list[Tensor]:
    """Trains by calls of the operators that autograd calls."""
    input, weights, _, h, _, *options = arguments
    if op is lltm_ops.forward:
        new_h, new_cell, gates = torch.ops.lltm._forward_with_gates(*arguments)
        results = [new_cell, gates, input, weights, h]
        backward = lltm_ops.backward
    else:
        new_h, new_cell, gates = torch.ops.lltm._sequence_forward_with_gates(*arguments)
        results = [new_h, new_cell, gates, input, weights, h, *options]
        backward = lltm_ops.sequence_backward
    grads = [gradient_of(output) for output in (new_h, new_cell)]
    return [new_h, new_cell, *backward(*grads, *results)]


@dataclass(frozen=True)
class Kind:
    """What is done with what, and on which sizes."""

    what: str
    way: Callable[[Operator, list[Any]], list[Tensor]]
    small: bool = False  # where the formulas of higher derivatives are slow
    # The same bits whatever the threads: where kernels compute. Plain PyTorch promises less, and
    # rounds every sum in low precision.
    bitwise: bool = True
    # Enters a mode of PyTorch's own, which an exception out of a signal may leave entered, and in
    # which a handler of signals would compute otherwise.
    enters_mode: bool = False

    @property
    def of_steps(self) -> bool:
        return self.what not in ("cell", "LLTMCell")


WHATS = ["cell", "sequence", "LLTMCell", "LLTM"]
if HAS_TORCHSCRIPT:
    WHATS.append("scripted LLTM")
KINDS = [
    *(Kind(what, way) for what in WHATS for way in (inference, training)),
    *(
        kind
        for what in ("cell", "sequence")
        for kind in (
            Kind(what, by_operators),
            Kind(what, autocast, enters_mode=True),
            Kind(what, second_derivative, small=True, bitwise=False),
            Kind(what, mapped, small=True, bitwise=False, enters_mode=True),
            Kind(what, tangents, small=True, bitwise=False, enters_mode=True),
        )
    ),
]
CELLS = [*SHAPES.values(), (4000, 3, 5), (1, 2000, 33), (2, 5, 700)]
SEQUENCES = [*SEQUENCE_SHAPES.values(), (3000, 1, 2, 5), (2, 2500, 3, 8)]
SMALL = 4000  # elements of a sequence's output


class Wrong(Exception):
    """What should never be seen."""


@dataclass(frozen=True)
class Case:
    name: str
    kind: Kind
    compute: Callable[[], list[Tensor]]
    answer: list[Tensor]

    def check_again(self) -> None:
        self.check(self.compute())

    def check(self, results: list[Tensor]) -> None:
        for i, (result, expected) in enumerate(zip(results, self.answer, strict=True)):
            tolerance = {"rtol": 0.0, "atol": 0.0}
            if not self.kind.bitwise:
                largest = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
                tolerance = TOLERANCES[result.dtype]
                tolerance = tolerance | {"atol": tolerance["atol"] * largest}
            try:
                torch.testing.assert_close(result, expected, equal_nan=True, **tolerance)
            except AssertionError as error:
                raise Wrong(f"{self.name}: result {i}: {error}") from None


def make_case(kind: Kind, rng: Random) -> Case:
    """Draws dtype, size and layout. The answer is that of a first call, alone and on one thread:
    that it is right is for the fuzzer and the tests."""
    dtypes = DTYPES if kind.bitwise else [torch.float64, torch.float32]
    dtype = torch.float32 if kind.way is autocast else rng.choice(dtypes)
    shape = rng.choice(shapes(kind))
    sequence_kind = rng.choice(SEQUENCE_KINDS)
    if kind.of_steps:
        inputs = sequence_inputs(dtype=dtype, shape=shape, kind=sequence_kind)
    else:
        inputs = sample_inputs(dtype=dtype, shape=shape)
    layouts = [rng.choice(list(LAYOUTS)) for _ in inputs[:5]]
    if kind.way is tangents:
        layouts[0] = "contiguous"  # PyTorch gives no tangent to memory that overlaps
    if kind.of_steps and layouts[1] == "expanded":
        layouts[1] = "transposed"  # gradients explode where all rows of weights are the same
    requires_grad = kind.way in (training, second_derivative, autocast)
    inputs[:5] = [
        LAYOUTS[layout](tensor).detach().requires_grad_(requires_grad)
        for layout, tensor in zip(layouts, inputs, strict=False)
    ]
    op, arguments = OPERATORS[kind.what](inputs, requires_grad)
    options = f"{shape} {dtype} {sequence_kind if kind.of_steps else ''} {layouts}"
    torch.set_num_threads(1)
    return Case(
        f"{kind.way.__name__} of {kind.what} {options}",
        kind,
        lambda: kind.way(op, arguments),
        kind.way(op, arguments),
    )


def shapes(kind: Kind) -> list[tuple[int, ...]]:
    return [
        shape
        for shape in (SEQUENCES if kind.of_steps else CELLS)
        if not (kind.small and math.prod(shape[:-2]) * shape[-1] > SMALL)
        # The vmap and jvp of PyTorch know no such sizes in the formula.
        and not (kind.enters_mode and 0 in shape)
    ]


def module_call(
    module: torch.nn.Module, requires_grad: bool, call: Operator, inputs: list[Any]
) -> tuple[Operator, list[Any]]:
    """call of the inputs alone; the parameters stand among the arguments, to be differentiated."""
    parameters = list(module.requires_grad_(requires_grad).parameters())
    return lambda *arguments: call(*arguments[: len(inputs)]), [*inputs, *parameters]


def cell_module(inputs: list[Any], requires_grad: bool) -> tuple[Operator, list[Any]]:
    input, _, _, h, c = inputs
    module = lltm_ops.LLTMCell(input.shape[1], h.shape[1], dtype=input.dtype)
    call: Operator = lambda input, h, c: module(input, (h, c))  # noqa: E731
    return module_call(module, requires_grad, call, [input, h, c])


def layer(
    inputs: list[Any], requires_grad: bool, scripted: bool = False
) -> tuple[Operator, list[Any]]:
    input, _, _, h0, c0, batch_sizes, *_ = inputs
    module = lltm_ops.LLTM(
        input.shape[-1], h0.shape[1], num_layers=2, bidirectional=True, dtype=input.dtype
    )
    run = torch.jit.script(module) if scripted else module
    states = [torch.stack([s, s.flip(0), s * 0.5, -s]).detach() for s in (h0, c0)]
    states = [state.requires_grad_(requires_grad) for state in states]

    def call(input: Tensor, h_0: Tensor, c_0: Tensor, batch_sizes: Tensor | None) -> Any:
        if batch_sizes is None or scripted:
            output, (h_n, c_n) = run(input, (h_0, c_0), None, batch_sizes)
        else:
            packed, (h_n, c_n) = run(PackedSequence(input, batch_sizes), (h_0, c_0))
            output = packed.data
        return output, h_n, c_n

    return module_call(module, requires_grad, call, [input, *states, batch_sizes])


# Each function turns an operator's inputs into a call: what to call, and with which arguments.
OPERATORS: dict[str, Callable[[list[Any], bool], tuple[Operator, list[Any]]]] = {
    "cell": lambda inputs, _: (lltm_ops.forward, inputs),
    "sequence": lambda inputs, _: (lltm_ops.sequence_forward, inputs),
    "LLTMCell": cell_module,
    "LLTM": layer,
    "scripted LLTM": partial(layer, scripted=True),
}


# An operator, and one of its cases of test_errors; not those that trouble the dispatcher.
ERRORS = [
    (name, case)
    for name, cases, _ in test_errors.PATHS
    if cases is not test_errors.SPECIAL_CASES
    for case in cases
]


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Calls:
    """What the process does until it is told to end."""

    def __init__(self, seed: int, parallel: bool, plants: list[str]) -> None:
        self.rng = Random(seed)
        self.parallel = parallel
        self.plants = plants
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.ending = False
        self.in_mode = False
        self.in_handler = False
        self.interruptible = False
        self.messages = {case: self.message(*case) for case in ERRORS}
        self.cases = [make_case(kind, self.rng) for kind in KINDS * CASES_OF_A_KIND]
        self.fill_caches()
        self.short = [
            case
            for case in self.cases
            if (case.kind.small or case.kind.what == "cell") and not case.kind.enters_mode
        ]
        self.planted: list[Any] = []

    def fill_caches(self) -> None:
        """Those of each thread's kernels, and of scripts, which PyTorch optimises once they ran."""
        threads = MAX_THREADS if self.parallel else 1
        with ThreadPoolExecutor(MAX_THREADS, "", torch.set_num_threads, (threads,)) as pool:
            for check in [pool.submit(case.check_again) for _ in range(3) for case in self.cases]:
                check.result()
        torch.set_num_threads(threads)
        for case in self.cases:
            case.check_again()

    # What a thread does.

    def calls(self, seed: float, counts: Counter[str]) -> None:
        """Until the round is over."""
        rng = Random(seed)
        end = time.monotonic() + ROUND
        try:
            while time.monotonic() < end and not self.ending:
                # That of the main thread stays: its threads keep what they cache, so that memory is
                # flat. Those of the others end with them.
                if rng.random() < 0.3 and not is_main_thread():
                    torch.set_num_threads(rng.randint(1, MAX_THREADS) if self.parallel else 1)
                if rng.random() < 0.15:
                    self.raises(rng.choice(ERRORS))
                    counts["errors"] += 1
                else:
                    self.call(rng.choice(self.cases), counts)
        except Exception:
            self.failures.append(traceback.format_exc())

    def call(self, case: Case, counts: Counter[str]) -> None:
        main = is_main_thread()
        try:
            if main:
                self.in_mode = case.kind.enters_mode
                self.interruptible = not case.kind.enters_mode
            results = case.compute()
            if main:
                self.in_mode = self.interruptible = False
        except KeyboardInterrupt:
            counts["interrupted"] += 1
            return
        if "number" in self.plants and case.kind.bitwise and results[0].numel():
            results[0] = results[0].detach().contiguous()
            results[0].flatten()[:1].view(torch.uint8)[0] ^= 1
        case.check(results)
        counts["calls"] += 1

    def message(self, name: str, case: str) -> str:
        try:
            getattr(torch.ops.lltm, name)(*test_errors.arguments_of(name, case))
        except RuntimeError as error:
            return str(error)
        raise Wrong(f"{case}: no error")

    def raises(self, case: tuple[str, str]) -> None:
        if (message := self.message(*case)) != self.messages[case]:
            raise Wrong(f"{case}: now says {message}")

    # What signals do, in the main thread.

    def install_handlers(self) -> None:
        signal.signal(signal.SIGTERM, self.end)
        signal.signal(signal.SIGINT, self.interrupt)
        signal.signal(signal.SIGUSR1, self.compute_in_handler)
        signal.signal(signal.SIGALRM, self.compute_in_handler)
        self.set_alarm()

    def end(self, *_: Any) -> None:
        self.ending = True

    def interrupt(self, *_: Any) -> None:
        self.counts["handled"] += 1
        if self.interruptible:
            self.interruptible = False
            raise KeyboardInterrupt

    def compute_in_handler(self, *_: Any) -> None:
        self.counts["handled"] += 1
        if self.in_mode or self.in_handler:
            self.set_alarm()
            return
        try:
            self.in_handler = True
            self.rng.choice(self.short).check_again()
            self.counts["calls"] += 1
        except Exception:
            self.failures.append(traceback.format_exc())
        finally:
            self.in_handler = False
            self.set_alarm()

    def set_alarm(self) -> None:
        """After each handler: at fixed times, slow ones would interrupt one another for ever."""
        signal.setitimer(signal.ITIMER_REAL, 0.1)

    # What the process does.

    def fork(self) -> None:
        """The child's numbers are right, too.

        Its threads are those of OpenMP if its parent had none. Else they would wait for those of
        its parent, in PyTorch as here, and it must not go parallel, like the workers of DataLoader.
        """
        wait_until_other_threads_sleep()
        seed = self.rng.random()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1 if self.parallel else 3)
                for case in Random(seed).sample(self.cases, 5):
                    case.check_again()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            raise Wrong(f"a forked child ended with {os.waitstatus_to_exitcode(status)}")
        self.counts["forks"] += 1

    def round(self) -> None:
        """Calls on one to four threads at once, then perhaps a child."""
        counts: list[Counter[str]] = [Counter() for _ in range(self.rng.randint(1, MAX_THREADS))]
        seeds = [self.rng.random() for _ in counts]
        threads = [
            threading.Thread(target=self.calls, args=each)
            for each in list(zip(seeds, counts, strict=True))[1:]
        ]
        for thread in threads:
            thread.start()
        self.calls(seeds[0], counts[0])
        for thread in threads:
            thread.join()
        for each in counts:
            self.counts += each
        if self.rng.random() < 0.3:
            self.fork()
        for plant in self.plants:
            PLANTS[plant](self.planted)
        if self.failures:
            raise Wrong("\n".join(self.failures))

    def run(self) -> None:
        self.install_handlers()
        while not self.ending:
            report(self.counts)
            self.round()
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        report(self.counts)


def wait_until_other_threads_sleep() -> None:
    """Waits, because a thread that was joined may still be giving its buffers back to MKL.

    MKL holds a spin lock meanwhile (mm_account_ptr_by_tid). A child that is forked then has that
    lock, too, with nobody to release it, and waits for ever in its first product.
    """
    own = Path(f"/proc/self/task/{threading.get_native_id()}")
    while any(is_running(task) for task in own.parent.iterdir() if task != own):
        time.sleep(0.001)


def is_running(task: Path) -> bool:
    try:
        after_name = (task / "stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return after_name.split()[0] != "S"


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


libc = ctypes.CDLL(None)
mallinfo2 = getattr(libc, "mallinfo2", MallocInfo)  # glibc before 2.33 has none: zeros
mallinfo2.restype = MallocInfo


def report(counts: Counter[str]) -> None:
    """With what the process holds now that no call is under way."""
    gc.collect()
    # Otherwise glibc keeps memory that calls have freed, more or less as arenas come and go.
    libc.malloc_trim(0)
    malloc = mallinfo2()
    status = Path("/proc/self/status").read_text()
    held = {
        "allocated": malloc.uordblks + malloc.hblkhd,
        "memory": int(status.split("VmRSS:")[1].split()[0]) * 1024,
        "threads": int(status.split("Threads:")[1].split()[0]),
        "files": len(os.listdir("/proc/self/fd")),
    }
    print(json.dumps({"counts": counts, "held": held}), flush=True)


def wait_for_ever(*_: Any) -> None:
    threading.Event().wait()


# Faults, by which the tests show that each is found: what each does after a round.
PLANTS: dict[str, Callable[[list[Any]], None]] = {
    "number": lambda _: None,  # but in each call
    "leak": lambda planted: planted.append(torch.ones(2**20)),
    "hang": wait_for_ever,
    "crash": lambda _: os.abort(),
    "thread": lambda _: threading.Thread(target=wait_for_ever, daemon=True).start(),
    "file": lambda planted: planted.append(open(os.devnull)),  # noqa: SIM115
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--parallel", action="store_true")
    parser.add_argument("--plant", nargs="+", choices=PLANTS, default=[])
    args = parser.parse_args()
    # At SIGQUIT: where all threads are, also if one of them holds the GIL for ever.
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    faulthandler.enable()
    warnings.filterwarnings("ignore", "`torch.jit.", DeprecationWarning)
    torch.set_num_threads(1)
    Calls(args.seed, args.parallel, args.plant).run()


if __name__ == "__main__":
    main()
