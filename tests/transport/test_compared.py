"""The debug mode: ranks that differ are named on every rank, before anything runs."""

from __future__ import annotations

import threading

import pytest

from flagcx.algorithms import build
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store_server import StoreServer
from flagcx.config import Config
from flagcx.dtypes import OPS, dtype_of
from flagcx.errors import MismatchError
from flagcx.transport.base import Call
from flagcx.transport.compared import Compared, check_alike


def call(rank: int, count: int = 10, op: str = "sum", dtype: str = "float32") -> Call:
    return Call(build("allreduce", "ring", 2), rank, count, dtype_of(dtype), OPS[op], False)


@pytest.mark.parametrize("other", [{"count": 11}, {"op": "max"}, {"dtype": "int32"}])
def test_a_difference_shows_in_the_signature(other):
    assert call(0).describe() == call(1).describe()
    assert call(0).describe() != call(1, **other).describe()


def test_the_rank_that_differs_is_named():
    told = ["allreduce of 10", "allreduce of 10", "allreduce of 11"]
    with pytest.raises(MismatchError, match="first rank 2") as caught:
        check_alike(dict(enumerate(told)))
    assert caught.value.peer == 2
    assert "rank 2: allreduce of 11" in str(caught.value)


class Recorder:
    """A plan that only notes that it ran."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, given: object, result: object) -> None:
        self.runs += 1


def run_two(counts: tuple[int, int]) -> tuple[list[Recorder], list[BaseException | None]]:
    plans, errors = [Recorder(), Recorder()], [None, None]
    with StoreServer(2) as server:

        def rank(r: int) -> None:
            with RemoteStore(server.address, server.authkey, r, 2) as store:
                try:
                    Compared(plans[r], store, call(r, counts[r]), Config(timeout_s=10)).run(None, None)
                except MismatchError as error:
                    errors[r] = error

        server.start()
        threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    return plans, errors


def test_alike_calls_run():
    plans, errors = run_two((10, 10))
    assert [p.runs for p in plans] == [1, 1]
    assert errors == [None, None]


def test_unlike_calls_run_nowhere_and_raise_everywhere():
    plans, errors = run_two((10, 11))
    assert [p.runs for p in plans] == [0, 0]
    assert all(isinstance(e, MismatchError) for e in errors)
