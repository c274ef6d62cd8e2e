"""The argument ``stream``, with fakes of arrays on a GPU and of streams."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.communicator import Communicator
from flagcx.communicator.caller import Caller
from flagcx.errors import ArgumentError


class DeviceArray:
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class Stream:
    def __init__(self) -> None:
        self.current = False

    def __enter__(self) -> None:
        self.current = True

    def __exit__(self, *_: object) -> None:
        self.current = False


def caller() -> Caller:
    """A communicator of one rank with nothing behind it, that notes which arrays a stream keeps."""
    comm = Caller()
    comm.rank, comm.size, comm._group = 0, 1, None
    comm.kept = []  # type: ignore[attr-defined]
    keep = SimpleNamespace(keep=lambda *kept: comm.kept.append(kept))  # type: ignore[attr-defined]
    comm._device = SimpleNamespace(transport=keep, array_class=DeviceArray)  # type: ignore[assignment]
    return comm


def test_the_call_runs_on_the_stream_and_its_arrays_are_kept():
    comm, stream, x, out = caller(), Stream(), DeviceArray(), DeviceArray()
    seen = []

    def call(x: object, out: object) -> object:
        seen.append(stream.current)
        return out

    assert comm.run_on(stream, call, (x, out)) is out
    assert seen == [True]
    assert not stream.current
    ((kept_on, *arrays),) = comm.kept
    assert kept_on is stream
    assert x in arrays
    assert out in arrays


def test_a_list_of_arrays_is_kept_one_by_one():
    comm, xs = caller(), [DeviceArray(), DeviceArray()]
    comm.run_on(Stream(), lambda xs, out: xs, (xs, None))
    assert comm.kept[0][1:3] == tuple(xs)


def test_a_group_has_no_stream_a_call():
    comm = caller()
    comm._group = []
    with pytest.raises(ArgumentError, match=r"no meaning inside comm.group\(\)"):
        comm.run_on(Stream(), lambda x: x, (DeviceArray(),))


X = np.ones(4)
ARRAY_OPERATIONS = {
    "allreduce": (X,),
    "reduce": (X,),
    "broadcast": (X,),
    "allgather": (X,),
    "reduce_scatter": (X,),
    "gather": (X,),
    "scatter": (X,),
    "alltoall": (X,),
    "allgatherv": (X, [4]),
    "reduce_scatterv": (X, [4]),
    "gatherv": (X, [4]),
    "scatterv": (X, [4]),
    "alltoallv": (X, [4], [4]),
    "send": (X, 0),
    "recv": (X, 0),
    "sendrecv": (X, 0, X, 0),
}


@pytest.mark.parametrize("name", ARRAY_OPERATIONS)
def test_no_operation_ignores_its_stream(name):
    operation = getattr(Communicator, name)
    assert "stream" in inspect.signature(operation).parameters
    with pytest.raises(ArgumentError, match="stream= is for arrays on a GPU"):
        operation(caller(), *ARRAY_OPERATIONS[name], stream=Stream())
