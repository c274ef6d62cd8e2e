"""The peer kernels under NVIDIA's compute-sanitizer, which does not work with MPS: a GPU for each rank."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from flagcx.config import environment
from tests.gpu.test_behaviour import several_gpus

PROGRAM = shutil.which("compute-sanitizer")
# NCCL looks for kernels that its library lacks, which is reported as errors of the API; those of kernels are:
REPORTED = re.compile(
    r"Invalid __|Misaligned|out of bounds|Race reported|Potential|hazard detected", re.IGNORECASE
)


def reports(text: str) -> list[str]:
    """What the sanitizer found in kernels, of all that it printed."""
    return [line for line in text.splitlines() if REPORTED.search(line)]


@several_gpus
@pytest.mark.slow
@pytest.mark.skipif(
    PROGRAM is None, reason="compute-sanitizer is not installed: it comes with the CUDA toolkit"
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_kernels_touch_no_memory_but_theirs_and_race_with_nobody(tool):
    command = [
        str(PROGRAM), "--tool", tool, "--target-processes", "all", sys.executable, "-m", "flagcx.cli", "run",
        "-n", "2", "--timeout", "220", "tests/gpu/sanitized.py",
    ]  # fmt: skip
    sharing = ("CUDA_MPS_", "FLAGCX_SHARE_GPU")  # set for other tests in this process
    environ = {name: value for name, value in environment().items() if not name.startswith(sharing)}
    environ |= {"FLAGCX_TIMEOUT_S": "200", "FLAGCX_INIT_TIMEOUT_S": "200", "PYTHONPATH": "."}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-2000:]
    assert "SUMMARY" in printed, "the sanitizer was not at work"
    assert reports(printed) == []


def test_a_report_is_told_from_errors_of_the_api():
    printed = [
        "========= Program hit CUDA_ERROR_NOT_FOUND (error 500) on CUDA API call to cuGetProcAddress_v2.",
        "========= Invalid __global__ read of size 16 bytes",
        "========= Error: Race reported between Write access at flagcx_packets and Read access",
        "========= ERROR SUMMARY: 2 errors",
    ]
    assert reports("\n".join(printed)) == printed[1:3]
