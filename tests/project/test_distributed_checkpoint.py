"""What the example of distributed training saves, reads and refuses, in a process of its own."""

import copyreg
import errno
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import PosixPath

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import environment, program, rejection
from tiny_training import EXAMPLES, TINY, last_checkpoint


@pytest.fixture
def example(monkeypatch):
    """The example as a module, in a group of this process alone."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    module = program(EXAMPLES / "train_distributed.py")
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with monkeypatch.context() as patched:
        patched.setattr(module, "connect", lambda *_: None)
        patched.setattr(dist, "destroy_process_group", lambda: None)
        yield module
    torch.set_num_threads(threads)
    dist.destroy_process_group()


def test_example_needs_no_package_that_it_does_not_use():
    code = f"""
import sys
sys.modules |= dict.fromkeys(["matplotlib", "tqdm"])
sys.path.append({str(EXAMPLES)!r})
import train_distributed
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=300)


@pytest.fixture
def training(example, tmp_path):
    """One that has not begun."""
    args = example.command_line().parse_args([*TINY, f"--output={tmp_path}"])
    args.device = torch.device("cpu")
    return example.prepare(args)[0]


def test_checkpoint_is_the_latest_only_when_it_is_complete(
    example, training, tmp_path, monkeypatch
):
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


def test_checkpoint_is_on_the_disk_before_it_has_its_name(example, training, tmp_path, monkeypatch):
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
    assert message in rejection(example.main, [*TINY, *options.split()], capsys)


@pytest.fixture
def checkpoint(example, training, tmp_path):
    """A checkpoint of a training that has hardly begun."""
    training.bits = [4.0, 3.0]
    example.save(training, tmp_path)
    return last_checkpoint(tmp_path)


def test_example_resumes_only_its_own_configuration(example, checkpoint, capsys):
    options = ["--resume", f"--output={checkpoint.parent}", "--hidden-size=32"]
    expected = "was trained with --hidden-size 16, not 32"
    assert expected in rejection(example.main, [*TINY, *options], capsys)


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
    options = ["--resume", f"--output={checkpoint.parent}"]
    sentence = rejection(example.main, [*TINY, *options], capsys)
    assert f"--resume: {checkpoint} is not a complete checkpoint of this program" in sentence
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
    assert "start it with torchrun --standalone" in rejection(example.main, TINY, capsys)
