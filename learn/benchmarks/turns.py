"""Times contenders that take turns, each in a process of its own: they register the same names."""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from torch.utils.benchmark import Timer

BOOK = Path(__file__).resolve().parents[1] / "book"
sys.path.insert(0, str(BOOK))
from run import run  # noqa: E402


def microseconds(function: Callable[[], object]) -> float:
    """The median of a call, on one thread."""
    timer = Timer("f()", globals={"f": function}, num_threads=1)
    return timer.blocked_autorange(min_run_time=0.3).median * 1e6


def take_turns(
    program: str, contenders: dict[str, Path | None], rounds: int
) -> dict[str, dict[str, float]]:
    """Medians over rounds of what `program --work NAME` prints, as JSON, on its last line.

    In each process, `import lltm` finds the code of the contender's folder.
    """
    all_times: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, folder in contenders.items():
            result = run(folder, program, "--work", name)
            assert result.returncode == 0, result.stdout
            all_times[name].append(json.loads(result.stdout.splitlines()[-1]))
    return {
        name: {what: statistics.median(t[what] for t in times) for what in times[0]}
        for name, times in all_times.items()
    }
