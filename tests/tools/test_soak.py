"""That the soak sees a leak. That there is none, `make soak` shows."""

import subprocess
import sys
from pathlib import Path

import pytest
import soak
from common import environment

PROGRAM = """
import torch, soak
soak.SECONDS_OF_A_ROUND = 0.1
kept = []
soak.ROUNDS.append(lambda _: kept.append(torch.ones(2**22)))
soak.main()
"""


@pytest.mark.slow
def test_a_leak_is_found():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--minutes=0", "--seed=1"],
        cwd=Path(soak.__file__).parent,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0
    assert "MiB grew from" in ran.stderr, ran.stderr
