"""The argument ``stream``, with fakes of arrays on a GPU and of streams."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.communicator import Communicator
from flagcx.communicator.streams import on_stream, run_on
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


class Calls:
    """Stands for a communicator with one operation."""

    def __init__(self) -> None:
        self._group = None
        self.kept: list = []
        self._device = SimpleNamespace(transport=SimpleNamespace(keep=lambda *kept: self.kept.append(kept)))

    @on_stream
    def double(self, x: object, *, out: object = None) -> object:
        self.seen = self.stream.current if self.stream else None
        return out or x

    stream: Stream | None = None


def test_the_call_runs_on_the_stream_and_its_arrays_are_kept():
    comm, stream, x, out = Calls(), Stream(), DeviceArray(), DeviceArray()
    comm.stream = stream
    assert comm.double(x, out=out, stream=stream) is out
    assert comm.seen
    assert not stream.current
    ((kept_on, *arrays),) = comm.kept
    assert kept_on is stream
    assert x in arrays
    assert out in arrays


def test_without_a_stream_nothing_changes():
    comm, x = Calls(), DeviceArray()
    assert comm.double(x) is x
    assert comm.kept == []


def test_arrays_of_the_host_have_no_stream():
    with pytest.raises(ArgumentError, match="stream= is for arrays on a GPU"):
        Calls().double(np.ones(3), stream=Stream())


def test_a_group_has_no_stream_a_call():
    comm = Calls()
    comm._group = []
    with pytest.raises(ArgumentError, match=r"no meaning inside comm.group\(\)"):
        run_on(Stream(), Calls.double, comm, (DeviceArray(),), {})


ARRAY_OPERATIONS = (
    "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall",
    "allgatherv", "reduce_scatterv", "gatherv", "scatterv", "alltoallv", "send", "recv", "sendrecv",
)  # fmt: skip


@pytest.mark.parametrize("name", ARRAY_OPERATIONS)
def test_every_operation_takes_a_stream(name):
    assert "stream" in inspect.signature(getattr(Communicator, name)).parameters
