"""What a call frees stays with the process, so the next call faults in no page anew."""

import os
import statistics
import subprocess
import sys

import pytest

FAULTS_OF_THE_TENTH_CALL = """
import resource
import torch
import lltm_ops

torch.set_num_threads(1)
layer = lltm_ops.LLTM(100, 300, num_layers=2)
input = torch.randn(40, 24, 100)

for i in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with torch.no_grad():
        layer(input)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_OF_AN_OUTPUT = 40 * 24 * 300 * 4 // 4096


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc")
def test_the_tenth_call_faults_in_no_page():
    """In several processes, because where the heap begins is random. Without keep_memory() most of
    them fault in 1,000 pages a call or more."""
    settings = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    command = [sys.executable, "-c", FAULTS_OF_THE_TENTH_CALL]
    processes = [
        subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True) for _ in range(5)
    ]
    faults = [int(process.communicate()[0]) for process in processes]
    assert statistics.median(faults) < PAGES_OF_AN_OUTPUT / 4, faults
