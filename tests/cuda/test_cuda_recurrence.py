"""The recurrence for GPUs in an emulator on the host: numbers, memory, races, planted faults."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from common import CXX, ROOT, printed
from torch.utils.cpp_extension import include_paths

# The tests share programs.
pytestmark = pytest.mark.xdist_group("recurrence")
HERE = ROOT / "tests" / "cuda" / "recurrence"
HEADERS = "cuda/recurrence"
ADDRESS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-O1", "-g", "-fsanitize=thread"]
OPTIMISED = ["-O2"]
# The kernel ends such a wait itself, and says what turns it off.
WAITED_IN_VAIN = "waited in vain for another; with LLTM_CUDA_RECURRENCE=0"
# Cases of check.cpp.
SMALL = ["--units=64", "--blocks=16"]
# Backward has so many columns that two warps have blocks in all three thirds.
WIDE = ["--least-units=704", "--units=704"]
LONG = ["--units=32", "--steps=90"]


class Fault(NamedTuple):
    """What is replaced by what, with which flags it is found, what is said, and by which run."""

    old: str
    new: str
    flags: list[str]
    said: str
    run: tuple[str, ...] = ("--cases=10", *SMALL)


# Faults of the kernel, by what is wrong.
MUTANTS = {
    "sums of two steps in one place": Fault(
        """sums + turn % 2 * (tiles * args_.kSums);
      multiply(own, turn);
      machine_.sync_block();
      CellForward""",
        """sums;
      multiply(own, turn);
      machine_.sync_block();
      CellForward""",
        THREAD, "data race",
    ),
    "a look at the first word alone": Fault(
        """words.word[0] != kSentinel && words.word[1] != kSentinel &&
      words.word[2] != kSentinel && words.word[3] != kSentinel""",
        "words.word[0] != kSentinel", [], ", not ",
    ),
    "columns in another order": Fault(
        "8 * lane.quad + 4 * half + i / 2 * 2", "8 * lane.quad + 2 * half + i / 2 * 4", [],
        ", not ",
    ),
    "no bound of the batch": Fault(
        "row >= step.rows || resets", "resets", ADDRESS, "heap-buffer-overflow",
    ),
    "resets of the step before": Fault("load_resets_of_lanes(next_);", "", [], ", not "),
    "an index of states of 32 bits": Fault(
        "return (first_row + work_.owned_row(i)) * args_.state_size + work_.unit;",
        "return int32_t((first_row + work_.owned_row(i)) * args_.state_size + work_.unit);",
        ADDRESS, "AddressSanitizer",
    ),
    "an index of h of 32 bits": Fault(
        "args_.output + before.first_row * args_.state_size",
        "args_.output + int32_t(before.first_row * args_.state_size)",
        ADDRESS, "AddressSanitizer",
    ),
    "an index of d_gates of 32 bits": Fault(
        "(after_.first_row + row) * 3 * args_.state_size + work_",
        "int32_t((after_.first_row + row) * 3 * args_.state_size) + work_",
        ADDRESS, "AddressSanitizer",
    ),
    "a third that waits for words of the first": Fault(
        "finish(machine_, sources[tile], third * kColumnBlocks);",
        "finish(machine_, sources[tile], 0);",
        OPTIMISED, ", not ", ("--seed=2", "--cases=1", *WIDE, "--blocks=44"),
    ),
    "backward without the steps after the first 62": Fault(
        "if (turn + 1 >= args_.sequence.steps) {",
        "if (turn + 1 >= args_.sequence.steps || turn > 60) {",
        [], ", not ", ("--seed=15", "--cases=3", *LONG),
    ),
    "a row of another packed step": Fault(
        "next.first_row -= next.rows", "next.first_row -= rows", [], "a word was published twice",
    ),
    "a block that never publishes": Fault(
        "machine.thread() % 2 == 0", "machine.thread() % 2 == 0 && machine.block() != 1", [],
        WAITED_IN_VAIN,
    ),
}  # fmt: skip
# Faults of the machine, and what is said of them.
PLANTS = {
    "no_barrier": ([], "is nan, not"),
    "no_sentinel": ([], "a word was published twice"),
    "misaligned_output": ([], "a misaligned"),
    "too_few_resident": ([], WAITED_IN_VAIN),
    "short_shared": (ADDRESS, "heap-buffer-overflow"),
    "plain_stores": (THREAD, "data race"),
}


def compile_check(folder: Path, flags: list[str], csrc: Path = ROOT / "csrc") -> Path:
    """With the emulator, of whose own accesses ThreadSanitizer knows nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    common = [CXX, "-std=c++20", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    common += [
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
        f"-I{csrc}",
        f"-I{ROOT / 'csrc'}",
        f"-I{HERE}",
    ]
    common += [f"-isystem{path}" for path in include_paths()]
    emulator, program = folder / "emulator.o", folder / "check"
    of_emulator = [flag for flag in flags if flag != "-fsanitize=thread"]
    if of_emulator != flags:
        of_emulator.append("-DLLTM_THREAD_SANITIZER")
    printed(*common, *of_emulator, "-c", HERE / "emulator.cpp", "-o", emulator)
    printed(*common, *flags, HERE / "check.cpp", emulator, "-o", program)
    return program


def fails(command) -> str:
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode != 0, f"not found: {result.stdout}"
    return result.stdout + result.stderr


def mutant_of(name: str, folder: Path) -> tuple[list[str], Path]:
    fault = MUTANTS[name]
    sources = {file.name: file.read_text() for file in (ROOT / "csrc" / HEADERS).glob("*.h")}
    assert sum(source.count(fault.old) for source in sources.values()) == 1
    (folder / HEADERS).mkdir(parents=True)
    for file, source in sources.items():
        (folder / HEADERS / file).write_text(source.replace(fault.old, fault.new))
    return fault.flags or ["-O0"], folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """By what they show."""
    root = tmp_path_factory.mktemp("recurrence")
    builds = {"numbers": (root / "0", OPTIMISED), "memory": (root / "1", ADDRESS)}
    builds["races"] = (root / "2", THREAD)
    for i, name in enumerate(MUTANTS, 3):
        flags, csrc = mutant_of(name, root / f"csrc{i}")
        builds[name] = (root / str(i), flags, csrc)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = {name: pool.submit(compile_check, *build) for name, build in builds.items()}
        return {name: build.result() for name, build in built.items()}


def test_numbers_match_double(programs):
    printed(programs["numbers"], "--cases=100", "--units=96")
    printed(programs["numbers"], "--seed=1000", "--cases=12", "--units=320")
    printed(programs["numbers"], "--seed=2", "--cases=2", *WIDE, "--blocks=44")
    # One tile reads three thirds at once, and several tiles two.
    printed(programs["numbers"], "--seed=3", "--cases=2", *WIDE, "--blocks=88", "--tiles=1")
    printed(programs["numbers"], "--seed=15", "--cases=3", *LONG)


@pytest.mark.skipif("not config.getoption('--at-full-size')", reason="asked for by --at-full-size")
def test_numbers_match_double_at_full_size(programs):
    printed(programs["numbers"], "--cases=10", "--units=1024", "--least-units=1024", "--blocks=128")


def test_memory_and_behaviour_are_defined(programs):
    printed(programs["memory"], "--cases=30", "--units=96")


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_no_races(programs, tiles):
    printed(programs["races"], "--cases=3", *SMALL, f"--tiles={tiles}")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_the_kernel_is_found(programs, name):
    fault = MUTANTS[name]
    assert fault.said in fails([programs[name], *fault.run])


@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_of_the_machine_is_found(programs, name):
    flags, message = PLANTS[name]
    program = programs[
        {tuple(ADDRESS): "memory", tuple(THREAD): "races"}.get(tuple(flags), "numbers")
    ]
    said = fails([program, "--cases=3", *SMALL, f"--plant={name}"])
    assert message in said


def test_a_case_is_repeated_by_its_seed(programs):
    said = fails([programs["numbers"], "--cases=3", "--plant=no_barrier"])
    seed = said.split("seed ")[1].split(",")[0]
    assert fails([programs["numbers"], f"--seed={seed}", "--cases=1", "--plant=no_barrier"]) == said
