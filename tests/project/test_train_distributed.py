"""The example trains with DDP and FSDP2 as on one process, whatever is killed when. All
on the CPU of one machine, with gloo."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random, SystemRandom

import pytest
import torch
from common import environment
from tiny_training import EXAMPLES, STEPS, TINY, last_checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

TIMEOUT = 300  # of what takes seconds, on a machine that has much else to do


@contextlib.contextmanager
def torchrun(processes, output, *options, restarts=0):
    """The example on so many processes. None of them outlives the test."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launched = [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    program = [str(EXAMPLES / "train_distributed.py"), f"--output={output}", *TINY, *options]
    process = subprocess.Popen(
        [*launcher, *launched, *program],
        env=environment(PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends what it started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        process.kill()
        process.stdout.close()


def finish(process):
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, printed
    return printed


def trained(output):
    """What the last checkpoint holds, as plain tensors."""
    checkpoint = last_checkpoint(output)
    assert checkpoint.name == f"step_{STEPS:08}"
    dcp_to_torch_save(checkpoint, output / "whole.pt")
    tensors = torch.load(output / "whole.pt", weights_only=True)
    return tensors | json.loads((checkpoint / "training.json").read_text())


def assert_same_training(actual, expected, **tolerance):
    for what in (
        lambda saved: saved["bits"],
        lambda saved: saved["model"],
        lambda saved: saved["optimizer"]["state"],
    ):
        torch.testing.assert_close(what(actual), what(expected), **tolerance)


def trains(test):
    """Slow, and one after the other: they share runs."""
    return pytest.mark.slow(pytest.mark.xdist_group("trains")(test))


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains with these options, once for all tests that ask for it."""

    @functools.cache
    def train(processes, *options):
        output = tmp_path_factory.mktemp("trained")
        with torchrun(processes, output, *options) as process:
            finish(process)
        return trained(output)

    return train


@pytest.mark.parametrize(
    "run",
    [
        (2, "--strategy=ddp"),
        (2, "--strategy=fsdp"),
        (4, "--strategy=ddp", "--accumulate=2"),
        (4, "--strategy=fsdp", "--accumulate=2"),
    ],
    ids=lambda run: " ".join(map(str, run)),
)
@trains
def test_same_training_as_one_process(train, run):
    alone = train(1)
    assert alone["bits"][-1] < alone["bits"][0] - 1
    assert_same_training(train(*run), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@trains
def test_bfloat16_learns_nearly_the_same(train, strategy):
    rounded, exact = train(2, f"--strategy={strategy}", "--bf16"), train(1)
    torch.testing.assert_close(rounded["bits"], exact["bits"], rtol=0, atol=0.02)
    assert rounded["bits"] != exact["bits"]
    assert all(parameter.dtype == torch.float32 for parameter in rounded["model"].values())


def kill_one_after_a_checkpoint(process):
    """SIGKILL; returns the step of the last checkpoint that was reported before."""
    while not (saved := re.search(r"step +(\d+): .* saved", line := process.stdout.readline())):
        assert line, "ended before a checkpoint"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    return int(saved[1])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@trains
def test_killed_process_is_restarted_from_the_last_checkpoint(train, strategy, tmp_path):
    with torchrun(2, tmp_path, f"--strategy={strategy}", restarts=1) as process:
        saved = kill_one_after_a_checkpoint(process)
        printed = finish(process)
    continued = re.search(r"continues after step (\d+)", printed)
    assert saved <= int(continued[1]) < STEPS
    whole = train(2, f"--strategy={strategy}")
    assert_same_training(trained(tmp_path), whole, rtol=0, atol=0)


def kill_one_inside_a_save(process, output, random):
    """SIGKILL, at any moment of it."""
    while "saved" not in (line := process.stdout.readline()):
        assert line, "ended before a checkpoint"
    while not list(output.glob("step_*.partial")):
        assert process.poll() is None, "ended before another checkpoint"
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.05))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(random.choice(children)), signal.SIGKILL)


@trains
def test_sigkill_at_random_moments_inside_saves_loses_nothing(train, tmp_path):
    seed = SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    random, kills = Random(seed), 3
    options = ("--strategy=fsdp", "--save-every=1")
    with torchrun(2, tmp_path, *options, restarts=kills) as process:
        for _ in range(kills):
            kill_one_inside_a_save(process, tmp_path, random)
        printed = finish(process)
    assert "continues after step" in printed
    assert_same_training(trained(tmp_path), train(2, "--strategy=fsdp"), rtol=0, atol=0)


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory):
    """Two processes with FSDP2, one of them killed, and the step of the checkpoint before that."""
    output = tmp_path_factory.mktemp("half_trained")
    with torchrun(2, output, "--strategy=fsdp") as process:
        saved = kill_one_after_a_checkpoint(process)
        process.communicate(timeout=TIMEOUT)
        assert process.returncode != 0
    return output, saved


@pytest.mark.parametrize(
    "run",
    [(1, "--strategy=ddp"), (2, "--strategy=fsdp"), (4, "--strategy=fsdp")],
    ids=lambda run: " ".join(map(str, run)),
)
@trains
def test_resumes_on_any_number_of_processes_what_was_killed(train, half_trained, run, tmp_path):
    killed, saved = half_trained
    output = tmp_path / "resumed"
    shutil.copytree(killed, output)
    with torchrun(run[0], output, *run[1:], "--resume") as process:
        continued = re.search(r"continues after step (\d+)\n", finish(process))
    assert saved <= int(continued[1]) < STEPS
    assert_same_training(trained(output), train(1), rtol=1e-4, atol=1e-5)
