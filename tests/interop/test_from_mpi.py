"""``fc.from_mpi`` under a real mpirun: the world, parts of it, several at once, and what it refuses."""

import re
import subprocess
import sys

import pytest

from tests.bootstrap.processes import bare_environment
from tests.mpi import MPIRUN, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def mpirun(ranks, job):
    pytest.importorskip("mpi4py", reason="fc.from_mpi is for mpi4py's communicators")
    if not MPIRUN.exists():
        pytest.skip("no mpirun beside this Python; the extra 'test' brings Open MPI's")
    flags = ["--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    command = [str(MPIRUN), *flags, sys.executable, "-m", "tests.interop.mpi_jobs", job]
    environ = bare_environment(OMP_NUM_THREADS="1")
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_any_communicator_of_mpi():
    ran = mpirun(4, "parts")
    assert (ran.returncode, ran.stdout.count("done")) == (0, 4), ran.stdout + ran.stderr


def test_what_is_no_communicator_is_refused():
    ran = mpirun(2, "refused")
    assert "from_mpi takes a communicator of mpi4py, such as MPI.COMM_WORLD, got str" in ran.stdout
    assert "from_mpi got MPI.COMM_NULL: this process is no rank of that communicator" in ran.stdout


def test_a_lost_rank_is_named():
    ran = mpirun(3, "lost")
    assert len(re.findall(r"PeerDiedError rank 1 ", ran.stdout)) == 2, ran.stdout + ran.stderr
