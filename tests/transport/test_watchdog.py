"""The watchdog of a rank whose GPU is a fake: what it notices, says and does."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time

import pytest

from flagcx.bootstrap import remote_store
from flagcx.bootstrap.rank_page import RankPage, read_page
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store_server import StoreServer
from flagcx.diagnosis.explain import explain
from flagcx.diagnosis.state import state_of
from flagcx.errors import (
    AbortedError,
    CommunicationError,
    FlagcxError,
    MismatchError,
    PeerDiedError,
    PeerTimeoutError,
)
from flagcx.transport.waits import Waits
from flagcx.transport.watchdog import Watchdog
from tests.bootstrap.processes import wait_until


class Fake:
    """A transport, and its order, that has enqueued an operation which may never end."""

    def __init__(self, what: str, issued: int) -> None:
        self.what, self.issued = what, issued
        self.calls, self.captured, self.texts = issued, False, [what]
        self.marks: list[tuple[int, int]] = []
        self.trail = 7
        self.since: float | None = None
        self.inside = False
        self.error: FlagcxError | None = None
        self.given_up: CommunicationError | None = None
        self.failed, self.aborted = threading.Event(), threading.Event()

    @property
    def mark(self) -> tuple[int, int]:
        return self.calls, self.trail

    def last_calls(self) -> list[tuple[int, str]]:
        return list(enumerate(self.texts, self.calls - len(self.texts)))

    def look(self) -> None:
        pass

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


def watch(stores, *fakes, timeout_s=0.4, left=None, explain_s=None):
    leave = (lambda reason: None) if left is None else left.append
    waits = [Waits(store, "world", explain_s) if explain_s else None for store in stores]
    return [Watchdog(f, f, s, timeout_s, leave, w) for f, s, w in zip(fakes, stores, waits, strict=True)]


def calling(*texts: str, waits: bool = False) -> Fake:
    fake = Fake(texts[-1], len(texts))
    fake.texts, fake.since = list(texts), time.monotonic() if waits else None
    return fake


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


def test_the_page_of_a_rank_shows_what_waits_on_its_gpu_and_what_is_behind(stores):
    for store in stores:
        store.page = RankPage({"rank": store.rank, "host": "here", "store": "job"})
    late, behind = calling("a barrier", "a sum", waits=True), calling("a barrier")
    dogs = watch(stores, late, behind, timeout_s=100.0, explain_s=50.0)

    def found() -> list[str]:
        pages = [read_page(f"/proc/self/fd/{store.page.descriptor}") for store in stores]
        return explain(2, [state_of(page, 0, "sleeps") for page in pages]).sentences

    wait_until(lambda: len(found()) == 2 and found()[1].endswith("of communicator world was a barrier."))
    assert found()[0].startswith("rank 0 waits for rank 1 in a sum of communicator world (arrays on GPUs)")
    assert "its last call of communicator world" in found()[1]
    late.since = None
    wait_until(lambda: found()[0].startswith("No rank waits"))
    late.since = time.monotonic()
    wait_until(lambda: found()[0].startswith("rank 0 waits for rank 1"))
    late.given_up, late.since = PeerTimeoutError("rank 1 did not come to a sum", peer=1), None
    assert late.failed.wait(10)
    assert found()[0].startswith("rank 0 waits for rank 1"), "as it waited when the GPU gave up"
    for dog, store in zip(dogs, stores, strict=True):
        dog.close()
        store.page.close()


def test_a_closed_store_ends_the_watch(stores):
    (dog,) = watch(stores[:1], Fake("a", 1))
    stores[0].close()
    dog._thread.join(5)
    assert not dog._thread.is_alive()


def test_an_operation_has_its_time_out_though_the_store_is_silent(monkeypatch):
    """Rank 0, which runs the store, is stopped, so that nothing is heard of any rank."""
    monkeypatch.setattr(remote_store, "_MARGIN_S", 0.2)
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        store = RemoteStore(address, b"key", 1, 2)
        server.send_signal(signal.SIGSTOP)
        waiting = calling("allreduce of 10 float32", waits=True)
        (dog,) = watch([store], waiting)
        assert waiting.failed.wait(30)
        server.kill()
        assert isinstance(waiting.error, PeerTimeoutError) and waiting.error.peer == 0
        said = str(waiting.error)
        assert (
            "allreduce of 10 float32 is not done after 0.4 s" in said and "is that process stopped?" in said
        )
        assert waiting.aborted.wait(5)
        dog.close()
        store.close()


_SERVER = """
from flagcx.bootstrap.store_server import StoreServer
with StoreServer(2, authkey=b"key", host="rank 0", host_rank=0) as server:
    print(server.address, flush=True)
    input()
"""


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


def test_a_rank_that_waits_itself_for_a_stopped_one_is_not_blamed():
    """Rank 0 waits for rank 1, which waits for rank 2, whose process lies still."""
    with StoreServer(3) as server:
        server.start()
        stores = [RemoteStore(server.address, server.authkey, rank, 3) for rank in range(3)]
        late, between = Fake("allreduce", 5), Fake("send and receive of 20 bytes", 4)
        late.given_up = PeerTimeoutError("rank 1 did not come (seen on the GPU)", peer=1)
        dogs = watch(stores[:2], late, between, timeout_s=5.0)
        assert late.aborted.wait(5) and between.aborted.wait(5)
        assert isinstance(late.error, PeerTimeoutError) and late.error.peer == 2
        assert str(late.error).startswith("rank 2 did not answer, while rank 1 did: rank 1 did not come")
        later = dogs[1].blamed(PeerTimeoutError("rank 0 did not come", peer=0))
        assert isinstance(later, AbortedError) and "rank 2 did not answer" in str(later)
        for each in (*dogs, *stores):
            each.close()


def test_a_rank_that_gives_up_while_it_is_asked_is_believed(stores, monkeypatch):
    """It has said whom it missed, and has gone: asking it ends with an error."""
    late, other = Fake("allreduce", 5), Fake("allreduce", 5)
    dogs = watch(stores, late, other, timeout_s=5.0)

    def ask():
        dogs[1].publish(PeerTimeoutError("rank 2 did not come", peer=2))
        raise PeerDiedError("rank 1 has left", peer=1)

    monkeypatch.setattr(dogs[0]._questions, "ask", ask)
    told = dogs[0].blamed(PeerTimeoutError("rank 1 did not come", peer=1))
    assert isinstance(told, AbortedError) and "another rank gave up: rank 2 did not come" in str(told)
    for dog in dogs:
        dog.close()


def test_calls_that_differ_are_told_on_every_rank_though_one_alone_waits(stores):
    waiting = calling("allreduce of 100 float32", "barrier", waits=True)
    other = calling("allreduce of 101 float32")
    dogs = watch(stores, waiting, other, timeout_s=60.0, explain_s=0.3)
    for fake in (waiting, other):
        assert fake.failed.wait(5)
        assert isinstance(fake.error, MismatchError)
        assert fake.error.peer == 1
        for line in ("rank 0: allreduce of 100 float32", "rank 1: allreduce of 101 float32"):
            assert line in str(fake.error)
        assert fake.aborted.wait(5)
    for dog in dogs:
        dog.close()


def test_a_rank_that_is_only_late_is_no_error_and_warned_of_once(stores, caplog):
    waiting, late = calling("a", "b", "allreduce of 4 int8", waits=True), calling("a", "b")
    with caplog.at_level(logging.WARNING, "flagcx"):
        dogs = watch(stores, waiting, late, timeout_s=60.0, explain_s=0.3)
        wait_until(lambda: caplog.records)
        assert not waiting.failed.wait(1.0)
    (record,) = caplog.records
    assert "for rank 1 in allreduce of 4 int8 of communicator world" in record.getMessage()
    late.texts, late.calls = ["a", "b", "allreduce of 5 int8"], 3
    assert waiting.failed.wait(5)
    assert isinstance(waiting.error, MismatchError)
    for dog in dogs:
        dog.close()


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize(("calls", "captured"), [(1, False), (2, False), (1, True)])
def test_a_rank_that_closed_before_the_call_that_waits_is_missed_at_once(stores, calls, captured, exits):
    stays, goes = Fake("allreduce", 2), Fake("allreduce", calls)
    goes.captured = captured
    dogs = watch(stores, stays, goes, timeout_s=60.0)
    stays.since = time.monotonic()
    dogs[1].tell_closed() if exits else dogs[1].check_end()
    missed = calls < 2 and not captured  # a graph may replay calls that nobody counts
    assert stays.failed.wait(30 if missed else 1.2) == missed
    if missed:
        assert isinstance(stays.error, PeerDiedError) and stays.error.peer == 1
        assert "rank 1 has ended or closed its communicator; rank 0 was in allreduce" in str(stays.error)
    for dog in dogs:
        dog.close()


def test_graphs_of_one_rank_alone_keep_calls_from_being_compared(stores):
    waiting, capturing = calling("a", "b", waits=True), calling("a", "c")
    capturing.captured = True
    dogs = watch(stores, waiting, capturing, timeout_s=60.0, explain_s=0.2)
    assert not waiting.failed.wait(1.0)
    for dog in dogs:
        dog.close()


@pytest.mark.parametrize("second_s", [0.0, 0.2])
def test_a_close_compares_what_has_ended(stores, second_s):
    fakes = calling("a", "allreduce of 3 int8"), calling("a", "allreduce of 4 int8")
    dogs = watch(stores, *fakes, timeout_s=60.0, explain_s=5.0)
    told: list[BaseException | None] = [None, None]

    def end(rank: int) -> None:
        time.sleep(rank * second_s)
        try:
            dogs[rank].check_end()
        except MismatchError as error:
            told[rank] = error

    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    for error in told:
        assert isinstance(error, MismatchError)
        assert "rank 0: allreduce of 3 int8\n  rank 1: allreduce of 4 int8" in str(error)
    for dog in dogs:
        dog.close()


def test_a_close_waits_for_no_rank_and_finds_nothing_in_equal_calls(stores):
    fakes = calling("a", "b"), calling("a", "b")
    dogs = watch(stores, *fakes, timeout_s=60.0, explain_s=60.0)
    begin = time.monotonic()
    for dog in dogs:
        dog.check_end()
    assert time.monotonic() - begin < 20
    for dog in dogs:
        dog.close()


def marked(*marks: tuple[int, int]) -> Fake:
    fake = calling("allreduce of 3 int8")
    fake.calls, fake.trail, fake.marks = marks[-1][0] + 5, marks[-1][1], list(marks)
    return fake


def test_calls_that_differed_long_ago_are_told_while_all_ranks_go_on(stores):
    fakes = marked((1024, 5), (2048, 6)), marked((1024, 5), (2048, 7), (3072, 8))
    dogs = watch(stores, *fakes, timeout_s=60.0)
    for fake in fakes:
        assert fake.failed.wait(5)
        assert isinstance(fake.error, MismatchError)
        assert "between their calls 1,024 and 2,048" in str(fake.error)
    for dog in dogs:
        dog.close()


@pytest.mark.parametrize("captured", [False, True])
def test_marks_that_agree_or_cannot_be_compared_are_no_mismatch(stores, captured):
    fakes = marked((1024, 5), (2048, 6)), marked((1024, 5), (2048, 7 if captured else 6), (3072, 8))
    fakes[1].captured = captured
    dogs = watch(stores, *fakes, timeout_s=60.0)
    assert not fakes[0].failed.wait(1.5)
    for dog in dogs:
        dog.close()
    assert all(fake.error is None for fake in fakes)


def test_a_close_finds_calls_that_differed_long_ago(stores):
    fakes = calling("a", "b"), calling("a", "b")
    fakes[1].trail += 1
    dogs = watch(stores, *fakes, timeout_s=60.0)
    told: list[str] = []

    def end(rank: int) -> None:
        with pytest.raises(MismatchError) as error:
            dogs[rank].check_end()
        told.append(str(error.value))

    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(told) == 2 and all("between their calls 0 and 2" in text for text in told)
    for dog in dogs:
        dog.close()


def test_the_calls_of_ranks_are_compared_when_nccl_fails(stores):
    fakes = calling("a", "allreduce of 3 int8"), calling("a", "allreduce of 4 int8")
    dogs = watch(stores, *fakes, timeout_s=60.0)
    failure = CommunicationError("NCCL failed")
    error = dogs[0].explained(failure)
    assert isinstance(error, MismatchError) and "rank 1: allreduce of 4 int8" in str(error)
    fakes[1].texts = fakes[0].texts
    assert dogs[0].explained(failure) is failure
    for dog in dogs:
        dog.close()


def test_a_rank_that_died_is_named_when_nccl_fails(stores):
    fakes = calling("a"), calling("a")
    dogs = watch(stores, *fakes, timeout_s=60.0)
    dogs[1].close()
    stores[1].abort("it was killed")
    error = dogs[0].explained(CommunicationError("NCCL failed"))
    assert isinstance(error, PeerDiedError) and error.peer == 1 and "rank 0 was in a" in str(error)
    dogs[0].close()
