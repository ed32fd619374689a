"""This checkout against another commit: python benchmarks/against.py HEAD~1

Each build runs in a process of its own. The two take turns of a few milliseconds, so that what else
the machine does meets both. The ratio is the first quartile of the other's times over that of ours:
above 1, this checkout is faster. The other commit is built in build/against, and kept there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

import cell
import sequence
import timing
import torch
from contest import show
from figures import ROOT

SECONDS_OF_A_TURN = 0.004
LEAST_TURNS = 7


def build(revision: str, folder: Path) -> Path:
    """Returns a checkout of that commit, with its library."""
    name = ["git", "rev-parse", "--verify", "--short=10", f"{revision}^{{commit}}"]
    commit = subprocess.run(name, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    checkout = folder.absolute() / commit.strip()
    checkout.mkdir(parents=True, exist_ok=True)
    archive = ["git", "archive", commit.strip()]
    files = subprocess.run(archive, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", checkout], input=files, check=True)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=checkout, check=True)
    return checkout


class Build:
    """A process with the package of one checkout."""

    def __init__(self, checkout: Path):
        variables = os.environ | {"PYTHONPATH": str(checkout), "OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker", checkout],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables,
        )  # fmt: skip

    def ask(self, **question: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else sys.exit("a build ended, as it says above")


def work(checkout: str) -> None:
    """The process: a question begins a row, or asks for the seconds of a turn."""
    assert Path(cell.lltm_ops.__file__).is_relative_to(checkout)
    timing.settle_allocator()
    for line in sys.stdin:
        question = json.loads(line)
        if "calls" not in question:
            torch.set_num_threads(question["threads"])
            torch.set_grad_enabled(question["what"] != "inference")
            call = call_of(question["shape"], question["dtype"], question["what"])
            timeit.timeit(call, number=3)
            calls = max(1, int(SECONDS_OF_A_TURN / timeit.timeit(call, number=1)))
            print(calls, flush=True)
        else:
            print(timeit.timeit(call, number=question["calls"]), flush=True)


def call_of(shape: str, dtype: str, what: str) -> Any:
    sizes = tuple(map(int, shape.split("x")))
    of = sequence if len(sizes) == 4 else cell
    contest = of.contest_of(sizes, {"device": "cpu", "dtype": getattr(torch, dtype)})
    ours = {"lltm_ops": contest.modules["lltm_ops"]}
    return timing.calls(what, ours, contest.call, contest.inputs, contest.grads)["lltm_ops"]


def times(builds: tuple[Build, Build], seconds: float, **row: Any) -> list[float]:
    """Microseconds of a call of each build."""
    calls = min(each.ask(**row) for each in builds)
    turns: tuple[list[float], list[float]] = [], []
    while sum(turns[0]) < seconds or len(turns[0]) < LEAST_TURNS:
        for i in (0, 1) if len(turns[0]) % 2 == 0 else (1, 0):
            turns[i].append(builds[i].ask(calls=calls))
    return [statistics.quantiles(each)[0] / calls * 1e6 for each in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="a commit, a tag or a branch")
    shapes = [*cell.SHAPES, *sequence.SHAPES]
    parser.add_argument("--shapes", nargs="+", default=shapes, help="of the cell, or with a time")
    parser.add_argument("--kinds", nargs="+", default=timing.KINDS, choices=timing.KINDS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each build and row")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "against")
    options = parser.parse_args()
    builds = Build(build(options.revision, options.folder)), Build(ROOT)
    ratios = []
    for shape in options.shapes:
        for what in options.kinds:
            row = {"dtype": options.dtype, "threads": options.threads, "shape": shape, "what": what}
            other, ours = times(builds, options.seconds, **row)
            ratios.append(other / ours)
            show(row | {options.revision: other, "this checkout": ours, "ratio": other / ours})
    print(
        f"geometric mean of {len(ratios)}: {statistics.geometric_mean(ratios):.3f}, "
        f"least {min(ratios):.3f}, most {max(ratios):.3f}"
    )


if __name__ == "__main__":
    work(sys.argv[2]) if sys.argv[1:2] == ["--worker"] else main()
