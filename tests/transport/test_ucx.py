"""NumPy arrays between hosts by UCX: ranks on test hosts, started with torchrun's variables or by hand."""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from bench.hosts import address_of, inside
from flagcx.transport.ucx.engine import UcxEngine
from flagcx.transport.ucx.process import context_of_process, load_ucxx
from tests.hosts import KEY, ROOT, run_by_torchrun
from tests.transport.told import PARTS, check_losses, check_mistakes, check_waits

pytest.importorskip("ucxx", reason="the extra 'ucx' is not installed")

OVER_THE_NETWORK = {"UCX_TLS": "tcp,self"}
"""Test hosts share the memory of one kernel, which UCX would find."""


def run(
    names: Sequence[str], counts: Sequence[int], job: str, timeout_s: float = 120
) -> tuple[list[int], str]:
    """Runs a job of ``network_jobs`` on test hosts; the exit codes, and what the ranks printed."""
    with tempfile.TemporaryDirectory() as folder:
        module = "tests.transport.network_jobs"
        codes, printed = run_by_torchrun(
            names[: len(counts)],
            counts,
            module,
            job,
            folder,
            "ucx",
            settings=OVER_THE_NETWORK,
            timeout_s=timeout_s,
        )
    return codes, "".join(printed)


def alone(program: str) -> str:
    """Runs a program as the only rank of a job; returns what it printed."""
    command = [sys.executable, "-c", program]
    environ = {**os.environ, **OVER_THE_NETWORK}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_call_between_hosts(test_hosts):
    """Collectives; transfers, objects, groups and splits; messages that move together, beside collectives."""
    codes, printed = run(test_hosts, (1, 2), "everything", timeout_s=300)
    assert not any(codes), printed
    assert re.findall(r"done \w+", printed) == PARTS, printed


@pytest.mark.slow
def test_calls_that_do_not_fit_are_told_to_every_rank(test_hosts):
    codes, printed = run(test_hosts, (1, 2), "mistakes")
    assert not any(codes) and "done" in printed, printed
    check_mistakes(printed)


@pytest.mark.slow
def test_waits_between_hosts_are_explained(test_hosts):
    """And what comes after a time-out meets no array."""
    codes, printed = run(test_hosts, (1, 2), "waits")
    assert not any(codes), printed
    check_waits(printed)


@pytest.mark.slow
def test_ranks_go_on_after_losses(test_hosts):
    codes, printed = run(test_hosts, (2, 2), "losses")
    assert codes == [-9, 0, 0, -9], printed
    check_losses(printed)


@pytest.mark.slow
def test_ranks_whose_place_the_program_gives(test_hosts):
    """Nothing but the arguments of ``fc.init`` says which rank of which job a process is."""
    program = (
        "import sys, numpy as np, flagcx as fc\n"
        f"comm = fc.init(rank=int(sys.argv[1]), size=2, address='{address_of(0)}:29600', key='{KEY}')\n"
        "print(comm._host.transport.name, comm.allreduce(np.full(3, comm.rank + 1)).tolist(), flush=True)"
    )
    ranks = [
        subprocess.Popen(
            inside(host, ["env", "UCX_TLS=tcp,self", sys.executable, "-c", program, str(rank)]),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(test_hosts[:2])
    ]
    try:
        printed = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed == ["ucx [3, 3, 3]\n"] * 2, printed


@pytest.mark.slow
def test_messages_to_self():
    """In any number of pieces; and taken back after an error."""
    job = "from tests.transport.network_jobs import to_self; to_self()"
    alone(f"import sys; sys.argv[1:] = ['', '', 'ucx']\n{job}")


def connect_to_the_dead() -> None:
    """Sends to a rank that was killed while it connected to this one; prints the error."""
    here, there = socket.socketpair()
    died = os.fork()  # before UCX has started
    rank = int(died == 0)
    mine = there if rank else here
    ucxx = load_ucxx()
    worker = ucxx.UCXWorker(context_of_process(), enable_delayed_submission=False, enable_python_future=False)
    own = worker.address.tobytes()
    mine.send(own)
    other = mine.recv(1 << 16)
    engine = UcxEngine(ucxx, worker, rank, [other, own] if rank else [own, other])
    memory = engine.memory(np.zeros(100, np.uint8))
    if rank:
        engine.send(memory, 0, 2)
        mine.send(b"connects")
        while True:
            signal.pause()
    mine.recv(8)
    for _ in range(1000):
        engine.first(2)  # answers what the other rank will never read
    os.kill(died, signal.SIGKILL)
    os.waitpid(died, 0)
    request = engine.send(memory, 1, 2)
    with pytest.raises(engine.error) as told:
        while not engine.is_done(request):
            pass
    print(told.value, engine.lost())


@pytest.mark.slow
def test_a_rank_that_died_while_it_connected_ends_no_other():
    program = "from tests.transport.test_ucx import connect_to_the_dead; connect_to_the_dead()"
    assert "Endpoint timeout [1]" in alone(program)


def test_a_rank_that_cannot_be_connected_to_is_lost():
    """So that the error names it: this rank's own link may be the one that is cut."""

    def refuse(*_: object) -> None:
        raise ConnectionError("Destination is unreachable")

    ucxx = SimpleNamespace(
        UCXError=ConnectionError,
        UCXXTag=int,
        UCXXTagMask=int,
        UCXXTagMaskFull=0,
        UCXAddress=SimpleNamespace(create_from_buffer=bytes),
        UCXEndpoint=SimpleNamespace(create_from_worker_address=refuse),
    )
    engine = UcxEngine(ucxx, SimpleNamespace(progress_once=bool), 1, [b"a", b"b", b"c"])
    atexit.unregister(engine._at_exit)
    with pytest.raises(ConnectionError, match="Destination is unreachable"):
        engine.send(b"", 2, 2)
    assert engine.lost() == [2] and list(engine.reached()) == []


def test_a_missing_package_is_named():
    told = alone(
        "import sys; sys.modules['ucxx'] = None; import flagcx as fc\n"
        "try:\n    fc.init(transport='ucx')\nexcept fc.MissingDependencyError as error:\n    print(error)"
    )
    assert "rank 0: NumPy arrays travel between hosts by UCX, which needs ucxx" in told
    assert "pip install 'flagcx[ucx]'" in told
