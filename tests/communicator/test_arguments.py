"""Wrong calls are refused before anything is sent, and say what is wrong and what to do."""

from __future__ import annotations

import gc
import os
import threading
import warnings

import numpy as np
import pytest

import flagcx as fc
from flagcx.dtypes import ReduceOp
from flagcx.transport.shared_memory import heap
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


class _Foreign:
    """An array of a library that doesn't show it to NumPy as it is."""

    def __dlpack__(self):
        raise RuntimeError("an odd layout")

    def __array__(self, *_, **__):
        raise RuntimeError("an odd layout")


WRONG = [
    (lambda c: c.allreduce(_read_only()), fc.ArrayError, "read-only and would be written; pass out="),
    (lambda c: c.allreduce(np.ones(4), "mean"), fc.OperationError, "op='mean' is not an operation"),
    (lambda c: c.allreduce(np.ones(4), "bxor"), fc.OperationError, "not defined for float64"),
    (lambda c: c.allreduce(np.ones(4), np.sin), fc.OperationError, "takes 1 arrays and returns 1"),
    (lambda c: c.allreduce(np.ones(4), np.less), fc.OperationError, "gives bool; expected float64 back"),
    (lambda c: c.allreduce(np.ones((2, 2)), np.matmul), fc.OperationError, "combines whole arrays ((n?,k)"),
    (
        lambda c: c.allreduce(np.ones(4), ReduceOp("product", np.matmul, ("float",))),
        fc.OperationError,
        "combines whole arrays",
    ),
    (lambda c: c.allreduce(np.ones(4), np.divmod), fc.OperationError, "takes 2 arrays and returns 2"),
    (lambda c: c.allreduce(np.ones(4), ["sum"]), fc.OperationError, "op=['sum'] is a list; expected one of"),
    (lambda c: c.reduce(np.ones(4), {"sum"}), fc.OperationError, "op={'sum'} is a set; expected one of"),
    (lambda c: c.allreduce([np.ones(4)], ["sum"]), fc.OperationError, "op=['sum'] is a list"),
    (lambda c: c.reduce_scatter(np.ones(4), ["sum"]), fc.OperationError, "op=['sum'] is a list"),
    (
        lambda c: c.allreduce(np.ma.array([1.0, 2.0], mask=[0, 1])),
        fc.ArrayError,
        "x is a masked array, whose",
    ),
    (lambda c: c.allgather(np.ma.array([1.0, 2.0])), fc.ArrayError, "pass x.filled(value)"),
    (
        lambda c: c.allreduce(np.ones(2), out=np.ma.array([1.0, 2.0])),
        fc.ArrayError,
        "out is a masked array",
    ),
    (lambda c: c.allreduce([np.ones(2), np.ma.array([1.0])]), fc.ArrayError, "x[1] is a masked array"),
    (lambda c: c.send(np.ma.array([1.0]), 0), fc.ArrayError, "x is a masked array"),
    (lambda c: c.allreduce(np.ones(4), max), fc.OperationError, "op=<built-in function max>"),
    (lambda c: c.allreduce([1, 2]), fc.ArrayError, "x[0] is a builtins.int; expected an array"),
    (lambda c: c.reduce([1, 2]), fc.ArrayError, "x is a builtins.list; expected an array"),
    (lambda c: c.allreduce([np.ones(4)] * 2, out=[np.ones(4)]), fc.ArgumentError, "list of 2 arrays, one"),
    (lambda c: c.allreduce(np.ones(8, ">f8")[::2]), fc.ArrayError, "foreign byte order >f8"),
    (lambda c: c.allreduce(np.broadcast_to(np.ones(1), 4)), fc.ArrayError, "read-only and would be written"),
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
    (lambda c: c.empty((-3,)), fc.ArgumentError, "shape=(-3,) is no shape of an array (negative"),
    (lambda c: c.empty((2, -1)), fc.ArgumentError, "shape=(2, -1) is no shape"),
    (lambda c: c.empty((-1, -1)), fc.ArgumentError, "shape=(-1, -1) is no shape"),
    (lambda c: c.empty(-3), fc.ArgumentError, "shape=-3 is no shape"),
    (lambda c: c.empty("a"), fc.ArgumentError, "shape='a' is no shape"),
    (lambda c: c.empty(""), fc.ArgumentError, "shape='' is no shape"),
    (lambda c: c.empty(2.5), fc.ArgumentError, "shape=2.5 is no shape"),
    (lambda c: c.empty((2, 2.0)), fc.ArgumentError, "shape=(2, 2.0) is no shape"),
    (lambda c: c.empty(None), fc.ArgumentError, "shape=None is no shape"),
    (lambda c: c.empty((1,) * 100), fc.ArgumentError, "maximum supported dimension"),
    (
        lambda c: c.empty((1 << 40,)),
        fc.ResourceError,
        "no room for an array of 4 TiB (shape (1099511627776,)",
    ),
    (lambda c: c.empty((1 << 62, 1 << 62)), fc.ResourceError, "of memory are available"),
    (lambda c: c.broadcast_object(lambda: 3), fc.ArgumentError, "rank 0: a builtins.function cannot be sent"),
    (lambda c: c.allgather_object([lambda: 3]), fc.ArgumentError, "rank 0: a builtins.list cannot be sent"),
    (lambda c: c.gather_object(threading.Lock()), fc.ArgumentError, "cannot pickle '_thread.lock' object"),
    (lambda c: c.scatter_object([lambda: 3]), fc.ArgumentError, "pass plain values, or objects of classes"),
    (
        lambda c: c.scatter_object(5),
        fc.ArgumentError,
        "scatter_object needs one value a rank, 1 in all; got 0",
    ),
    (lambda c: c.allreduce(_Foreign()), fc.ArrayError, "that NumPy cannot take as it is (an odd layout)"),
    (lambda c: c.allreduce(np.ones(4), out=_Foreign()), fc.ArrayError, "out is a tests.communicator"),
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
    with fc.init() as comm, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fc.init() is fc.init(timeout_s=comm.config.timeout_s) is comm
    with fc.init() as again:
        assert again is not comm
        assert "rank 0 of 1" in repr(again)


def test_a_second_init_warns_of_settings_without_effect():
    with fc.init(timeout_s=7.0) as comm:
        with pytest.warns(
            RuntimeWarning, match=r"init\(timeout_s=3\) has no effect: .* with timeout_s=7.0; "
        ):
            assert fc.init(timeout_s=3) is comm
        with pytest.warns(RuntimeWarning, match=r"init\(topology_detection=False\) has no effect"):
            fc.init(enable_topology_detection=False)
        assert comm.config.timeout_s == 7.0 and comm.config.topology_detection
    with fc.init(timeout_s=3) as again:
        assert again.config.timeout_s == 3, "behind a close the settings count"


def test_the_topology_is_switched_off_by_either_name():
    for settings in ({"enable_topology_detection": False}, {"topology_detection": False}):
        with fc.init(**settings), pytest.raises(fc.CommunicatorError, match="close the communicator and use"):
            fc.get_topology()


def test_lengths_of_any_kind_make_a_shape(comm):
    for shape, found in (
        (3, (3,)),
        (np.int64(3), (3,)),
        ((), ()),
        ([2, 3], (2, 3)),
        ((0, 5), (0, 5)),
        (np.array([2, 3]), (2, 3)),
    ):
        assert comm.empty(shape).shape == found


def test_memory_that_was_let_go_of_can_be_had_again(comm, monkeypatch):
    array = comm.empty(64 << 20, np.uint8)
    monkeypatch.setattr(heap, "available_nbytes", lambda: 1 << 20)
    with pytest.raises(fc.ResourceError, match=r"no room for an array of 64 MiB .*: 1 MiB of memory are"):
        comm.empty(64 << 20, np.uint8)
    del array
    gc.collect()
    assert comm.empty(64 << 20, np.uint8).size == 64 << 20


@pytest.mark.parametrize(
    ("text", "available"),
    [("MemAvailable: 20 kB\nSwapFree: 4 kB\n", 24 << 10), ("MemFree: 20 kB\n", None), (None, None)],
)
def test_how_much_memory_there_is(text, available, tmp_path, monkeypatch):
    memory, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    if text is not None:
        memory.write_text(text)
    monkeypatch.setattr(heap, "_MEMORY", memory)
    monkeypatch.setattr(heap, "_LIMITS", (limit,))
    assert heap.available_nbytes() == available
    limit.write_text("max\n")
    assert heap.available_nbytes() == available
    limit.write_text("4096\n")
    assert heap.available_nbytes() == (available and 4096)


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
    while not comm._host.turn.locked():
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
