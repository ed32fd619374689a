"""The soak finds what is planted in it. That it passes, `make soak` shows."""

import subprocess
import sys
from pathlib import Path

import pytest
import soak
from common import environment

PROGRAM = """
import os, threading, torch, lltm_ops, soak
soak.SECONDS_OF_A_ROUND = 0.1
soak.ROUNDS.insert(0, lambda _: setattr(soak, "TIMEOUT", 20))
def plant(fault):
    soak.ROUNDS.append(lambda _: fault())
def sign():
    return 1 if threading.current_thread() is threading.main_thread() else -1
{}
soak.main()
"""
NUMBER = """
right = lltm_ops.forward
lltm_ops.forward = lambda *arguments: [sign() * result for result in right(*arguments)]
"""
ERROR = """
soak.ERRORS = [("forward", "input too wide")]
plant(lambda: setattr(soak.test_errors, "arguments_of", lambda *_: soak.common.sample_inputs()))
"""
THREAD = "plant(lambda: threading.Thread(target=threading.Event().wait, daemon=True).start())"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (NUMBER, [" of cell ", "Tensor-likes are not equal"]),
        (ERROR, ["forward, input too wide: no error"]),
        ("kept = []; plant(lambda: kept.append(torch.ones(2**22)))", ["MiB grew from"]),
        ("kept = []; plant(lambda: kept.append(open(os.devnull)))", ["files grew from"]),
        (THREAD, ["threads grew from"]),
        ("plant(threading.Event().wait)", ["Timeout", "in wait"]),
        ("plant(os.abort)", ["Fatal Python error: Aborted"]),
        ("os.fork = lambda fork=os.fork: fork() or os._exit(3)", ["child ended with 3"]),
    ],
    ids=["number", "error", "memory", "file", "thread", "hang", "crash", "child"],
)
def test_planted_fault_is_found(planted, words):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(planted), "--minutes=0", "--seed=1"],
        cwd=Path(soak.__file__).parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode != 0
    assert [each for each in words if each not in ran.stderr] == [], ran.stderr
