"""Segments: nothing left behind, and a full /dev/shm is a clear error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flagcx.errors import ResourceError
from flagcx.transport.shared_memory.segment import Handle, Segment

REPOSITORY = Path(__file__).parents[3]


def test_two_mappings_are_one_memory():
    own = Segment.create(10_000)
    assert own.handle.nbytes == 12_288
    peer = Segment.attach(own.handle)
    np.frombuffer(own.memory, np.int64)[7] = 42
    assert np.frombuffer(peer.memory, np.int64)[7] == 42
    peer.close()
    own.close()
    own.close()
    with pytest.raises(ResourceError, match="cannot be opened"):
        Segment.attach(own.handle)


def test_memory_that_is_viewed_outlives_its_segment():
    own = Segment.create(4096)
    view = np.frombuffer(own.memory, np.uint8)
    own.close()
    assert view.sum() == 0


def test_a_peer_that_is_gone():
    with pytest.raises(ResourceError, match=r"process 999999999 cannot be opened .* be alive"):
        Segment.attach(Handle(999_999_999, 3, 4096, 1, 1, 1))


def test_a_file_that_is_not_the_segment_is_not_mapped(tmp_path):
    own, other = Segment.create(4096), Segment.create(4096)
    mine, others = own.handle, other.handle
    forged = [
        mine._replace(descriptor=others.descriptor),
        mine._replace(nonce=mine.nonce ^ 1),
        mine._replace(inode=mine.inode + 1),
        mine._replace(device=mine.device + 1),
        mine._replace(pid=os.getppid()),
    ]
    reading, writing = os.pipe()
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"x" * 8192)
        file.flush()
        forged += [mine._replace(descriptor=d) for d in (reading, writing, file.fileno())]
        for handle in forged:
            with pytest.raises(ResourceError, match=r"PID namespace"):
                Segment.attach(handle)
        assert (tmp_path / "file").read_bytes() == b"x" * 8192
    for descriptor in (reading, writing):
        os.close(descriptor)
    for segment in (own, other):
        assert not np.frombuffer(segment.memory, np.uint8).any()
        segment.close()


_IN_SMALL_SHM = """
import os, sys
import numpy as np
if sys.argv[1] == "file":
    def refuse(*_):
        raise OSError("not here")
    os.memfd_create = refuse
from flagcx.transport.shared_memory.segment import Segment
from flagcx.errors import ResourceError
try:
    segment = Segment.create(8 << 20)
    np.frombuffer(segment.memory, np.uint8)[...] = 1
    print("made", os.listdir("/dev/shm"))
except ResourceError as error:
    print("refused", os.listdir("/dev/shm"), error)
"""


def _in_small_shm(how: str) -> str:
    """Runs the program above where /dev/shm holds 1 MiB; skips where such a place cannot be made."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a small /dev/shm can be mounted by root only, with unshare")
    mount = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} -c '{_IN_SMALL_SHM}' {how}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"a small /dev/shm cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_small_dev_shm_does_no_harm():
    assert _in_small_shm("memory").startswith("made []")


def test_a_small_dev_shm_that_has_to_do_is_a_clear_error():
    told = _in_small_shm("file")
    assert told.startswith("refused []"), told
    assert "no room for 8,388,608 bytes" in told
    assert "mount -o remount" in told
    assert "--shm-size" in told


def test_a_file_in_dev_shm_serves_as_well(monkeypatch):
    def refuse(*_):
        raise OSError

    before = os.listdir("/dev/shm")
    monkeypatch.setattr(os, "memfd_create", refuse)
    own = Segment.create(4096)
    assert os.listdir("/dev/shm") == before, "its name is gone at once"
    peer = Segment.attach(own.handle)
    own.memory[5] = 9
    assert peer.memory[5] == 9
    peer.close()
    own.close()


@pytest.mark.parametrize(("limit", "number"), [("RLIMIT_FSIZE", 1 << 20), ("RLIMIT_AS", 1 << 30)])
def test_a_limit_of_this_process_is_named(limit, number):
    code = f"""
import resource
from flagcx.errors import ResourceError
from flagcx.transport.shared_memory.segment import Segment
Segment.create(4096).close()
resource.setrlimit(resource.{limit}, ({number}, resource.RLIM_INFINITY))
for _ in range(3):
    try:
        Segment.create(4 << 30)
    except ResourceError as error:
        print(error)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("4,294,967,296 bytes of shared memory cannot be made") == 3
    remedy = "files of 1,048,576 bytes at most" if limit == "RLIMIT_FSIZE" else "ulimit -v"
    assert told.stdout.count(remedy) == 3
