"""What bounds the recurrence on a GPU from below, and what cuDNN's costs.

Compiles and runs probes.cu (launches, barriers of the grid, exchanges in a cluster), then times
nn.LSTM and names its kernels. Writes a JSON file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import timing
import torch
from torch import nn
from torch.hub import tqdm  # stands in where tqdm is not installed
from torch.profiler import ProfilerActivity, profile
from torch.utils.cpp_extension import CUDA_HOME

SIZES = [128, 256, 512, 768, 1024, 2048]


def compile_probes(program: Path, architecture: str) -> None:
    """Raises RuntimeError without a CUDA toolkit."""
    if CUDA_HOME is None:
        raise RuntimeError("probes.py: expected a CUDA toolkit to compile with: set CUDA_HOME")
    source = Path(__file__).with_name("probes.cu")
    command = [f"{CUDA_HOME}/bin/nvcc", "-O3", "-std=c++17", f"-arch={architecture}"]
    subprocess.run([*command, "-o", str(program), str(source)], check=True)


def hardware() -> dict[str, float]:
    """Microseconds of each probe, and how many clusters fit."""
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "probes"
        compile_probes(program, f"sm_{major}{minor}")
        run = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return json.loads(run.stdout)


def measure_lstm(size: int, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, Any]:
    layer = nn.LSTM(size, size, device="cuda", dtype=dtype)
    input = torch.randn(args.time, args.batch, size, device="cuda", dtype=dtype)
    with torch.no_grad():
        grad = torch.randn_like(layer(input)[0])

    def inference() -> None:
        with torch.no_grad():
            layer(input)

    def training() -> None:
        torch.autograd.grad(layer(input)[0], list(layer.parameters()), grad)

    functions = {"inference": inference, "training": training}
    times = timing.medians(functions, rounds=3, min_run_time=0.02, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        training()
    kernels = {event.key: event.count for event in profiled.key_averages()}
    per_step = {what: time * 1e6 / args.time for what, time in times.items()}
    described = {"size": size, "dtype": str(dtype).removeprefix("torch.")}
    return described | {"microseconds_per_step": per_step, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="of input and state")
    parser.add_argument("--time", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="a folder")
    args = parser.parse_args()
    probed = hardware()
    for name, value in probed.items():
        print(f"{name}: {value}")
    rows: list[dict[str, Any]] = []
    described = timing.describe("cuda", "float16, bfloat16, float32") | {
        "time": args.time, "batch": args.batch, "microseconds": probed, "nn.LSTM": rows,
    }  # fmt: skip
    file = args.output / "probes_cuda.json"
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for size in tqdm(args.sizes, desc="nn.LSTM", unit="size"):
        for dtype in dtypes:
            rows.append(measure_lstm(size, dtype, args))
            timing.write(described, file)
    for row in rows:
        times = ", ".join(f"{what} {t:.2f} us" for what, t in row["microseconds_per_step"].items())
        print(f"nn.LSTM {row['size']} {row['dtype']}: {times} a step")
    timing.save(described, None, file)


if __name__ == "__main__":
    main()
