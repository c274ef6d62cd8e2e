"""Another rank serves the store when the rank that did is gone."""

from __future__ import annotations

import threading

import pytest

from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store import StoreServer
from flagcx.errors import BootstrapError, PeerDiedError, PeerTimeoutError
from tests.bootstrap.processes import wait_until


def together(*calls):
    """Makes calls in threads at once; what each returned or raised."""
    results = [None] * len(calls)

    def make(i, call):
        try:
            results[i] = call()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=make, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.fixture(params=[None, "127.0.0.1:0"], ids=["unix", "tcp"])
def job(request):
    """Four ranks, of which rank 0 has served the store and has closed it."""
    server = StoreServer(4, request.param, host="rank 0", host_rank=0).start()
    stores = [RemoteStore(server.address, server.authkey, rank, 4) for rank in range(4)]
    together(*(lambda store=store: store.stand_by(10) for store in stores))
    stores[0].close()
    server.close()
    yield stores
    for store in stores:
        store.close()
        if store.server is not None:
            store.server.close()


def recovered(store, timeout_s=10):
    store.recover(timeout_s)
    return store.agree("left", b"%d" % store.rank, timeout_s)


def test_the_first_rank_that_is_left_serves(job):
    assert (
        together(*(lambda store=store: recovered(store) for store in job[1:]))
        == [{1: b"1", 2: b"2", 3: b"3"}] * 3
    )
    assert [store.server is not None for store in job] == [False, True, False, False]
    assert (
        together(*(lambda s=s: s.scoped("", [1, 2, 3]).exchange("x", b"", 5) for s in job[1:]))
        == [[b""] * 3] * 3
    )


def test_ranks_that_are_gone_are_passed_over_and_left_out(job):
    job[1].close()
    job[3].close()
    assert recovered(job[2]) == {2: b"2"}
    assert job[2].server is not None


def test_a_rank_that_ends_before_it_comes_is_left_out(job):
    late = threading.Timer(0.3, job[3].close)
    late.start()
    assert together(*(lambda store=store: recovered(store) for store in job[1:3])) == [{1: b"1", 2: b"2"}] * 2


def test_a_rank_that_lives_and_does_not_come_is_named(job):
    with pytest.raises(
        PeerTimeoutError, match=r"rank 1, the first that may serve .* did not come in time"
    ) as caught:
        job[2].recover(0.5)
    assert caught.value.peer == 1


def test_a_second_loss(job):
    together(*(lambda store=store: recovered(store) for store in job[1:]))
    server = job[1].server
    job[1].close()
    server.close()
    for store in job[2:]:
        with pytest.raises((BootstrapError, PeerDiedError)):
            store.get("x", 1)
    assert together(*(lambda store=store: recovered(store) for store in job[2:])) == [{2: b"2", 3: b"3"}] * 2


def test_a_launcher_that_is_gone_is_not_replaced():
    with StoreServer(2) as server:
        store = RemoteStore(server.address, server.authkey, 0, 2)
        store.stand_by(1)
        store.recover(1)
    wait_until(lambda: _is_lost(store))
    with pytest.raises(BootstrapError, match="the launcher, which ran it, has ended"):
        store.recover(1)
    store.close()


def _is_lost(store) -> bool:
    try:
        store.check()
    except BootstrapError:
        return True
    return False
