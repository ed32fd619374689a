"""The example trains with DDP and FSDP2 as on one process, and goes on from its checkpoints. All on
the CPU of one machine, with gloo."""

import re
import sys

import pytest
from common import ROOT, environment, printed

# The tests share the training on one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trains")]


UNSEEN = -1  # in place of the number of a step


def train(processes, output, *options):
    """The bits per character of each step that was saved, by its number, and of unseen text."""
    # torchrun ends the processes that it started if it is ended by SIGTERM, which timeout sends.
    launcher = ["timeout", "300", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = [ROOT / "examples" / "train_distributed.py", ROOT / "LICENSE", f"--output={output}"]
    # At a higher rate, Adam would make much of how gradients are rounded.
    program += ["--batch-size=4", "--learning-rate=0.003", "--save-every=2"]
    size = [f"--nproc-per-node={processes}", *program]
    env = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    said = printed(*launcher, *size, *options, env=env)
    found = re.findall(r"^step +(\d+): bits per character (\S+)$", said, re.M)
    (unseen,) = re.findall(r"^bits per character of unseen text: (\S+)$", said, re.M)
    return {int(step): float(bits) for step, bits in [*found, (UNSEEN, unseen)]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(1, tmp_path_factory.mktemp("alone"), "--steps=8")


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [((2,), (4, "--fsdp")), ((2, "--fsdp"), (1,))],
    ids=["from DDP to FSDP2", "from FSDP2 to DDP"],
)
def test_learns_the_same_on_any_number_of_processes(alone, begins, goes_on, tmp_path):
    first = train(begins[0], tmp_path, *begins[1:], "--steps=4")
    (tmp_path / "step_00000005").mkdir()  # as a process that was killed leaves it
    second = train(goes_on[0], tmp_path, *goes_on[1:], "--steps=8")
    assert (list(first), list(second)) == ([2, 4, UNSEEN], [6, 8, UNSEEN])
    assert first | second == pytest.approx(alone, abs=1e-3)
    assert alone[8] < alone[2] - 0.5
