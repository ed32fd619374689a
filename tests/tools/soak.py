"""Calls of all kinds for an hour: with right numbers, flat memory and no hang.

    python tests/tools/soak.py --minutes 60

Three processes of soak_worker.py call everything, on threads, among wrong arguments and forks,
while this one sends them signals and watches. It ends with a line of figures, and with status 1 if
something was wrong; Ctrl-C ends it early. What is watched:

- Numbers: the workers compare each result with a known answer. One that finds a wrong one ends.
- Hangs: a worker reports after each round of calls. One that is silent for --timeout shows where
  its threads are, and is killed with the children it forked.
- Memory, threads and open files of a worker, whenever no call is under way: in the last third of a
  run they are those of the second, but for some slack.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

WORKER = Path(__file__).with_name("soak_worker.py")
# The worker finds test_errors.py here, and the modules that it imports.
FOLDERS = [str(WORKER.parents[1] / name) for name in ("ops", "support")]
PYTHONPATH = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
MEBIBYTE = 2**20
# By how much the median of what a worker holds may grow from the second third of its rounds to the
# last: so many units, or such a share. The first third fills caches, as of kernels for each thread.
# "allocated" is what malloc has handed out, "memory" all that is resident.
SLACK = {
    "allocated": (2 * MEBIBYTE, 0),
    "memory": (24 * MEBIBYTE, 0.05),
    "threads": (1, 0),
    "files": (0, 0),
}
FEWEST_ROUNDS = 12
START = 600  # seconds until a worker has known answers, where a machine is busy
# Killed now and then; the others live as long as the run. In the one that never goes parallel, the
# children that it forks may.
WORKERS = [
    {"name": "threads", "parallel": True, "mortal": False},
    {"name": "forks", "parallel": False, "mortal": False},
    {"name": "mortal", "parallel": True, "mortal": True},
]


def growth(samples: list[dict[str, int]]) -> list[str]:
    """What grows."""
    third = len(samples) // 3
    found = []
    for what, (units, share) in SLACK.items():
        before, after = (
            statistics.median(sample[what] for sample in part)
            for part in (samples[third : 2 * third], samples[2 * third :])
        )
        if after > before + max(units, share * before):
            found.append(f"{what} grew from {before:,.0f} to {after:,.0f}")
    return found


SIGNALS = ("SIGINT", "SIGUSR1", "SIGSTOP", "SIGTERM", "SIGKILL")


class Fault(Exception):
    """What ends a soak."""


class Worker:
    """A process, and after its death the next."""

    def __init__(self, name: str, parallel: bool, mortal: bool, args: argparse.Namespace) -> None:
        self.name = name
        self.parallel = parallel
        self.mortal = mortal
        self.args = args
        self.rng = Random(f"{args.seed} {name}")
        self.totals: Counter[str] = Counter()
        self.longest_silence = 0.0
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(WORKER), f"--seed={self.rng.randrange(2**32)}"]
        if self.parallel:
            command.append("--parallel")
        if self.args.plant:
            command += ["--plant", *self.args.plant]
        # With an arena for each thread, memory would tell how many threads there have been:
        # malloc_trim cannot give back pages in partial use.
        variables = {"MALLOC_ARENA_MAX": "2", "PYTHONPATH": PYTHONPATH}
        if not self.parallel:
            variables["OMP_NUM_THREADS"] = "1"
        # In a group of its own: Ctrl-C is for this process alone, and its children end with it.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, start_new_session=True, env=os.environ | variables
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.line = b""
        self.counts: Counter[str] = Counter()
        self.samples: list[dict[str, int]] = []
        self.heard = time.monotonic()
        self.next_signal = self.heard
        self.stopped_until = 0.0
        self.dies = float("inf")
        if self.mortal and self.rng.random() < 0.3:
            self.dies = self.heard + self.rng.uniform(0, 5)  # while it still starts

    def tick(self, now: float) -> None:
        if self.process.poll() is not None:
            raise Fault(f"{self.name} ended with status {self.process.returncode}")
        patience = self.args.timeout if self.samples else START
        if now > self.heard + patience:
            self.show_stacks()
            raise Fault(f"{self.name} was silent for {patience:g} s")
        if self.stopped_until:
            if now >= self.stopped_until:
                self.signal_group(signal.SIGCONT)
                self.stopped_until = 0.0
        elif now >= self.dies:
            self.die()
        elif self.samples and now >= self.next_signal:
            self.disturb(now)

    def read(self) -> None:
        assert self.process.stdout is not None
        *lines, self.line = (self.line + (self.process.stdout.read() or b"")).split(b"\n")
        for line in lines:
            told = json.loads(line)
            self.counts = Counter(told["counts"])
            self.samples.append(told["held"])
            silence = time.monotonic() - self.heard
            self.heard += silence
            if len(self.samples) > 1:
                self.longest_silence = max(self.longest_silence, silence)
            if self.mortal and self.dies == float("inf"):
                self.dies = self.heard + self.rng.uniform(0, 20)

    def figures(self) -> Counter[str]:
        return self.totals + self.counts

    def disturb(self, now: float) -> None:
        self.next_signal = now + self.rng.expovariate(2)
        kind = self.rng.choice([signal.SIGINT, signal.SIGINT, signal.SIGUSR1, signal.SIGSTOP])
        self.totals[kind.name] += 1
        if kind == signal.SIGSTOP:
            self.signal_group(kind)
            self.stopped_until = now + self.rng.uniform(0, 0.5)
        else:
            self.process.send_signal(kind)

    def die(self) -> None:
        """Sooner or later; then it starts again."""
        if self.rng.random() < 0.5:
            self.totals["SIGKILL"] += 1
            self.kill()
        else:
            self.totals["SIGTERM"] += 1
            ready = bool(self.samples)
            self.process.terminate()
            self.end()
            # Before it is ready, nobody has taught it to end by itself.
            status = self.process.returncode
            if status != 0 and (ready or status != -signal.SIGTERM):
                raise Fault(f"{self.name} ended with status {status} at SIGTERM")
        self.totals["restarts"] += 1
        self.start()

    def end(self) -> None:
        """Waits for a process that has had SIGTERM."""
        try:
            self.process.wait(self.args.timeout)
        except subprocess.TimeoutExpired:
            self.show_stacks()
            raise Fault(f"{self.name} went on for {self.args.timeout:g} s after SIGTERM") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """With whatever it has forked; and counts what it did."""
        self.signal_group(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout.closed:
            return
        self.read()
        self.process.stdout.close()
        self.totals += self.counts
        self.counts = Counter()

    def signal_group(self, kind: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, kind)

    def show_stacks(self) -> None:
        self.signal_group(signal.SIGCONT)
        self.signal_group(signal.SIGQUIT)
        time.sleep(2)
        if not shutil.which("gdb"):
            return
        for pid in self.group():
            what = ["-batch", "-ex", "thread apply all backtrace", "-p", str(pid)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["gdb", *what], stdout=sys.stderr, timeout=60, check=False)

    def group(self) -> list[int]:
        """Returns the process and the children that it forked."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(folder.name)) == self.process.pid:
                    found.append(int(folder.name))
        return sorted(found)


class Soak:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        # One is enough to find what is planted.
        self.workers = [
            Worker(args=args, **which) for which in (WORKERS[:1] if args.plant else WORKERS)
        ]
        self.lasting = [worker for worker in self.workers if not worker.mortal]

    def run(self) -> None:
        """Until the time is over, which begins when workers are ready."""
        end = float("inf")
        next_line = self.begin + 60
        while (now := time.monotonic()) < end or not self.seen_enough():
            if end == float("inf") and all(worker.samples for worker in self.lasting):
                end = now + self.args.minutes * 60
            with selectors.DefaultSelector() as selector:
                for worker in self.workers:
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
                for key, _ in selector.select(0.02):
                    key.data.read()
            for worker in self.workers:
                worker.tick(now)
            if now >= next_line:
                next_line += 60
                print(self.figures(), flush=True)
        for worker in self.workers:
            worker.signal_group(signal.SIGCONT)
            worker.process.terminate()
        for worker in self.workers:
            worker.end()

    def seen_enough(self) -> bool:
        return all(len(worker.samples) >= FEWEST_ROUNDS for worker in self.lasting)

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()

    def figures(self) -> str:
        sums: Counter[str] = sum((worker.figures() for worker in self.workers), Counter())
        signals = ", ".join(f"{sums[name]:,} {name}" for name in SIGNALS)
        silence = max(worker.longest_silence for worker in self.workers)
        held = "; ".join(
            f"{worker.name}: "
            + ", ".join(f"{what} {shown(what, worker.samples)}" for what in SLACK)
            for worker in self.lasting
        )
        return (
            f"{time.monotonic() - self.begin:,.0f} s: {sums['calls']:,} calls, "
            f"{sums['errors']:,} errors as expected, {sums['forks']:,} forks, "
            f"{sums['handled']:,} signals handled ({signals} sent), {sums['interrupted']:,} calls "
            f"interrupted, {sums['restarts']:,} restarts, longest silence {silence:.1f} s; {held}"
        )


def shown(what: str, samples: list[dict[str, int]]) -> str:
    """How much at first, when the worker was ready, and how much at last."""
    if not samples:
        return "-"
    unit = 1 if what in ("threads", "files") else MEBIBYTE
    return f"{samples[0][what] // unit:,} to {samples[-1][what] // unit:,}{' MiB' * (unit > 1)}"


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="once all is ready (default 60)")
    parser.add_argument("--seed", type=int, help="of what is called and sent (default: random)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300,
        help="seconds of silence that are a hang (default 300)",
    )
    parser.add_argument(
        "--plant",
        nargs="+",
        metavar="FAULT",
        help="into a worker, to see that it is found: number, leak, thread, file, hang, crash",
    )
    return parser


def main() -> int:
    args = command_line().parse_args()
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(2**32)
    print(f"soak: seed {args.seed}, {args.minutes:g} minutes", flush=True)
    # SIGINT too: a shell lets what it starts in the background ignore it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    soak = Soak(args)
    faults = []
    try:
        soak.run()
    except Fault as fault:
        faults.append(str(fault))
    except KeyboardInterrupt:
        print("ended early")
    finally:
        soak.stop()
    for worker in soak.lasting:
        if len(worker.samples) >= FEWEST_ROUNDS:
            faults += [f"{worker.name}: {what}" for what in growth(worker.samples)]
    print(soak.figures())
    for fault in faults:
        print(f"FAULT: {fault}")
    print("failed" if faults else "passed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
