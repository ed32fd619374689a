"""Medians of torch.utils.benchmark, contenders taking turns, and what describes the run."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load

import lltm_ops

HERE = Path(__file__).parent
# The numbers are those of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def cuda_timer() -> Callable[[], float]:
    """Seconds by events on the current stream, for Timer."""
    start = torch.cuda.Event(enable_timing=True)
    start.record()

    def now() -> float:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return start.elapsed_time(event) * 1e-3

    return now


def settle_allocator() -> None:
    """Lets glibc keep memory instead of giving it back to the system after some calls.

    The next call would pay for its pages anew. Blocks of more than 32 MiB go back nevertheless.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def medians(
    functions: dict[str, Callable[[], Any]],
    rounds: int = 5,
    min_run_time: float = 0.05,
    device: str = "cpu",
) -> dict[str, float]:
    """Median seconds of a call of each function, over rounds in which they take turns.

    Each round begins with another one.
    """
    options = {"timer": cuda_timer()} if device == "cuda" else {}
    timers = {
        name: Timer(
            "function()",
            globals={"function": function},
            num_threads=torch.get_num_threads(),
            **options,
        )
        for name, function in functions.items()
    }
    for timer in timers.values():
        timer.timeit(3)  # compiles, and warms the caches
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(timers)
    for first in range(rounds):
        for i in range(len(names)):
            name = names[(first + i) % len(names)]
            times[name].append(timers[name].blocked_autorange(min_run_time=min_run_time).median)
    return {name: statistics.median(values) for name, values in times.items()}


def load_native() -> None:
    """Builds and loads what is written in C++: ``torch.ops.lltm_benchmark``, a peer and probes."""
    # pip puts ninja beside python, which need not be on PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # A folder of its own: a build that was killed leaves a lock behind in torch's cache.
    with tempfile.TemporaryDirectory() as directory:
        load(
            "lltm_benchmark",
            [str(HERE / "tutorial_cell.cpp"), str(HERE / "roofs.cpp")],
            extra_cflags=["-O3", "-march=native", "-fopenmp"],
            build_directory=directory,
            is_python_module=False,
        )


def machine(device: str) -> str:
    """What the processor calls itself."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    said = {name.strip(): value.strip() for name, _, value in lines}
    name = said.get("model name", platform.processor())
    if "cpu family" in said:
        name += f", family {said['cpu family']}, model {said['model']}"
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def caches() -> str:
    """Size and ways of those that hold data, as the operating system knows them."""
    found = []
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        names = ("level", "size", "ways_of_associativity", "type")
        level, size, ways, kind = ((cache / name).read_text().strip() for name in names)
        if kind != "Instruction":
            found.append(f"L{level} {size} in {ways} ways")
    return ", ".join(found)


def pages() -> str:
    """How Linux gives out huge pages, and whether PyTorch asks for them."""
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = re.findall(r"\[(\w+)\]", modes.read_text() if modes.exists() else "[unknown]")[0]
    asks = os.environ.get("THP_MEM_ALLOC_ENABLE", "not set")
    return f"huge pages {mode}, THP_MEM_ALLOC_ENABLE {asks}"


def write(run: dict[str, Any], file: Path) -> None:
    """Writes the JSON file, all of it or nothing: also before the last row, which may fail."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(run, indent=1) + "\n")
    unfinished.replace(file)


def save(run: dict[str, Any], plot: str | None, file: Path) -> None:
    """Writes the JSON file, and, if there is one, its picture, where matplotlib is installed."""
    write(run, file)
    print(f"wrote {file}")
    if plot is None:
        return
    try:
        import plots
    except ImportError as error:
        print(f"no picture: {error}")
        return
    picture = file.with_suffix(".png")
    getattr(plots, plot)(run, picture)
    print(f"wrote {picture}")


def describe(device: str, dtype: str) -> dict[str, Any]:
    """Machine and versions, for the JSON file."""
    return {
        "machine": machine(device),
        **({"caches": caches(), "pages": pages()} if device == "cpu" else {}),
        "device": device,
        "dtype": dtype,
        "python": platform.python_version(),
        **lltm_ops.build_info(),
    }
