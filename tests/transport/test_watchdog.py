"""The watchdog of a rank whose GPU is a fake: what it notices, says and does."""

from __future__ import annotations

import threading
import time

import pytest

from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store_server import StoreServer
from flagcx.errors import AbortedError, CommunicationError, FlagcxError, PeerDiedError, PeerTimeoutError
from flagcx.transport.watchdog import Watchdog


class Fake:
    """A transport, and its order, that has enqueued an operation which may never end."""

    def __init__(self, what: str, issued: int) -> None:
        self.what, self.issued = what, issued
        self.since: float | None = None
        self.inside = False
        self.error: FlagcxError | None = None
        self.given_up: CommunicationError | None = None
        self.failed, self.aborted = threading.Event(), threading.Event()

    def pending_since(self) -> float | None:
        return self.since

    def fault(self) -> CommunicationError | None:
        return self.given_up

    def fail(self, error: FlagcxError) -> None:
        self.error = error
        self.failed.set()

    def abort_enqueued(self) -> None:
        self.aborted.set()


@pytest.fixture
def stores():
    with StoreServer(2) as server:
        server.start()
        made = [RemoteStore(server.address, server.authkey, r, 2) for r in range(2)]
        yield made
        for store in made:
            store.close()


def watch(stores, *fakes, timeout_s=0.4, left=None):
    leave = (lambda reason: None) if left is None else left.append
    return [Watchdog(f, f, s, timeout_s, leave) for f, s in zip(fakes, stores, strict=True)]


def test_a_late_operation_names_what_every_rank_does_and_who_is_behind(stores):
    late, absent = Fake("allreduce (ring) of 10 float32", 5), Fake("broadcast (chain) of 3 int8", 4)
    late.since = time.monotonic()
    dogs = watch(stores, late, absent)
    assert late.failed.wait(10)
    assert isinstance(late.error, PeerTimeoutError)
    assert late.error.peer == 1
    for words in ("allreduce (ring) of 10 float32 is not done", "rank 1 is behind", "FLAGCX_TIMEOUT_S"):
        assert words in str(late.error)
    assert "rank 1: broadcast (chain) of 3 int8 (operation 4)" in str(late.error)
    assert late.aborted.wait(5)
    assert absent.failed.wait(5), "the other rank is told"
    assert isinstance(absent.error, AbortedError)
    assert "rank 0: allreduce (ring) of 10 float32 is not done" in str(absent.error)
    assert absent.aborted.wait(5)
    for dog in dogs:
        dog.close()


def test_work_that_is_done_in_time_disturbs_nobody(stores):
    fakes = Fake("a", 3), Fake("a", 3)
    dogs = watch(stores, *fakes)
    assert not fakes[0].failed.wait(1.0)
    for dog in dogs:
        dog.close()
    assert all(f.error is None for f in fakes)


def test_a_rank_that_died_is_noticed_at_once(stores):
    alive = Fake("allreduce (ring) of 10 float32", 5)
    (dog,) = watch(stores[:1], alive, timeout_s=100.0)
    stores[1].abort("it was killed")
    assert alive.failed.wait(10)
    assert isinstance(alive.error, PeerDiedError)
    assert alive.error.peer == 1
    assert "rank 0 was in allreduce (ring) of 10 float32" in str(alive.error)
    dog.close()


def test_a_rank_that_nccl_does_not_let_go_of_leaves(stores, monkeypatch):
    monkeypatch.setattr("flagcx.transport.watchdog._ABORT_LIMIT_S", 0.2)
    stuck, other, left = Fake("send", 1), Fake("send", 1), []
    stuck.since, stuck.inside = time.monotonic(), True
    dogs = watch(stores, stuck, other, left=left)
    assert stuck.failed.wait(10)
    dogs[0]._thread.join(10)
    assert any("still inside NCCL" in reason for reason in left)
    dogs[1].close()


def test_a_closed_store_ends_the_watch(stores):
    (dog,) = watch(stores[:1], Fake("a", 1))
    stores[0].close()
    dog._thread.join(5)
    assert not dog._thread.is_alive()


def test_a_wait_that_was_given_up_on_the_gpu_ends_the_communicator(stores):
    late, peer = Fake("allreduce (two_shot) of 10 float32", 5), Fake("nothing yet", 4)
    late.given_up = PeerTimeoutError("rank 1 did not come (seen on the GPU)", peer=1)
    dogs = watch(stores, late, peer, timeout_s=5.0)
    assert late.aborted.wait(5) and peer.aborted.wait(5)
    assert late.error is late.given_up
    assert isinstance(peer.error, AbortedError)
    assert "seen on the GPU" in str(peer.error)
    for dog in dogs:
        dog.close()
