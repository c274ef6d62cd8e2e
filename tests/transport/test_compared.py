"""The debug mode: ranks that differ are named on every rank, before anything runs."""

from __future__ import annotations

import threading

import pytest

from flagcx.algorithms import build
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store_server import StoreServer
from flagcx.config import Config
from flagcx.dtypes import OPS, dtype_of
from flagcx.errors import AbortedError, CommunicationError, MismatchError
from flagcx.transport.base import HOST, Call, TransportContext
from flagcx.transport.compared import check_alike, comparing


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


class Carrier:
    """A transport that makes one plan, and notes why it gave up."""

    kind, name = HOST, "carrier"

    def __init__(self) -> None:
        self.plan, self.reason = Recorder(), ""

    def compile(self, call: Call) -> Recorder:
        return self.plan

    def abort(self, reason: str, culprit: int | None) -> None:
        self.reason = reason


def run_two(counts: tuple[int | None, int | None], timeout_s: float = 10) -> tuple[list, list]:
    """Two ranks that call with some counts twice, or that give up in place of the second call."""
    carriers, errors = [Carrier(), Carrier()], [None, None]
    config = Config(timeout_s=timeout_s, debug="check")
    with StoreServer(2) as server:

        def rank(r: int) -> None:
            with RemoteStore(server.address, server.authkey, r, 2) as store:
                context = TransportContext(r, 2, ("host", "host"), lambda mine: [mine], store, config)
                transport = comparing(carriers[r], context)
                try:
                    transport.compile(call(r)).run(None, None)
                    if counts[r] is None:
                        transport.abort("no more", r)
                    else:
                        transport.compile(call(r, counts[r])).run(None, None)
                except CommunicationError as error:
                    errors[r] = error
                done.wait(20)

        server.start()
        done = threading.Barrier(2)
        threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    return carriers, errors


def test_alike_calls_run():
    carriers, errors = run_two((10, 10))
    assert [c.plan.runs for c in carriers] == [2, 2]
    assert errors == [None, None]


def test_unlike_calls_run_nowhere_and_raise_everywhere():
    carriers, errors = run_two((10, 11))
    assert [c.plan.runs for c in carriers] == [1, 1]
    assert all(isinstance(e, MismatchError) for e in errors)


def test_a_rank_that_waits_to_compare_hears_of_one_that_gave_up():
    carriers, errors = run_two((10, None))
    assert isinstance(errors[0], AbortedError) and "no more" in str(errors[0]) and errors[0].peer == 1
    assert carriers[1].reason == "no more", "the transport tells those that wait elsewhere"


def test_nothing_is_put_before_a_transport_without_the_setting():
    carrier = Carrier()
    for config in (Config(), Config(debug="check")):  # the second one without a store
        context = TransportContext(0, 2, ("host", "host"), lambda mine: [mine], None, config)
        assert comparing(carrier, context) is carrier
