"""A transport is a plug: one that the package does not know is registered, asked for, explained and tuned."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import flagcx as fc
from flagcx.bootstrap.mpi_process import MPI_PROCESS
from flagcx.config import Config
from flagcx.dtypes import dtype_of
from flagcx.errors import ArgumentError, BootstrapError, MissingDependencyError
from flagcx.selection.tuning import QUICK, HostBench
from flagcx.transport import registry
from flagcx.transport.base import DEVICE, HOST, Call, TransportContext
from flagcx.transport.link_speed import LinkSpeed
from flagcx.transport.registry import find_transport, open_transport, register_transport, unregister_transport
from flagcx.transport.steps import HostTransport
from flagcx.transport.throttled import Throttled
from tests.communicator.oracle import assert_same, contribution, reduced
from tests.ranks import run_ranks


class StoreTransport(HostTransport):
    """Carries arrays through the job's store: all that a transport must have."""

    name = "store"

    def __init__(self, context: TransportContext) -> None:
        self.rank, self.size = context.rank, context.size
        self._store, self._timeout_s = context.store.scoped("arrays/"), context.config.timeout_s
        self._numbers: Counter[tuple[int, int]] = Counter()

    def _key(self, source: int, target: int) -> str:
        self._numbers[source, target] += 1
        return f"{source} to {target}: {self._numbers[source, target]}"

    def transfer(self, sends, receives) -> None:
        for array, peer in sends:
            self._store.set(self._key(self.rank, peer), array.tobytes())
        for array, peer in receives:
            key = self._key(peer, self.rank)
            array[...] = np.frombuffer(self._store.get(key, self._timeout_s), array.dtype)
            self._store.delete(key)

    def abort(self, reason, culprit) -> None:
        self._store.set("reason", reason.encode())

    def close(self) -> None:
        pass


def context(*hosts: str, **settings) -> TransportContext:
    return TransportContext(0, len(hosts), hosts, lambda mine: [mine] * len(hosts), None, Config(**settings))


@pytest.fixture
def registered():
    register_transport(StoreTransport)
    yield
    unregister_transport("store")


def _over_the_store() -> dict[str, object]:
    register_transport(StoreTransport)
    try:
        comm = fc.init(transport="store")
        rank, size = comm.rank, comm.size
        for count in (0, 1, 7, 100_000):
            x = contribution(rank, count, np.float32)
            assert_same(comm.allreduce(x), reduced(size, count, np.float32), "allreduce")
        gathered = comm.allgather(contribution(rank, 5, np.int64))
        assert_same(gathered[size - 1], contribution(size - 1, 5, np.int64), "allgather")
        scattered = comm.reduce_scatter(np.ones(4 * size), fc.scaled_sum(0.5))
        out = comm.sendrecv(np.full(3, rank), (rank + 1) % size, np.zeros(3, np.int64), (rank - 1) % size)
        work = comm.broadcast(np.full(3, rank), root=1, async_op=True).wait()
        half = comm.split(rank % 2).allreduce(np.array([rank]))
        bench = HostBench(comm._host.transport)
        candidate = bench.candidates("allreduce", 64)[0]
        times = bench.measurement("allreduce", 64).time_all([candidate.at(64)], QUICK)
        return {
            "name": comm._host.transport.name,
            "scattered": scattered.tolist(),
            "received": out.tolist(),
            "broadcast": work.tolist(),
            "half": half.tolist(),
            "recorded": comm.profiler.records()[0].operation.transport,
            "explained": str(comm.explain("allreduce", 1 << 20)),
            "predicted": [row for row in comm.explain("allreduce", 1 << 20).rows if row.predicted_us],
            "measured": min(times[0]) > 0,
        }
    finally:
        unregister_transport("store")


def test_a_transport_of_the_users_own_carries_everything():
    for rank, found in enumerate(run_ranks(_over_the_store, 3)):
        assert found["name"] == found["recorded"] == "store"
        assert found["scattered"] == [1.5] * 4
        assert found["received"] == [(rank - 1) % 3] * 3
        assert found["broadcast"] == [1] * 3
        assert found["half"] == [[2], [1], [2]][rank]
        assert "store of" in found["explained"] and "two_shot" in found["explained"]
        assert "cross_memory" not in found["explained"]
        assert not found["predicted"], "the model is that of shared memory"
        assert found["measured"]


def test_the_last_one_that_serves_the_job_is_chosen(registered):
    assert find_transport(HOST, context("a", "a")).name == "shared_memory"
    assert find_transport(HOST, context("a", "a", transport="store")).name == "store"
    assert find_transport(HOST, context("a", "a", transport="threads")).name == "threads"
    unregister_transport("store")
    register_transport(StoreTransport, lambda job: job.size == 3, automatic=True)
    assert find_transport(HOST, context("a", "a", "b")).name == "store"
    assert find_transport(HOST, context("a", "a")).name == "shared_memory"


@pytest.mark.parametrize(("launched", "chosen"), [(True, "mpi"), (False, "ucx")])
def test_between_hosts_it_depends_on_what_started_the_ranks(launched, chosen, monkeypatch):
    monkeypatch.setattr(MPI_PROCESS, "launched", launched)
    job = TransportContext(0, 2, ("a", "b"), lambda mine: [mine] * 2, object(), Config())
    assert find_transport(HOST, job).name == chosen
    named = TransportContext(0, 2, ("a", "b"), lambda mine: [mine] * 2, object(), Config(transport="ucx"))
    assert find_transport(HOST, named).name == "ucx"


def test_a_transport_for_the_other_kind_of_array_says_nothing():
    with_store = TransportContext(0, 1, ("a",), lambda mine: [mine], object(), Config(transport="threads"))
    assert find_transport(DEVICE, with_store).name == "nccl"


def test_transports_that_cannot_be():
    with pytest.raises(ArgumentError, match=r"transport='tcp' is not known; expected one of .*shared_memory"):
        find_transport(HOST, context("a", transport="tcp"))
    with pytest.raises(ArgumentError, match=r"transport='shared_memory' .* needs all ranks on one host"):
        find_transport(HOST, context("a", "b", transport="shared_memory"))
    with pytest.raises(BootstrapError, match="no transport carries host arrays of this job: mpi needs a st"):
        find_transport(HOST, context("a", "b"))
    with pytest.raises(ArgumentError, match="'threads' is registered already"):
        register_transport(type("Again", (StoreTransport,), {"name": "threads"}))
    with pytest.raises(ArgumentError, match="needs a class derived from"):
        register_transport(object)
    with pytest.raises(ArgumentError, match="no transport named 'store'"):
        unregister_transport("store")


class NeedsMore(StoreTransport):
    """One whose package is not installed."""

    name = "more"

    def __init__(self, context: TransportContext) -> None:
        raise MissingDependencyError("more is needed: pip install more")


def test_a_transport_that_cannot_be_had_is_an_error_when_an_array_needs_it(monkeypatch):
    entry = registry.TransportEntry("more", HOST, lambda: NeedsMore, lambda job: True, late=True)
    monkeypatch.setitem(registry._entries(), "more", entry)
    missing = open_transport(HOST, context("a"))
    missing.abort("", None)
    missing.check_end()
    missing.close()
    for call in (lambda: missing.take(np.ones(1), "x", False), lambda: missing.empty(3, np.float32)):
        with pytest.raises(MissingDependencyError, match="pip install more"):
            call()
    with pytest.raises(MissingDependencyError):
        open_transport(HOST, context("a", transport="more"))


class Alone(HostTransport):
    """A lone rank's."""

    name, rank, size = "alone", 0, 1

    def transfer(self, sends, receives) -> None:
        assert not sends and not receives

    def abort(self, reason, culprit) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        pass


def test_every_transport_has_all_that_is_asked_of_one():
    """What the executor, gradients and compression look at is declared, with a default."""
    for transport in (Alone(), Throttled(Alone(), LinkSpeed(1000.0))):
        assert transport.kind == HOST
        assert not transport.protocols("allreduce", "ring", 1 << 20, dtype_of("float32"), None)
        assert transport.progress is None and not transport.cross_memory
        assert transport.settings(Config()) == {}
        plan = transport.compile(Call(_lone_allreduce(), 0, 3, dtype_of("float64"), None, True))
        assert transport.beside(plan) is plan
        plan.run(np.ones(3), np.ones(3))
        transport.synchronize()
        transport.check_end()
    assert Alone().link is None and transport.link == LinkSpeed(1000.0)


def _lone_allreduce():
    from flagcx.algorithms import build

    return build("allreduce", "ring", 1)
