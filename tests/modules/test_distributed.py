"""Many processes compute what one computes: the operators on DTensor, and the example with DDP and
FSDP2. All on the CPU of one machine, with gloo."""

import contextlib
import copyreg
import errno
import functools
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path, PosixPath
from random import Random, SystemRandom

import dtensor_checks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import ROOT, each_sequence_kind
from ranks import Ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Shard

import lltm_ops

EXAMPLES = ROOT / "examples"
PACKAGE_PARENT = str(Path(lltm_ops.__file__).parent.parent)
TIMEOUT = 300  # of what takes seconds, on a machine that has much else to do
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_results_that_are_none = pytest.mark.skipif(
    TORCH < (2, 13), reason="DTensor refuses operators of which a result is None"
)
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


# Those of so many processes run one after the other, and so these begin once.
NUMBERS = [
    pytest.param(number, marks=pytest.mark.xdist_group(f"{number} processes")) for number in (2, 4)
]


@pytest.fixture(scope="module", params=NUMBERS, ids="{} processes".format)
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.kill()


def test_cell_of_sharded_batch(ranks):
    ranks.run(dtensor_checks.sharded_batch, "forward", None)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_sequence_of_sharded_batch(ranks, reverse, resets):
    ranks.run(dtensor_checks.sharded_batch, "sequence_forward", ("padded", reverse, resets))


@pytest.mark.parametrize(
    "placements",
    [
        {},
        {"input": Shard(0)},
        {"input": Shard(1), "weights": Shard(0)},
        {"weights": Shard(1), "bias": Shard(0), "old_h": Shard(1), "old_cell": Shard(0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [6, 1])
def test_cell_of_any_placement(ranks, placements, batch):
    ranks.run(dtensor_checks.any_placement, "forward", None, batch, placements)


@each_sequence_kind
@pytest.mark.parametrize(
    "placements",
    [
        {"input": Shard(0), "h0": Shard(0)},
        {"input": Shard(1), "weights": Shard(0), "c0": Shard(1)},
    ],
    ids=str,
)
def test_sequence_of_any_placement(ranks, kind, placements):
    ranks.run(dtensor_checks.any_placement, "sequence_forward", kind, 6, placements)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_packed_sequence_is_replicated(ranks, with_gradients):
    ranks.run(dtensor_checks.packed_is_replicated, with_gradients)


def test_plain_batch_sizes_are_refused(ranks):
    ranks.run(dtensor_checks.plain_batch_sizes_are_refused)


def test_partial_input_is_summed_first(ranks):
    ranks.run(dtensor_checks.parts_of_a_sum)


@needs_results_that_are_none
def test_every_output_mask(ranks):
    ranks.run(dtensor_checks.every_output_mask)


def test_output_that_nobody_uses(ranks):
    ranks.run(dtensor_checks.unused_output)


@needs_results_that_are_none
def test_second_derivative(ranks):
    ranks.run(dtensor_checks.second_derivative)


@needs_results_that_are_none
@pytest.mark.parametrize(
    "options", [{"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str
)
def test_layer(ranks, options):
    ranks.run(dtensor_checks.layer, options)


@needs_results_that_are_none
@pytest.mark.parametrize(
    "options",
    [{"bidirectional": True, "bias": False}, {"num_layers": 2, "variational_dropout": True}],
    ids=str,
)
def test_layer_of_packed_sequences(ranks, options):
    ranks.run(dtensor_checks.layer_of_packed, options)


def test_mesh_of_two_dimensions(ranks):
    ranks.run(dtensor_checks.mesh_of_two_dimensions)


IMPORTS = {
    "before": "import torch.distributed.tensor, lltm_ops",
    "after": "import lltm_ops, torch.distributed.tensor",
    "after a probe": """
import lltm_ops, importlib.util
importlib.util.find_spec("torch.distributed.tensor")
import torch.distributed.tensor""",
    "after an import that failed": """
import lltm_ops, sys
sys.modules["torch.distributed.tensor._ops"] = None
try:
    import torch.distributed.tensor
except ImportError:
    del sys.modules["torch.distributed.tensor._ops"]
import torch.distributed.tensor""",
    "in many threads": """
import lltm_ops, importlib, importlib.util
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as threads:
    for function in [importlib.util.find_spec, importlib.import_module] * 8:
        threads.submit(function, "torch.distributed.tensor")""",
    "and the package again": """
import importlib, sys, lltm_ops
importlib.reload(lltm_ops)
for name in [name for name in sys.modules if name.startswith("lltm_ops")]:
    del sys.modules[name]
import lltm_ops, torch.distributed.tensor
assert sum("LLTM" in type(finder).__name__ for finder in sys.meta_path) == 1
importlib.reload(lltm_ops)""",
}


@pytest.mark.parametrize("imports", IMPORTS)
def test_dtensor_works_however_it_is_imported(imports):
    run_python(f"""{IMPORTS[imports]}
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
shapes = [(2, 5), (12, 9), (12,), (2, 4), (2, 4)]
tensors = [distribute_tensor(torch.randn(shape), mesh, [Replicate()]) for shape in shapes]
assert lltm_ops.forward(*tensors)[0].placements == (Replicate(),)
""")


def test_package_does_not_import_dtensor():
    run_python("import lltm_ops, sys; assert 'torch.distributed.tensor' not in sys.modules")


def environment(**more):
    path = os.pathsep.join([PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | more


def run_python(code):
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert result.returncode == 0, result.stderr


@contextlib.contextmanager
def torchrun(processes, output, *options, restarts=0):
    """The example on so many processes. None of them outlives the test."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launched = [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    program = [str(EXAMPLES / "train_distributed.py"), f"--output={output}", *TINY, *options]
    process = subprocess.Popen(
        [*launcher, *launched, *program],
        env=environment(),
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


def last_checkpoint(output):
    (checkpoint,) = output.glob("step_*")
    return checkpoint


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


@pytest.fixture
def example(monkeypatch):
    """The example as a module, in a group of this process alone."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / "train_distributed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with monkeypatch.context() as patched:
        patched.setattr(module, "connect", lambda *_: None)
        patched.setattr(dist, "destroy_process_group", lambda: None)
        yield module
    torch.set_num_threads(threads)
    dist.destroy_process_group()


def test_example_needs_no_package_that_it_does_not_use():
    run_python(f"""
import sys
sys.modules |= dict.fromkeys(["matplotlib", "tqdm"])
sys.path.append({str(EXAMPLES)!r})
import train_distributed
""")


def test_checkpoint_is_the_latest_only_when_it_is_complete(example, tmp_path, monkeypatch):
    args = example.command_line().parse_args([*TINY, f"--output={tmp_path}"])
    args.device = torch.device("cpu")
    training, _ = example.prepare(args)
    example.save(training, tmp_path)
    before = last_checkpoint(tmp_path)

    def save_half(_, checkpoint_id):
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    training.bits = [1.0]
    expected = f"cannot write to --output {tmp_path}: No space left on device"
    with monkeypatch.context() as patched, pytest.raises(example.UsageError, match=expected):
        patched.setattr(dcp, "save", save_half)
        example.save(training, tmp_path)
    assert list(tmp_path.iterdir()) == [before]

    (tmp_path / "step_00000001.partial").mkdir()  # as a killed process leaves it
    example.save(training, tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "step_00000001"]


def test_checkpoint_is_on_the_disk_before_it_has_its_name(example, tmp_path, monkeypatch):
    args = example.command_line().parse_args([*TINY, f"--output={tmp_path}"])
    args.device = torch.device("cpu")
    training, _ = example.prepare(args)
    done = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda file: done.append(os.readlink(f"/proc/self/fd/{file}")))
        patched.setattr(example.shutil, "rmtree", lambda folder: done.append(f"without {folder}"))
        (tmp_path / "step_99999999").mkdir()
        example.save(training, tmp_path)
    partial = f"{tmp_path}/step_00000000.partial"
    files = {f"{partial}/{name}" for name in ("training.tmp", "__0_0.distcp", ".metadata.tmp")}
    assert files <= set(done)
    assert done[-3:] == [partial, str(tmp_path), f"without {tmp_path}/step_99999999"]


def test_goes_on_where_torchrun_has_restarted_it(example, tmp_path, monkeypatch):
    args = example.command_line().parse_args([*TINY, f"--output={tmp_path}"])
    args.device = torch.device("cpu")
    training, _ = example.prepare(args)
    training.bits = [4.0, 3.0]
    example.save(training, tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert example.prepare(args)[0].bits == [4.0, 3.0]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(example.UsageError, match="already: expected --resume or another --output"):
        example.prepare(args)
    assert last_checkpoint(tmp_path).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--accumulate 3", "expected --batch-size to be a multiple of 3, which is the number of"),
        ("--resume", "--resume: there is no checkpoint in runs/train_distributed"),
        ("--output taken", "cannot write to --output taken: File exists"),
        ("--output /proc", "cannot write to --output /proc: "),
        ("--strategy tp", "argument --strategy: invalid choice: 'tp'"),
        ("--timeout 0", "--timeout: expected a whole number from 1 to 99999999, but got 0"),
    ],
)
def test_example_rejects(example, options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").touch()
    monkeypatch.chdir(tmp_path)
    assert message in rejection(example, options.split(), capsys)


def rejection(example, options, capsys):
    with pytest.raises(SystemExit) as exit:
        example.main([*TINY, *options])
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def checkpoint(example, tmp_path):
    """A checkpoint of a training that has hardly begun."""
    args = example.command_line().parse_args([*TINY, f"--output={tmp_path}"])
    args.device = torch.device("cpu")
    training, _ = example.prepare(args)
    training.bits = [4.0, 3.0]
    example.save(training, tmp_path)
    return last_checkpoint(tmp_path)


def test_example_resumes_only_its_own_configuration(example, checkpoint, capsys):
    options = ["--resume", f"--output={checkpoint.parent}", "--hidden-size=32"]
    expected = "was trained with --hidden-size 16, not 32"
    assert expected in rejection(example, options, capsys)


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def hostile_metadata(checkpoint, hostile):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(hostile))


def hostile_part_of_metadata(checkpoint, hostile):
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    metadata.planner_data = hostile
    hostile_metadata(checkpoint, metadata)


def hostile_attribute_in_metadata(checkpoint, hostile):
    """Asks for it by getattr, which Python 3.11.0 to 3.11.3 need for an enumeration."""

    class Attribute:
        def __reduce__(self):
            return getattr, (dcp.Metadata, "__init__")

    hostile_metadata(checkpoint, [Attribute(), hostile])


def hostile_change_of_a_class(checkpoint, _):
    """Leaves the metadata whole, and adds attributes to what it may name."""
    file = checkpoint / ".metadata"
    metadata = file.read_bytes().removesuffix(pickle.STOP)
    for name in (b"torch.distributed.checkpoint.metadata\nMetadata", b"pathlib\nPosixPath"):
        # GLOBAL, the state (None, {"changed": None}), BUILD, POP
        metadata += b"c" + name + b"\nN}X\x07\0\0\0changedNs\x86b0"
    file.write_bytes(metadata + pickle.STOP)


def hostile_in_place_of_a_tensor(checkpoint, hostile):
    """The metadata says that an object was pickled there, not that a tensor was saved."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    tensors = {name: torch.empty(what.size) for name, what in metadata.state_dict_metadata.items()}
    (checkpoint / ".metadata").unlink()  # torch would warn that it is overwritten
    dcp.save(tensors | {"model.head.bias": hostile}, checkpoint_id=checkpoint)


def hostile_shard(checkpoint, hostile):
    """The metadata says that it is tensors."""
    torch.save(hostile, checkpoint / "__0_0.distcp")
    length = (checkpoint / "__0_0.distcp").stat().st_size
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    for where in metadata.storage_data.values():
        where.offset, where.length = 0, length
    hostile_metadata(checkpoint, metadata)


@pytest.mark.parametrize(
    "attack",
    [
        hostile_metadata,
        hostile_part_of_metadata,
        hostile_attribute_in_metadata,
        hostile_change_of_a_class,
        hostile_in_place_of_a_tensor,
        hostile_shard,
    ],
)
def test_example_runs_nothing_that_a_checkpoint_contains(
    example, checkpoint, attack, capsys, caplog
):
    marker = checkpoint.parent / "it ran"
    attack(checkpoint, Hostile(str(marker)))
    assert_not_resumed(example, checkpoint, capsys, caplog)
    assert not marker.exists()
    assert not hasattr(dcp.Metadata, "changed")
    assert not hasattr(PosixPath, "changed")


def assert_not_resumed(example, checkpoint, capsys, caplog):
    """All it prints is one sentence."""
    printed = rejection(example, ["--resume", f"--output={checkpoint.parent}"], capsys)
    expected = f"error: --resume: {checkpoint} is not a complete checkpoint of this program"
    assert expected in printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert not any(record.exc_info for record in caplog.records)


def test_example_reads_metadata_that_any_python_wrote(example, checkpoint):
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    encoding = type(metadata.state_dict_metadata["model.head.bias"].properties.__getstate__()[3])
    by_name = {encoding: lambda member: (getattr, (encoding, member.name))}
    pickler.dispatch_table = copyreg.dispatch_table | by_name
    pickler.dump(metadata)
    assert b"getattr" in file.getvalue()
    (checkpoint / ".metadata").write_bytes(file.getvalue())
    assert example.SafeReader(checkpoint).read_metadata() == metadata


def truncate(name):
    def damage(checkpoint):
        whole = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(whole[: len(whole) // 2])

    return damage


def remove(name):
    return lambda checkpoint: (checkpoint / name).unlink()


def replace_rest(**values):
    def damage(checkpoint):
        rest = json.loads((checkpoint / "training.json").read_text())
        (checkpoint / "training.json").write_text(json.dumps(rest | values))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        *(change(name) for change in (truncate, remove) for name in
          ("training.json", "__0_0.distcp", ".metadata")),
        replace_rest(scheduler={}),
        replace_rest(scheduler=None),
        replace_rest(bits="4.0"),
        replace_rest(bits=["4.0", "3.0"]),
        replace_rest(config=[]),
        lambda checkpoint: (checkpoint / "training.json").write_text("[]"),
        lambda checkpoint: (checkpoint / ".metadata").write_bytes(pickle.dumps(3)),
    ],
)  # fmt: skip
def test_example_resumes_only_what_it_saves(example, checkpoint, damage, capsys, caplog):
    damage(checkpoint)
    assert_not_resumed(example, checkpoint, capsys, caplog)


def test_example_wants_torchrun(example, monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert "start it with torchrun --standalone" in rejection(example, [], capsys)
