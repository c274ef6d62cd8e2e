"""Python objects between ranks: only bytes that a rank sent as an object are unpickled."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import flagcx as fc
from flagcx.communicator.objects import _packed, _unpacked
from flagcx.errors import MismatchError
from tests.ranks import run_ranks


class Trap:
    """Unpickling it ends the process."""

    def __reduce__(self):
        return (exec, ("import os; os._exit(66)",))


@pytest.mark.parametrize(
    "value", [None, 3, "text", [1, {"a": (2.5,)}], np.arange(5).tolist(), b"x" * 100_000]
)
def test_an_object_comes_out_as_it_went_in(value):
    assert _unpacked(_packed(fc.init(), value)) == value


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        bytes(1000),
        b"\xff" * 1000,
        pickle.dumps(Trap()),
        b"flagcx object\n" + bytes(4) + pickle.dumps(Trap()),
    ],
    ids=["nothing", "a byte", "zeros", "ones", "a pickle", "a pickle with the mark"],
)
def test_bytes_that_no_rank_sent_as_an_object_are_not_unpickled(content):
    with pytest.raises(MismatchError, match="are no Python object that a rank sent, and were not unpickled"):
        _unpacked(np.frombuffer(content, np.uint8))


@pytest.mark.parametrize("at", [0, 13, 15, 20, -1])
def test_a_bit_that_has_changed_is_found(at):
    data = _packed(fc.init(), {"a": list(range(100))}).copy()
    data[at] ^= 4
    with pytest.raises(MismatchError):
        _unpacked(data)


def _misled(length):
    comm = fc.init()
    if comm.rank == 0:
        comm.call("broadcast", np.array([length]), root=0, part_of="broadcast_object")
        comm.close()
        return None
    with pytest.raises((MismatchError, fc.PeerDiedError)) as caught:
        comm.broadcast_object(root=0)
    comm.close()
    return type(caught.value).__name__


@pytest.mark.parametrize("length", [-1, 3, 1 << 60])
def test_a_length_that_is_none_is_refused(length):
    assert run_ranks(_misled, 2, length) == [None, "MismatchError"]
