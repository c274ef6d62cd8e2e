"""What jobs of Open MPI leave in /dev/shm: removed only where it is this user's, old, and in nobody's use."""

from __future__ import annotations

import mmap
import os
import time

import pytest

from flagcx.bootstrap import mpi_leftovers
from flagcx.bootstrap.mpi_leftovers import remove_own, remove_ownerless


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A used file and an ownerless one, both old; a young one; and one of another program's."""
    monkeypatch.setattr(mpi_leftovers, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(mpi_leftovers, "_FIRST_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    made = {}
    for name in ("sm_segment.host.0.1.0", "sm_segment.host.0.2.0", "vader_segment.host.3", "other"):
        made[name] = tmp_path / name
        made[name].write_bytes(bytes(mmap.PAGESIZE))
        os.utime(made[name], (time.time() - 3600,) * 2)
    os.utime(made["vader_segment.host.3"])
    with open(made["sm_segment.host.0.1.0"], "r+b") as file, mmap.mmap(file.fileno(), 0):
        yield tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_nobody_uses_is_removed(files):
    assert remove_ownerless() == mmap.PAGESIZE
    assert names(files) == ["other", "sm_segment.host.0.1.0", "vader_segment.host.3"]


def test_where_processes_are_hidden_a_file_must_be_a_day_old(files, monkeypatch):
    monkeypatch.setattr(mpi_leftovers, "_FIRST_NAMESPACE", "another one")
    assert remove_ownerless() == 0 and len(names(files)) == 4


def test_a_process_removes_what_it_has_mapped(files):
    remove_own()
    assert names(files) == ["other", "sm_segment.host.0.2.0", "vader_segment.host.3"]
