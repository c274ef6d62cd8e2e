"""What ranks say about long waits: notes in a real store, without arrays."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store_server import StoreServer
from flagcx.errors import AbortedError, ArrayError, MismatchError, PeerTimeoutError
from flagcx.transport.network.watch import Watch
from flagcx.transport.waits import ON_GPU, ON_HOST, Waits

AFTER_S = 0.3


@pytest.fixture
def stores():
    with StoreServer(3) as server:
        server.start()
        made = [RemoteStore(server.address, server.authkey, r, 3) for r in range(3)]
        yield made
        for store in made:
            store.close()


def worlds(stores) -> list[Waits]:
    return [Waits(store.scoped("world/"), "world", AFTER_S) for store in stores]


def late(waits: Waits, call: str, peer: int | None, kind: str = ON_HOST) -> str:
    return waits.look(kind, call, peer, 9.0, late=True)


def test_short_waits_ask_nothing(stores):
    (waits, *_) = worlds(stores)
    stores[0].close()
    assert waits.look(ON_HOST, "barrier", 1, 0.2) == ""
    waits.end(ON_HOST)


def test_the_notes_lead_from_rank_to_rank_and_across_communicators(stores):
    first, second, _ = worlds(stores)
    child = Waits(stores[2].scoped("world/").scoped("1.1/", [1, 2]), "split 1 of world", AFTER_S)
    assert late(second, "a receive", 2) == "; rank 2 itself waits for no rank"
    said = late(child, "barrier", 0)
    assert said.startswith(
        "; rank 1 of the job waits for rank 2 of the job in a receive of communicator world"
    )
    assert said.endswith(", so none of them can go on"), "rank 0 of the child is rank 1 of the job"
    said = late(first, "allreduce", 1)
    assert "rank 1 waits for rank 2 in a receive of communicator world; rank 2 waits for rank 1 in" in said
    assert "communicator split 1 of world" in said
    second.end(ON_HOST)
    assert late(first, "allreduce", 1) == "; rank 1 itself waits for no rank"


class GivesUpMeanwhile:
    """In place of ``Waits``: while a rank is late and asks, another one gives up, and waits no more."""

    def __init__(self, give_up) -> None:
        self.calls, self.waiting, self.culprit, self._give_up = {}, set(), None, give_up

    def due_s(self, kind: str) -> float:
        return 60.0

    def look(self, kind, call, peer, waited_s, late=False) -> str:
        if late:
            self._give_up()
        return f"; rank {peer} itself waits for no rank"

    def end(self, kind: str) -> None:
        pass


def test_between_hosts_a_rank_that_gives_up_while_it_is_looked_into_is_not_to_blame(stores):
    other = Watch(stores[0], timeout_s=60)
    waits = GivesUpMeanwhile(lambda: other.give_up("rank 2 did not take part", 2))
    watch = Watch(stores[1], timeout_s=60, waits=waits)
    with pytest.raises(AbortedError, match="rank 0 gave up: rank 2 did not take part") as caught:
        watch.look("barrier", 0, 60.5, True)
    assert caught.value.peer == 2
    with pytest.raises(AbortedError, match="rank 0 gave up"):
        watch.look_at_message("a receive", 0, 60.5, True, False)


def test_a_rank_that_has_refused_its_call_is_known_to_have(stores):
    waits, other, _ = worlds(stores)
    other.calls[ON_HOST] = lambda: 4
    other.note_refusal(ArrayError("x is read-only"))
    waits.calls[ON_HOST] = lambda: 5
    assert late(waits, "allreduce", 1).endswith(
        "rank 1 itself waits for no rank: it has refused its call (ArrayError: x is read-only)"
    )
    for calls in (4, 6):  # the call before, and one after the rank has made that one after all
        waits.calls[ON_HOST] = lambda calls=calls: calls
        assert late(waits, "allreduce", 1).endswith("waits for no rank")


def test_a_long_wait_warns_once(stores, caplog):
    (waits, *_) = worlds(stores)
    with caplog.at_level(logging.WARNING, "flagcx"):
        for waited_s in (0.1, 0.25, 0.31, 0.4, 0.62, 0.95):
            waits.look(ON_HOST, "allreduce of 4 float32", 2, waited_s)
    (record,) = caplog.records
    assert record.getMessage() == (
        "rank 0 has waited 0.31 s for rank 2 in allreduce of 4 float32 of communicator world; "
        "rank 2 itself waits for no rank"
    )


def test_calls_of_the_two_kinds_in_one_place_are_a_mismatch_for_both(stores):
    host, gpu, other = worlds(stores)
    host.calls[ON_HOST] = other.calls[ON_HOST] = lambda: 1
    gpu.calls[ON_GPU] = lambda: 1
    late(other, "allreduce", 0)
    assert late(host, "allreduce of 4 float32", 1) == "; rank 1 itself waits for no rank"
    with pytest.raises(
        MismatchError, match=r"rank 1 calls with arrays on GPUs \(allreduce\), and rank 0 with NumPy arrays"
    ) as found:
        late(gpu, "allreduce", 0, ON_GPU)
    assert found.value.peer == 0
    with pytest.raises(
        MismatchError, match=r"rank 0 calls with NumPy arrays .*, and rank 1 with arrays on GPUs"
    ):
        late(host, "allreduce of 4 float32", 1)


def test_a_rank_that_is_ahead_in_both_kinds_only_waits(stores):
    host, gpu, _ = worlds(stores)
    host.calls.update({ON_HOST: lambda: 2, ON_GPU: lambda: 5})
    gpu.calls.update({ON_HOST: lambda: 1, ON_GPU: lambda: 5})
    late(gpu, "allreduce", None, ON_GPU)
    assert late(host, "barrier", 1) == "; rank 1 waits in allreduce of communicator world"


def test_ranks_join_for_gpus_though_one_is_late(stores):
    def come(waits: Waits, after_s: float) -> None:
        time.sleep(after_s)
        waits.join_gpus(20.0)

    threads = [
        threading.Thread(target=come, args=(w, s)) for w, s in zip(worlds(stores), (0, 0, 0.5), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_rank_that_never_joins_for_gpus_is_named(stores):
    (waits, second, _) = worlds(stores)
    second._store.set("gpu/1", b"1")
    with pytest.raises(
        PeerTimeoutError, match="rank 2 did not come to the first call with arrays on GPUs"
    ) as e:
        waits.join_gpus(0.5)
    assert e.value.peer == 2


def test_who_joins_for_gpus_learns_that_another_rank_calls_with_numpy(stores):
    host, gpu, _ = worlds(stores)
    host.calls[ON_HOST] = lambda: 1
    late(host, "allreduce of 4 float32", 1)
    with pytest.raises(MismatchError, match="rank 0 with NumPy arrays"):
        gpu.join_gpus(20.0)


def test_the_first_call_with_arrays_of_two_kinds_is_told_on_all_ranks_within_moments(stores):
    host, gpu, _ = (Waits(store.scoped("world/"), "world", 60.0) for store in stores)
    host.calls[ON_HOST] = lambda: 1
    found = []

    def join() -> None:
        with pytest.raises(MismatchError, match="rank 0 with NumPy arrays") as failure:
            gpu.join_gpus(60.0)
        found.append(failure.value.peer)

    thread = threading.Thread(target=join)
    begin = time.monotonic()
    thread.start()
    with pytest.raises(MismatchError, match=r"rank 0 calls with NumPy arrays .*, and rank 1 with arrays on"):
        while True:
            waited_s = time.monotonic() - begin
            if waited_s >= host.due_s(ON_HOST):
                host.look(ON_HOST, "allreduce of 4 float32", 1, waited_s)
            time.sleep(0.005)
    thread.join(30)
    assert found == [0] and time.monotonic() - begin < 30, "notes are left after 48 s alone"


def test_who_joins_for_gpus_learns_that_a_rank_has_given_up(stores):
    waits, _, _ = worlds(stores)

    def tell() -> None:
        raise AbortedError("rank 1 gave up: enough", peer=1)

    waits.examine = tell
    begin = time.monotonic()
    with pytest.raises(AbortedError, match="enough"):
        waits.join_gpus(60.0)
    assert time.monotonic() - begin < 20.0


def test_who_joins_for_gpus_does_not_wait_for_a_rank_that_has_left(stores):
    waits, second, _ = worlds(stores)
    second._store.set("gpu/1", b"1")
    stores[2].close()
    begin = time.monotonic()
    waits.join_gpus(60.0)  # the exchange after it says who has left
    assert time.monotonic() - begin < 20.0
