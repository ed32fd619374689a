"""The smallest training of examples/train_distributed.py."""

from pathlib import Path

from common import ROOT

EXAMPLES = ROOT / "examples"
STEPS = 60  # enough for a process to be killed before the last
TINY = [
    f"--text={EXAMPLES / 'char_lm.py'}",
    f"--steps={STEPS}",
    "--save-every=10",
    "--batch-size=16",
    "--length=16",
    "--embedding-size=8",
    "--hidden-size=16",
    "--timeout=30",
    "--device=cpu",
]


def last_checkpoint(output: Path) -> Path:
    (checkpoint,) = output.glob("step_*")
    return checkpoint
