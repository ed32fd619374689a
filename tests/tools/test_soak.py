"""The soak finds what is planted in it. That it passes, `make soak` shows."""

import signal
import subprocess
import sys
import time

import pytest
import soak
from common import environment

pytestmark = pytest.mark.slow


def start(*options):
    return subprocess.Popen(
        [sys.executable, soak.__file__, "--seed=1", *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    try:
        printed, _ = process.communicate(timeout=500)
    finally:
        process.terminate()
    return process.returncode, printed


@pytest.mark.parametrize(
    ("plants", "found"),
    [
        (["number"], ["Tensor-likes are not equal"]),
        (["crash"], ["ended with status -6"]),
        (["hang"], ["in wait_for_ever"]),
        (
            ["leak", "thread", "file"],
            ["allocated grew from", "threads grew from", "files grew from"],
        ),
    ],
    ids=lambda names: " ".join(names),
)
def test_planted_fault_is_found(plants, found):
    options = ["--timeout=30"] if "hang" in plants else []
    status, printed = finish(start("--minutes=0.05", "--plant", *plants, *options))
    assert status == 1, printed
    assert [what for what in found if what not in printed] == []
    assert "FAULT: " in printed


def test_ctrl_c_ends_it_with_its_figures():
    process = start()
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    status, printed = finish(process)
    assert "ended early\n" in printed
    assert status == 0, printed


def held(*memory):
    others = {"allocated": 0, "threads": 3, "files": 4}
    return [{"memory": each * soak.MEBIBYTE} | others for each in memory]


def test_growth_is_not_what_fills_caches_or_is_gone_again():
    assert soak.growth(held(*range(100, 400, 10), *[400] * 60)) == []
    assert soak.growth(held(*[400, 800] * 30)) == []


def test_growth_that_goes_on_is_found():
    (found,) = soak.growth(held(*range(400, 520, 2)))
    assert found.startswith("memory grew from")
