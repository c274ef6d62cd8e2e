"""Threads of the library's own."""

import threading

import pytest

from flagcx import daemon
from flagcx.bootstrap.bounded import bounded
from flagcx.daemon import Daemon
from flagcx.errors import ResourceError


def test_a_daemon_runs_what_it_is_given():
    said: list[int] = []
    thread = Daemon(said.append, "flagcx-test", (3,))
    thread.start()
    thread.join(10)
    assert said == [3] and thread.daemon and not thread.is_alive()


def test_a_thread_that_dies_as_it_begins_is_not_waited_for_without_end(monkeypatch):
    def die(self):
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "_bootstrap", die)
    monkeypatch.setattr(daemon, "_BEGIN_S", 0.05)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    with pytest.raises(RuntimeError, match=r"can't start new thread: one has not begun within 0\.05 s"):
        Daemon(int, "flagcx-test").start()
    with pytest.raises(ResourceError, match=r"no thread can be started .*want of memory.*ulimit -v"):
        bounded(int, 1.0, lambda: None)
