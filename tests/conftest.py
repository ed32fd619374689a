import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from poison import poison_fresh_memory

poison_fresh_memory()
# A shell lets what it starts in the background ignore SIGINT, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# pip puts ninja and cmake beside python, which need not be on PATH.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def pytest_addoption(parser):
    parser.addoption(
        "--at-full-size", action="store_true", help="tests of minutes that stand in for a large GPU"
    )


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    left_out = {item for item in items if item.get_closest_marker("needs_cuda")}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_runtest_setup():
    # What fails for some random numbers fails again in the next run, or never.
    torch.manual_seed(0)


class Running:
    """Names each test that has run for ten seconds. pytest-xdist runs tests elsewhere."""

    def __init__(self, reporter):
        self.reporter = reporter
        self.tests = {}
        threading.Thread(target=self.say, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid):
        self.tests[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self.tests.pop(nodeid, None)

    def say(self):
        while True:
            time.sleep(10)
            for nodeid, start in sorted(self.tests.items()):
                seconds = time.monotonic() - start
                if seconds > 10:
                    self.reporter.write_line(f"\n{nodeid} has run for {seconds:.0f} s")


def pytest_sessionstart(session):
    if session.config.getoption("numprocesses", None):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        session.config.pluginmanager.register(Running(reporter))


def pytest_terminal_summary(terminalreporter):
    if not torch.cuda.is_available():
        terminalreporter.write_line(
            "There is no GPU: tests/cuda/test_cuda.py and other tests on a GPU were left out."
        )
