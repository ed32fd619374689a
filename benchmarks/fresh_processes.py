"""A sequence in fresh processes, with glibc's default malloc, as users run it.

In some processes glibc gives memory back to the system after a call, and the next call pays for its
pages anew. Each contender has processes of its own, because what one frees changes what glibc keeps
for another. Inference alone. Writes fresh_processes.csv.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys

import figures
import timing
import torch
from contest import options, show
from sequence import HAS_ONNXRUNTIME, SHAPES, OnnxLSTM
from torch import nn

import lltm_ops

OTHERS = {"onnxruntime": OnnxLSTM} if HAS_ONNXRUNTIME else {"LSTM": nn.LSTM, "GRU": nn.GRU}
CONTENDERS = {"lltm_ops": lltm_ops.LLTM, **OTHERS}


def work(name: str, threads: str, shape: str) -> float:
    """Microseconds of a call of one contender."""
    torch.set_num_threads(int(threads))
    time, batch, input_size, hidden_size = map(int, shape.split("x"))
    layer, input = CONTENDERS[name](input_size, hidden_size), torch.randn(time, batch, input_size)
    with torch.no_grad():
        return timing.medians({name: lambda: layer(input)}, 1, 0.5)[name]


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="as in sequence.py")
    parser.set_defaults(threads=[1], rounds=10)
    args = parser.parse_args()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    rows = []
    for threads, shape in itertools.product(args.threads, args.shapes):
        turns = [
            {n: timing.in_a_process(__file__, n, str(threads), shape, env=env) for n in CONTENDERS}
            for _ in range(args.rounds)
        ]
        for process, choose in ("median", statistics.median), ("slowest", max):
            times = {name: choose([turn[name] for turn in turns]) for name in CONTENDERS}
            rows.append({"threads": threads, "shape": shape, "process": process} | times)
            show(rows[-1])
        figures.write(
            args.output / "fresh_processes.csv", figures.describe(rounds=args.rounds), rows
        )
        median, slowest = rows[-2:]
        for name in OTHERS:
            print(
                f"The median process of {name} takes {median[name] / median['lltm_ops']:.2f} times "
                f"as long as that of lltm_ops, and {median[name] / slowest['lltm_ops']:.2f} times "
                f"as long as the slowest of lltm_ops.",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        print(json.dumps(work(*sys.argv[2:])))
    else:
        main()
