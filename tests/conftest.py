import os
import signal
import sys
from pathlib import Path

import torch
from poison import poison_fresh_memory

poison_fresh_memory()
# A shell lets what it starts in the background ignore SIGINT, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# pip puts ninja and cmake beside python, which need not be on PATH.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    left_out = {item for item in items if item.get_closest_marker("needs_cuda")}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_runtest_setup():
    # What fails for some random numbers fails again in the next run, or never.
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter):
    if not torch.cuda.is_available():
        terminalreporter.write_line(
            "There is no GPU: tests/cuda/test_cuda.py and other tests on a GPU were left out."
        )
