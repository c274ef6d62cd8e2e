"""The store over real sockets: what ranks exchange, who is blamed, and what a stranger can't do."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flagcx.bootstrap import wire
from flagcx.bootstrap.peer import Peer
from flagcx.bootstrap.remote_store import RefusedError, RemoteStore
from flagcx.bootstrap.sockets import parse_address
from flagcx.bootstrap.store import LocalStore, StoreServer
from flagcx.errors import (
    AbortedError,
    ArgumentError,
    BootstrapError,
    CommunicationError,
    CommunicatorError,
    PeerDiedError,
    PeerTimeoutError,
)
from tests.bootstrap.processes import (
    bare_environment,
    is_listened_on,
    launched_environment,
    line,
    rest,
    spawned,
    stop,
    wait_until,
)


@pytest.fixture(params=[None, "127.0.0.1:0"], ids=["unix", "tcp"])
def server(request):
    with StoreServer(3, request.param) as made:
        yield made


@pytest.fixture
def stores(server):
    made = [RemoteStore(server.address, server.authkey, rank, 3) for rank in range(3)]
    yield made
    for store in made:
        store.close()


def together(*calls):
    """Makes calls at the same time, each in a thread, and returns what they returned or raised."""
    results = [None] * len(calls)

    def make(index):
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=make, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a call hangs"
    return results


def open_socket(server):
    family, place = parse_address(server.address)
    link = socket.socket(family)
    link.settimeout(10)
    link.connect(place)
    return link


def test_exchange_gives_every_rank_every_value_in_order(stores):
    for size in (0, 1, 100_000):
        values = [bytes([rank]) * size for rank in range(3)]
        found = together(
            *(lambda s=s, v=v: s.exchange("x", v, 10) for s, v in zip(stores, values, strict=True))
        )
        assert found == [values] * 3


def test_the_rank_that_runs_the_store_is_answered_last(monkeypatch):
    """Where a call of its own then keeps Python's lock, such as MPI_Finalize of mpi4py, the others go on."""
    answered = []
    with StoreServer(3, host="rank 1", host_rank=1) as server, contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(RemoteStore(server.address, server.authkey, rank, 3)) for rank in range(3)
        ]
        send = Peer.send
        monkeypatch.setattr(Peer, "send", lambda peer, _: answered.append(peer.rank) or send(peer, _))
        together(*(lambda store=store: store.exchange("all", b"", 10) for store in stores))
    assert sorted(answered[:3]) == [0, 1, 2] and answered[2] == 1


def test_keys_counters_and_barriers(stores):
    first, second, third = stores
    first.set("k", b"v")
    assert second.get("k", 10) == b"v"
    assert (first.add("n", 2), second.add("n", 3), third.add("n", -1)) == (2, 5, 4)
    assert (third.delete("k"), third.delete("k")) == (True, False)
    assert together(*(lambda s=s: s.barrier("b", 10) for s in stores)) == [None] * 3


def test_get_waits_for_the_key(stores):
    found = together(lambda: stores[1].get("late", 10), lambda: stores[0].set("late", b"v"))
    assert found == [b"v", None]


def test_a_value_of_many_megabytes_comes_through(stores):
    value = os.urandom(20 << 20)
    stores[0].set("k", value)
    assert stores[1].get("k", 20) == value


def test_a_late_rank_is_named(stores):
    errors = together(lambda: stores[0].barrier("b", 0.2), lambda: stores[2].exchange("b", b"", 0.2))
    for error in errors:
        assert isinstance(error, PeerTimeoutError)
        assert error.peer == 1
        assert "rank 1 did not come to exchange or barrier 'b' within 0.2 s" in str(error)


def test_a_missing_key_names_the_ranks_that_are_not_connected(server):
    with (
        RemoteStore(server.address, server.authkey, 0, 3) as store,
        pytest.raises(
            PeerTimeoutError, match=r"'k' was not set within 0.1 s \(not connected: rank 1, rank 2\)"
        ),
    ):
        store.get("k", 0.1)


def test_who_waits_for_a_rank_that_left_because_of_a_peer_is_told_of_the_peer(stores):
    stores[1].blames = lambda: "rank 2 did not come to a sum"
    stores[1].close()
    with pytest.raises(AbortedError, match=r"rank 1 has left .* \(rank 2 did not come to a sum\)") as caught:
        stores[0].barrier("b", 20)
    assert caught.value.peer is None


def test_a_rank_that_left_in_good_order_is_not_dead_but_not_waited_for(stores):
    stores[1].close()
    with pytest.raises(CommunicationError, match="rank 1 has left the job") as caught:
        stores[0].barrier("b", 20)
    assert caught.value.peer == 1
    stores[0].set("k", b"v")
    assert stores[2].get("k", 10) == b"v"
    stores[2].check()


def test_ranks_may_leave_and_come_back_at_their_own_pace(server):
    def stay_three_times(rank):
        found = []
        for stay in range(3):
            with RemoteStore(server.address, server.authkey, rank, 3) as store:
                found.append(store.exchange("init", b"%d" % stay, 10))
        return found

    expected = [[b"%d" % stay] * 3 for stay in range(3)]
    assert together(*(lambda rank=rank: stay_three_times(rank) for rank in range(3))) == [expected] * 3


def test_a_rank_that_aborts_says_why_to_those_who_wait_and_who_ask_later(stores):
    results = together(
        lambda: stores[0].barrier("b", 20), lambda: stores[2].abort("it raised ValueError: no")
    )
    assert isinstance(results[0], PeerDiedError)
    with pytest.raises(
        PeerDiedError, match=r"rank 2 died \(it raised ValueError: no\), so set 'k' on rank 1"
    ) as caught:
        stores[1].set("k", b"")
    assert caught.value.peer == 2
    wait_until(lambda: isinstance(together(stores[0].check)[0], PeerDiedError))


def test_a_rank_that_is_expelled_is_lost_to_the_others_and_told_so(stores):
    waits = together(lambda: stores[0].barrier("b", 20), lambda: stores[1].expel(2, "it is late"))
    assert isinstance(waits[0], PeerDiedError) and "rank 2 died (it is late)" in str(waits[0])
    assert waits[1] is None
    for call in (stores[2].check, lambda: stores[2].set("k", b""), lambda: stores[2].recover(1)):
        stores[2].lost()
        with pytest.raises(AbortedError, match="the other ranks go on without rank 2: it is late"):
            call()
    assert stores[0].scoped("view/", [0, 1]).exchange  # those that are left share a store


def test_views_have_their_own_keys_ranks_and_deaths(stores):
    low, high = stores[0].scoped("low/", [0, 1]), stores[1].scoped("low/", [0, 1])
    assert (low.rank, low.size, high.rank) == (0, 2, 1)
    assert (
        together(lambda: low.exchange("x", b"0", 10), lambda: high.exchange("x", b"1", 10))
        == [[b"0", b"1"]] * 2
    )
    low.set("k", b"v")
    assert (high.get("k", 10), stores[2].get("low/k", 10)) == (b"v", b"v")
    turned = [stores[0].scoped("t/", [2, 0]), stores[2].scoped("t/", [2, 0])]
    found = together(lambda: turned[0].exchange("x", b"0", 10), lambda: turned[1].exchange("x", b"2", 10))
    assert found == [[b"2", b"0"]] * 2
    stores[2].abort("gone")
    with pytest.raises(PeerDiedError, match=r"rank 0 \(rank 2 of the whole job\) died") as caught:
        turned[0].barrier("b", 10)
    assert caught.value.peer == 0
    low.set("k", b"w")
    low.check()
    assert high.get("k", 10) == b"w"


class SlowPoller:
    """A poll object that stays in ``poll`` until another thread has had its turn, as a busy machine makes it.

    Like the real one it refuses two threads at once.
    """

    def __init__(self):
        self.inside, self.entered, self.go_on = False, threading.Event(), threading.Event()

    def poll(self, timeout_ms):
        if self.inside:
            raise RuntimeError("concurrent poll() invocation")
        self.inside = True
        self.entered.set()
        self.go_on.wait(5)
        self.inside = False
        return []


def test_two_threads_may_check_at_once(stores):
    kept, stores[0]._poller = stores[0]._poller, SlowPoller()
    first = threading.Thread(target=stores[0].check)
    first.start()
    assert stores[0]._poller.entered.wait(5)
    stores[0].check()
    stores[0]._poller.go_on.set()
    first.join()
    stores[0]._poller = kept


@pytest.mark.parametrize(
    ("ranks", "message"),
    [([0, 0], "different ranks"), ([0, 3], "from 0 to 2"), ([1, 2], "rank 0 is not one of")],
)
def test_a_view_of_wrong_ranks_is_refused(stores, ranks, message):
    with pytest.raises(ArgumentError, match=message):
        stores[0].scoped("v/", ranks)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.set(1, b""), "a key must be a str, got int"),
        (lambda store: store.set("k", "v"), "a value must be bytes, got str"),
        (lambda store: store.set("k", bytes((32 << 20) + 1)), "at most 33554432 bytes, got 33554433"),
        (lambda store: store.get("k", -1), "a time-out must be a number of seconds from 0 up, got -1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(stores, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(stores[0])
    stores[0].set("k", b"v")


def test_closing_twice_is_fine_and_a_closed_store_says_so(stores, server):
    stores[0].close()
    stores[0].close()
    with pytest.raises(CommunicatorError, match="the store of rank 0 is closed"):
        stores[0].set("k", b"")
    server.close()
    server.close()
    with pytest.raises(BootstrapError, match="the store is closed: the launcher, which ran it, has ended"):
        stores[1].get("k", 10)


def test_a_closed_server_leaves_no_thread_socket_or_descriptor():
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        with StoreServer(1) as server, RemoteStore(server.address, server.authkey, 0, 1) as store:
            store.exchange("x", b"", 10)
            address = server.address
        assert not is_listened_on(address)
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


# Who is let in.


def test_the_wrong_key_is_turned_away_and_disturbs_nobody(server, stores):
    with pytest.raises(BootstrapError, match="closed the connection of rank 1: the key"):
        RemoteStore(server.address, b"wrong", 1, 3)
    assert together(*(lambda s=s: s.exchange("x", b"", 10) for s in stores)) == [[b""] * 3] * 3


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (1, 3, "rank 1 is already connected, from process PID"),
        (1, 4, "calls itself rank 1 of 4, but this job has 3 ranks"),
        (3, 3, "calls itself rank 3 of 3"),
    ],
)
def test_a_rank_that_does_not_belong_is_told_why(server, stores, rank, size, message):
    with pytest.raises(RefusedError, match=message.replace("PID", str(os.getpid()))):
        RemoteStore(server.address, server.authkey, rank, size)


def test_a_lost_rank_cannot_come_back(server, stores):
    stores[2].abort("it raised X")
    wait_until(lambda: isinstance(together(stores[0].check)[0], PeerDiedError))
    with pytest.raises(RefusedError, match=r"rank 2 was lost before \(it raised X\)"):
        RemoteStore(server.address, server.authkey, 2, 3)


def test_a_false_server_is_found_out():
    """It has the right words, and not the key."""
    with StoreServer(1, authkey=b"another") as false, pytest.raises(BootstrapError):
        RemoteStore(false.address, b"ours", 0, 1)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        link, _ = listener.accept()
        link.sendall(wire.frame(wire.MAGIC + bytes(32)))
        link.recv(4096)
        link.sendall(wire.frame(bytes(32) + wire.pack({"ok": True, "host": "x", "host_rank": None})))
        link.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(BootstrapError, match="does not know this job's key"):
        RemoteStore(f"127.0.0.1:{listener.getsockname()[1]}", b"ours", 0, 1)
    thread.join()
    listener.close()


def test_who_listens_and_says_nothing_or_something_else_is_not_taken_for_a_store():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BootstrapError, match="sends nothing; is it a flagcx store"):
            RemoteStore(address, b"k", 0, 1, timeout_s=0.2)

        def answer():
            for _ in range(2):  # The first is the connection above.
                link, _ = listener.accept()
                with contextlib.suppress(OSError):
                    link.sendall(wire.frame(b"HTTP/1.1 400 Bad Request"))
            link.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BootstrapError, match="is no flagcx store"):
            RemoteStore(address, b"k", 0, 1)
        thread.join()


def test_nobody_listens():
    with pytest.raises(BootstrapError, match="rank 1 cannot reach the store at unix:@nobody"):
        RemoteStore("unix:@nobody-is-here", b"k", 1, 2)


STRANGERS = {
    "silent": b"",
    "half a length": b"\0\0",
    "half a greeting": b"\0\0\0\x60" + b"x" * 10,
    "a huge length": b"\x7f\xff\xff\xff",
    "a negative length": b"\xff\xff\xff\xff",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a pickle": wire.frame(b"\x80\x04cos\nsystem\n(S'exit 1'\ntR."),
    "an empty frame": wire.frame(b""),
    "an unproven claim": wire.frame(bytes(64) + wire.pack({"rank": 0, "size": 3, "pid": 1})),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_stalls_and_breaks_nothing(server, stores, name):
    strangers = [open_socket(server) for _ in range(5)]
    for stranger in strangers:
        stranger.sendall(STRANGERS[name])
    start = time.monotonic()
    for _ in range(20):
        assert together(*(lambda s=s: s.exchange("x", b"v", 10) for s in stores)) == [[b"v"] * 3] * 3
    assert time.monotonic() - start < 4
    for stranger in strangers:
        stranger.close()
    stores[0].check()


def test_a_silent_stranger_is_cut_off_at_the_deadline():
    with StoreServer(1, handshake_s=0.2) as server, open_socket(server) as stranger:
        greeting = wire.frame(wire.MAGIC + bytes(32))
        assert len(stranger.recv(4096)) == len(greeting)
        assert stranger.recv(4096) == b""


def test_more_strangers_than_there_is_room_for_do_not_keep_a_rank_out(server):
    with contextlib.ExitStack() as crowd:
        for _ in range(300):
            crowd.enter_context(open_socket(server))
        with RemoteStore(server.address, server.authkey, 0, 3) as store:
            store.set("k", b"v")
            assert store.get("k", 10) == b"v"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_host_is_turned_away_even_with_the_key():
    knock = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
link = socket.socket(socket.AF_UNIX)
link.connect("\\0" + sys.argv[1])
print(len(link.recv(4096)) > 0)
"""
    with StoreServer(1) as server:
        address = server.address.removeprefix("unix:@")
        for user, expected in ((0, "True\n"), (65534, "False\n")):
            command = [sys.executable, "-S", "-c", knock, address, str(user)]
            assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == expected


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_the_server_of_another_user_is_not_joined():
    listen = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
os.setuid(65534)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""
    name = f"flagcx-test-{os.getpid()}"
    command = [sys.executable, "-S", "-c", listen, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "listens\n"
        with pytest.raises(BootstrapError, match="another user listens there"):
            RemoteStore(f"unix:@{name}", b"k" * 16, 0, 2)
        process.communicate()


def test_a_replayed_greeting_is_worthless(server):
    """What one connection proved does not hold for the next, whose nonce differs."""

    def hear(link):
        return wire.FrameReader(4096).feed(link.recv(4096))[0]

    with open_socket(server) as first, open_socket(server) as second:
        nonce, claim = hear(first)[len(wire.MAGIC) :], wire.pack({"rank": 0, "size": 3, "pid": 1})
        hear(second)
        greeting = bytes(32) + wire.proof(server.authkey, "client", nonce, bytes(32), claim) + claim
        first.sendall(wire.frame(greeting))
        assert b'"ok":true' in hear(first)
        second.sendall(wire.frame(greeting))
        assert second.recv(4096) == b""


@pytest.mark.parametrize(
    "message", [b"no message", wire.pack({"kind": "exchange", "key": "x", "number": 1, "group": [0]})]
)
def test_a_rank_that_sends_nonsense_is_lost_and_named(server, stores, message):
    stores[2]._connection.send_bytes(message)
    with pytest.raises(PeerDiedError, match=r"rank 2 died \(it sent an invalid message") as caught:
        stores[0].barrier("b", 10)
    assert caught.value.peer == 2


def test_a_rank_that_does_not_read_does_not_stop_the_others(server, stores):
    """Its answers pile up in the server, and nobody else waits for them."""
    stores[2].set("big", bytes(8 << 20))
    request = wire.pack({"number": 9, "kind": "get", "key": "big", "timeout_s": 1})
    stores[2]._connection.send_bytes(request)
    together(lambda: stores[0].set("k", b"v"), lambda: stores[1].get("k", 10))


# Deaths of real processes.


@contextlib.contextmanager
def beside(body):
    """The store of rank 0 of 2, and rank 1 as a process that runs these lines."""
    with (
        StoreServer(2) as server,
        RemoteStore(server.address, server.authkey, 0, 2) as store,
        spawned(body, launched_environment(server, 1)) as (process,),
    ):
        yield store, process


def test_kill_9_during_init_is_told_to_those_who_wait_within_two_seconds():
    body = """
store = start()
tell("connected")
if store.rank == 2:
    signal.pause()
try:
    store.exchange("init", b"", 60)
except PeerDiedError as error:
    tell(error.peer, error)
try:
    store.set("k", b"")
except PeerDiedError as error:
    tell(error.peer, error)
"""
    with StoreServer(3) as server:
        environs = [launched_environment(server, rank) for rank in range(3)]
        with spawned(body, *environs) as processes:
            assert [line(process) for process in processes] == ["connected"] * 3
            start = time.monotonic()
            processes[2].kill()
            for process in processes[:2]:
                assert re.match("2 rank 2 died .its process ended or was killed", line(process))
                assert re.match("2 rank 2 died .* set 'k'", line(process))
            assert time.monotonic() - start < 20


def test_a_death_before_init_is_told_by_the_launcher():
    with StoreServer(2) as server, RemoteStore(server.address, server.authkey, 0, 2) as store:
        results = together(
            lambda: store.exchange("init", b"", 20),
            lambda: server.rank_ended(1, "its process ended: killed by SIGKILL"),
        )
    assert isinstance(results[0], PeerDiedError)
    assert "rank 1 died (its process ended: killed by SIGKILL)" in str(results[0])
    assert results[0].peer == 1


def test_a_rank_that_ended_well_without_init_is_not_waited_for():
    with StoreServer(2) as server:
        server.rank_ended(1)
        store = RemoteStore(server.address, server.authkey, 0, 2)
        with store, pytest.raises(CommunicationError, match="rank 1 has left the job"):
            store.exchange("init", b"", 20)


def test_a_stopped_rank_is_late_and_named():
    with beside("store = start()\ntell('connected')\nsignal.pause()") as (store, process):
        assert line(process) == "connected"
        stop(process)
        with pytest.raises(PeerTimeoutError, match="rank 1 did not come") as caught:
            store.barrier("b", 0.3)
        assert caught.value.peer == 1
        process.send_signal(signal.SIGCONT)


def test_a_rank_that_raises_tells_the_others_what():
    with beside("store = start()\nraise ValueError('no data')") as (store, process):
        with pytest.raises(PeerDiedError, match=r"rank 1 died \(it raised ValueError: no data\)"):
            store.barrier("b", 20)
        assert "ValueError: no data" in rest(process)


def test_a_rank_that_ends_without_closing_has_left_in_good_order():
    with beside("store = start()") as (store, process):
        assert rest(process) == ""
        with pytest.raises(CommunicationError, match="rank 1 has left"):
            store.barrier("b", 20)


def test_a_forked_child_does_not_keep_its_dead_parent_alive_and_cannot_use_the_store():
    body = """
store = start()
child = os.fork()
if child == 0:
    try:
        store.set("k", b"")
    except CommunicatorError as error:
        tell(error)
    signal.pause()
os.waitpid(child, 0)
"""
    with beside(body) as (store, process):
        assert line(process) == "the store of rank 1 is closed in a forked child"
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        try:
            process.kill()
            with pytest.raises(PeerDiedError, match="rank 1 died"):
                store.barrier("b", 20)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_server_is_named_and_does_not_hang_the_others(monkeypatch):
    monkeypatch.setattr("flagcx.bootstrap.remote_store._MARGIN_S", 0.3)
    body = """
from flagcx.bootstrap.store import StoreServer
server = StoreServer(2, authkey=b"k", host="rank 0", host_rank=0).start()
tell(server.address)
signal.pause()
"""
    with spawned(body, bare_environment()) as (process,), RemoteStore(line(process), b"k", 1, 2) as store:
        stop(process)
        with pytest.raises(
            PeerTimeoutError, match="the store, which rank 0 runs, does not answer set of rank 1"
        ) as caught:
            store.set("k", b"v")
        assert caught.value.peer == 0
        process.send_signal(signal.SIGCONT)
        store.set("k", b"w")  # The late answer is not taken for this one's.
        assert store.get("k", 10) == b"w"


def test_a_stopped_rank_that_served_the_store_learns_as_it_wakes_that_it_was_left_out(monkeypatch):
    monkeypatch.setattr("flagcx.bootstrap.remote_store._MARGIN_S", 0.1)
    body = """
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store import StoreServer
server = StoreServer(3, authkey=b"k", host="rank 0", host_rank=0).start()
store = RemoteStore(server.address, b"k", 0, 3)
tell(server.address)
sys.stdin.readline()
for call in (lambda: store.agree("left", b"", 0), lambda: store.recover(1)):
    try:
        tell(call())
    except AbortedError as error:
        tell(error)
"""
    with spawned(body, bare_environment()) as (process,):
        address = line(process)
        others = [RemoteStore(address, b"k", rank, 3) for rank in (1, 2)]
        stop(process)
        for other in others:
            with pytest.raises(PeerTimeoutError):
                other.set("k", b"v")
            other.expel(0, "it did not come")
            other.close()
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert {line(process), line(process)} == {"the other ranks go on without rank 0: it did not come"}


# A lone rank.


def test_a_lone_rank_needs_no_server():
    with LocalStore() as store:
        store.set("k", b"v")
        assert (store.rank, store.size, store.get("k", 1), store.add("n", 2)) == (0, 1, b"v", 2)
        assert store.exchange("x", b"v", 1) == [b"v"]
        store.barrier("b", 1)
        assert store.scoped("a/").exchange("x", b"w", 1) == [b"w"]
        store.check()
        with pytest.raises(PeerTimeoutError, match="key 'missing' was not set"):
            store.get("missing", 100)
