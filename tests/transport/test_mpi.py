"""NumPy arrays between hosts by MPI: real ranks of a real mpirun, on hosts that differ by their names."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

import pytest

from flagcx.errors import PeerTimeoutError
from flagcx.executor.open import groups_of
from flagcx.selection.candidates import Request
from flagcx.selection.rules import MultiHostRules
from flagcx.transport.network.watch import Watch
from tests.mpi import ROOT, run_mpi
from tests.transport.told import PARTS, check_losses, check_mistakes, check_waits


def run(size: int, name: str, timeout_s: float = 180) -> tuple[int, str]:
    """Runs a job of ``network_jobs`` on two hosts; its exit code and what it printed."""
    with tempfile.TemporaryDirectory() as directory:
        return run_mpi(size, "tests.transport.network_jobs", name, directory, timeout_s=timeout_s)


@pytest.mark.slow
def test_every_call_between_hosts():
    """Collectives; transfers, objects, groups and splits; messages that move together, beside collectives.

    By four ranks on two hosts; in the test of UCX one of the hosts has one rank.
    """
    code, printed = run(4, "everything", timeout_s=300)
    assert code == 0, printed
    assert re.findall(r"done \w+", printed) == PARTS, printed


@pytest.mark.slow
def test_a_rank_that_stays_away_is_named():
    _, printed = run(4, "absent")
    said = [line for line in printed.splitlines() if line.startswith("rank ")]
    assert len(said) == 3, printed
    assert any("PeerTimeoutError" in line and "rank 2 did not take part" in line for line in said), printed


@pytest.mark.slow
def test_a_rank_that_ends_early_is_missed_at_once():
    _, printed = run(3, "ends_early")
    for rank in (0, 1):
        assert f"rank {rank} PeerDiedError soon=True: rank 2 has ended" in printed or (
            f"rank {rank} AbortedError soon=True" in printed
        ), printed
    assert "PeerDiedError soon=True: rank 2 has ended" in printed, printed


@pytest.mark.parametrize("job", ["losses", pytest.param("losses_beside_mpi4py", marks=pytest.mark.slow)])
def test_ranks_go_on_after_losses_and_end_where_mpi_does(job):
    _, printed = run_mpi(4, "tests.transport.network_jobs", job, options=("--with-ft", "ulfm"), timeout_s=60)
    check_losses(printed)


@pytest.mark.slow
def test_calls_that_do_not_fit_are_told_to_every_rank():
    """And the program may end MPI itself."""
    code, printed = run(3, "mistakes_and_finalize")
    assert code == 0 and "done" in printed, printed
    check_mistakes(printed)


@pytest.mark.slow
def test_waits_between_hosts_are_explained():
    """And what comes after a time-out meets no array."""
    code, printed = run(3, "waits")  # MPI may fail at its end: rank 2 never received the long send
    assert code in (0, 1) and "signal" not in printed, printed
    check_waits(printed)


def alone(program: str) -> str:
    """Runs a program as the only rank of a job, which MPI serves too; returns what it printed."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("thread_level = 'serialized'", "level 'serialized'"),
        ("threads = False", "level 'single'"),
        ("initialize = False", "initialize is False"),
    ],
)
def test_mpi_that_cannot_serve_is_found_at_init(setting, said):
    init = "try:\n    fc.init(transport='mpi')\nexcept fc.ArgumentError as error:\n    print(error)"
    printed = alone(f"import mpi4py\nmpi4py.rc.{setting}\nimport flagcx as fc\n{init}")
    assert said in printed and "MPI.Init_thread(MPI.THREAD_MULTIPLE)" in printed, printed


def test_messages_to_self():
    """In any number of pieces; and taken back after an error."""
    alone("from tests.transport.network_jobs import to_self; to_self()")


class SlowStore:
    """A store behind a link that is full: no answer comes in time."""

    rank, size, host = 0, 4, None

    def check(self) -> None:
        pass

    def add(self, key: str, amount: int) -> int:
        raise PeerTimeoutError("the store does not answer")

    def silent(self):
        return self.host


def test_a_store_that_is_slow_ends_no_call_before_its_time():
    watch = Watch(SlowStore(), timeout_s=60)
    for waited_s in (0.25, 0.5, 1.0, 30.0):
        watch.look("allreduce", 1, waited_s, True)
    with pytest.raises(PeerTimeoutError, match=r"rank 1 did not take part within 60.5 s"):
        watch.look("allreduce", 1, 60.5, True)


def test_a_rank_whose_store_is_silent_is_named():
    """All others may wait for the rank that serves the store, which then tells nothing of them."""
    store = SlowStore()
    store.host = 3
    with pytest.raises(PeerTimeoutError, match=r"rank 3 did not take part.*waits for rank 1") as caught:
        Watch(store, timeout_s=60).look("allreduce", 1, 60.5, True)
    assert caught.value.peer == 3


def test_the_ranks_of_each_host():
    assert groups_of(["b", "a", "b", "c"]) == ((0, 2), (1,), (3,))


@pytest.mark.parametrize(
    ("collective", "nbytes", "groups", "chosen"),
    [
        ("allreduce", 1 << 10, ((0, 1), (2, 3)), "hierarchical"),
        ("allreduce", 1 << 20, ((0,), (1,)), "hierarchical"),
        ("allreduce", 1 << 10, ((0,), (1,)), "recursive_doubling"),
        ("broadcast", 1 << 20, ((0, 1), (2, 3)), "hierarchical"),
        ("broadcast", 1 << 20, ((0,), (1,)), "chain"),
        ("allgather", 1 << 20, ((0,), (1, 2, 3)), "hierarchical"),
        ("allgather", 1 << 20, ((0,), (1,)), "ring"),
        ("alltoall", 1 << 20, ((0, 1), (2, 3)), "direct"),
    ],
)
def test_the_rule(collective, nbytes, groups, chosen):
    rules, request = MultiHostRules(groups), Request(collective, nbytes, sum(map(len, groups)))
    choice = rules.choose(request)
    assert str(choice.algorithm) == chosen
    assert choice.reason
    if chosen == "hierarchical":  # which the transport cuts
        assert choice.pieces == rules.choose_named(chosen, request).pieces == 1
