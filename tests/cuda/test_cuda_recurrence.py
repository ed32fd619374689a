"""The recurrence for GPUs in an emulator on the host: numbers, memory, races."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from common import CXX, ROOT, printed
from torch.utils.cpp_extension import include_paths

# The tests share programs.
pytestmark = pytest.mark.xdist_group("recurrence")
HERE = ROOT / "tests" / "cuda" / "recurrence"
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
# Faults of the machine: which program has to find each, and what it says.
PLANTS = {
    "no_barrier": ("numbers", "is nan, not"),
    "too_few_resident": ("numbers", WAITED_IN_VAIN),
    "short_shared": ("memory", "heap-buffer-overflow"),
    "plain_stores": ("races", "data race"),
}


def compile_check(folder: Path, flags: list[str]) -> Path:
    """With the emulator, of whose own accesses ThreadSanitizer knows nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    common = [CXX, "-std=c++20", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    common += [
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
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


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """By what they show."""
    root = tmp_path_factory.mktemp("recurrence")
    builds = {"numbers": (root / "0", OPTIMISED), "memory": (root / "1", ADDRESS)}
    builds["races"] = (root / "2", THREAD)
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


@pytest.mark.slow
def test_numbers_match_double_at_full_size(programs):
    printed(programs["numbers"], "--cases=10", "--units=1024", "--least-units=1024", "--blocks=128")


def test_memory_and_behaviour_are_defined(programs):
    printed(programs["memory"], "--cases=30", "--units=96")


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_no_races(programs, tiles):
    printed(programs["races"], "--cases=3", *SMALL, f"--tiles={tiles}")


@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_of_the_machine_is_found(programs, name):
    program, message = PLANTS[name]
    assert message in fails([programs[program], "--cases=3", *SMALL, f"--plant={name}"])


def test_a_case_is_repeated_by_its_seed(programs):
    said = fails([programs["numbers"], "--cases=3", "--plant=no_barrier"])
    seed = said.split("seed ")[1].split(",")[0]
    assert fails([programs["numbers"], f"--seed={seed}", "--cases=1", "--plant=no_barrier"]) == said
