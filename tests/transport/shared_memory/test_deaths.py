"""A process that has ended is noticed by its descriptor or by /proc, before its parent asks and after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flagcx.transport.shared_memory import deaths as module
from flagcx.transport.shared_memory.deaths import Deaths


def _no_descriptors(pid: int) -> int:
    raise OSError(38, "Function not implemented")


@pytest.fixture(params=["descriptor", "proc", "old Python"])
def deaths(request, monkeypatch):
    if request.param == "proc":
        monkeypatch.setattr(os, "pidfd_open", _no_descriptors)
    elif request.param == "old Python":
        monkeypatch.delattr(os, "pidfd_open")
    made = Deaths()
    yield made
    made.close()


@pytest.fixture
def process():
    made = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield made
    made.kill()
    made.communicate()


def test_an_end_is_noticed(deaths, process):
    assert deaths.watch(3, process.pid)
    assert deaths.watch(4, os.getpid())
    assert deaths.peers() == []
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its number is still taken
    assert deaths.peers() == [3]
    process.wait()
    assert deaths.peers() == [3]


def test_a_process_that_is_gone_is_not_watched(deaths, process):
    process.kill()
    process.wait()
    assert not deaths.watch(0, process.pid)


def test_a_process_that_has_got_the_number_since_is_another(process, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "pidfd_open", _no_descriptors)
    deaths = Deaths()
    assert deaths.watch(1, process.pid)
    fields = (Path("/proc") / str(process.pid) / "stat").read_text().split(" ")
    fields[21] = "1"
    (tmp_path / str(process.pid)).mkdir()
    (tmp_path / str(process.pid) / "stat").write_text(" ".join(fields))
    assert deaths.peers() == []
    monkeypatch.setattr(module, "_PROCESSES", tmp_path)
    assert deaths.peers() == [1]
