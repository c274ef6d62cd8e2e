"""Groups of ranks: answers come back, failures are named, nothing is left behind."""

import os
import sys
import textwrap
from pathlib import Path

import groups
import pytest

RANK = """
    import os, sys, time
    sys.path.insert(0, {bench!r})
    import harness, numpy as np
    address, rank, behaviour, shared_file = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]

    def allocate(count):
        array = np.zeros(count, np.float32)
        return array, array

    def allreduce(array):
        if array.size == 256 or rank != 1:
            return
        if behaviour == "dies":
            print("rank 1 is unwell", flush=True)
            os._exit(3)
        if behaviour == "raises":
            raise ValueError("no such luck")
        if behaviour == "sleeps":
            time.sleep(60)

    if behaviour == "never starts":
        sys.exit("no start today")
    if behaviour == "leaves a file":
        left = np.memmap(shared_file, np.uint8, "w+", shape=4096)
    subject = harness.Subject(rank, 2, allreduce, lambda: None, allocate, harness.versions(peer="1"))
    harness.serve(address, subject)
"""


@pytest.fixture
def start(tmp_path):
    """Starts two ranks that behave as asked."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK).format(bench=str(Path(groups.__file__).parent)))
    shared_file = f"/dev/shm/flagcx-test-{os.getpid()}"

    def commands(behaviour):
        return lambda bin_folder, ranks, address, folder: [
            [sys.executable, str(script), address, str(rank), behaviour, shared_file] for rank in range(ranks)
        ]

    def starter(behaviour, timeout_s=30.0):
        return groups.Group(groups.Implementation("peer", None, commands(behaviour)), 2, timeout_s)

    yield starter
    Path(shared_file).unlink(missing_ok=True)


def test_all_ranks_answer(start):
    with start("behaves") as group:
        assert group.versions["peer"] == "1"
        assert group.startup_s > 0
        answers = group.order("prepare", count=100)
        assert [answer["wrong"] for answer in answers] == [100, 100]  # nobody added anything up
        assert len(group.order("sample", calls=2, warmup=1)) == 2
        processes, folder = group._processes, group._folder
    assert [process.returncode for process in processes] == [0, 0]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("dies", "peer: a rank died: rank 1 is unwell"),
        ("raises", "peer: ValueError: no such luck"),
        ("sleeps", "peer: no answer in 2 s"),
    ],
)
def test_failure_inside_an_order_is_named(start, behaviour, message):
    group = start(behaviour, timeout_s=2.0)
    with pytest.raises(groups.GroupFailed, match=message):
        group.order("prepare", count=100)
    group.close(patience_s=0.1)
    assert all(process.returncode is not None for process in group._processes)


def test_ranks_that_do_not_start_are_named_with_their_last_words(start):
    with pytest.raises(groups.GroupFailed, match="peer: ended with 1: no start today"):
        start("never starts")


def test_files_left_in_shared_memory_are_reported_and_removed(start):
    group = start("leaves a file")
    (path,) = group.close()
    assert path.startswith("/dev/shm/flagcx-test-")
    assert not Path(path).exists()


def test_close_twice_is_once(start):
    group = start("behaves")
    assert group.close() == []
    assert group.close() == []
