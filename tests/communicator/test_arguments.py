"""Wrong calls are refused before anything is sent, and say what is wrong and what to do."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import flagcx as fc
from tests.bootstrap.processes import line
from tests.communicator.jobs import job, outcome_of
from tests.ranks import run_ranks


@pytest.fixture
def comm():
    with fc.init() as communicator:
        yield communicator


def _read_only():
    x = np.ones(4)
    x.flags.writeable = False
    return x


WRONG = [
    (lambda c: c.allreduce(np.ones((4, 4))[:, 1]), fc.ArrayError, "not C-contiguous (shape (4,)"),
    (lambda c: c.allreduce(_read_only()), fc.ArrayError, "read-only and would be written; pass out="),
    (lambda c: c.allreduce(np.ones(4), "mean"), fc.OperationError, "op='mean' is not an operation"),
    (lambda c: c.allreduce(np.ones(4), "bxor"), fc.OperationError, "not defined for float64"),
    (lambda c: c.allreduce(np.ones(4), np.sin), fc.OperationError, "takes 1 arrays and returns 1"),
    (lambda c: c.allreduce(np.ones(4), np.less), fc.OperationError, "gives bool; expected float64 back"),
    (lambda c: c.allreduce(np.ones(4), max), fc.OperationError, "op=<built-in function max>"),
    (lambda c: c.allreduce([1, 2]), fc.ArrayError, "x[0] is a builtins.int; expected an array"),
    (lambda c: c.reduce([1, 2]), fc.ArrayError, "x is a builtins.list; expected an array"),
    (lambda c: c.allreduce([np.ones(4)] * 2, out=[np.ones(4)]), fc.ArgumentError, "list of 2 arrays, one"),
    (lambda c: c.allreduce([np.ones(4), np.ones((4, 4)).T]), fc.ArrayError, "x[1] is not C-contiguous"),
    (lambda c: c.allreduce(np.array(["a"])), fc.ArrayError, "arrays of dtype <U1 cannot be sent"),
    (lambda c: c.allreduce(np.ones(4, ">f8")), fc.ArrayError, "foreign byte order >f8"),
    (lambda c: c.allreduce(np.ones(4), out=np.ones(5)), fc.ArrayError, "out has 5 elements"),
    (
        lambda c: c.allreduce(np.ones(4), out=np.ones(4, "f4")),
        fc.ArrayError,
        "dtype float32, expected float64",
    ),
    (lambda c: c.allreduce(np.ones(4), algorithm="rings"), fc.ArgumentError, "expected one of ring, chain"),
    (lambda c: c.reduce(np.ones(4), root=1), fc.RankError, "root=1 is not a rank of this communicator"),
    (lambda c: c.broadcast(np.ones(4), root=-1), fc.RankError, "expected 0 to 0"),
    (lambda c: c.broadcast(np.ones(4), root="a"), fc.RankError, "root='a' is not an integer"),
    (lambda c: c.send(np.ones(4), 3), fc.RankError, "to=3 is not a rank"),
    (lambda c: c.reduce_scatter(np.float32(1)), fc.ArrayError, "x is a numpy.float32"),
    (lambda c: c.reduce_scatter(np.array(1.0)), fc.ArrayError, "its first axis must be a multiple of 1"),
    (lambda c: c.allgatherv(np.ones(3), [4]), fc.ArrayError, "x has 3 elements, but counts[0] is 4"),
    (lambda c: c.allgatherv(np.ones(3), [3, 3]), fc.ArgumentError, "must have 1 entries"),
    (lambda c: c.empty(4, "U3"), fc.ArrayError, "cannot be sent"),
    (lambda c: fc.init(time_out=3), fc.ArgumentError, "no setting 'time_out'"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[m for _, _, m in WRONG])
def test_wrong_calls(comm, call, error, message):
    with pytest.raises(error) as caught:
        call(comm)
    assert message in str(caught.value)
    x = np.arange(3.0)
    assert comm.allreduce(x) is x  # the communicator lives on


def test_a_settings_value_that_cannot_be_read(monkeypatch):
    monkeypatch.setenv("FLAGCX_TIMEOUT_S", "soon")
    with pytest.raises(fc.ArgumentError, match="FLAGCX_TIMEOUT_S='soon' is not of type float"):
        fc.init()


def test_a_closed_communicator():
    comm = fc.init()
    comm.close()
    comm.close()
    for call in (lambda: comm.allreduce(np.ones(3)), comm.barrier, lambda: comm.empty(3)):
        with pytest.raises(fc.CommunicatorError, match="closed"):
            call()


def test_init_twice_gives_the_same_communicator():
    with fc.init() as comm:
        assert fc.init() is comm
    with fc.init() as again:
        assert again is not comm
        assert "rank 0 of 1" in repr(again)


def test_a_forked_child_may_not_use_it(comm):
    comm.allreduce(np.ones(3))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.allreduce(np.ones(3))
            os.write(write, b"no error")
        except fc.CommunicatorError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"made before a fork" in os.read(read, 1000)
    os.close(read)
    os.close(write)
    comm.allreduce(np.ones(3))


def test_two_threads_at_once():
    """The second thread is refused, and the first one's call is not disturbed."""
    body = """
import threading
comm = fc.init()
if comm.rank == 0:
    got = []
    thread = threading.Thread(target=lambda: got.append(comm.recv(np.zeros(3), 1)[0]))
    thread.start()
    while not comm._engine.turn.locked():
        pass
    outcome(lambda: comm.allreduce(np.ones(3)))
    thread.join()
    tell(got[0])
else:
    sys.stdin.readline()
    comm.send(np.full(3, 7.0), 0)
"""
    with job(2, body) as processes:
        told, _, _, text = outcome_of(line(processes[0]))
        assert told == "CommunicatorError"
        assert "two threads use one communicator" in text
        processes[1].stdin.write("go\n")
        processes[1].stdin.flush()
        assert line(processes[0]) == "7.0"


def _one_thread_after_the_other():
    comm, results = fc.init(), []

    def work():
        results.append(float(comm.allreduce(np.ones(5))[0]))

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    return results


def test_threads_may_take_turns():
    assert run_ranks(_one_thread_after_the_other, 2) == [[2.0] * 3] * 2
