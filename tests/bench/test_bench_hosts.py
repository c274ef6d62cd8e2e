"""Test hosts: what they are called, how far they are from each other, and that nothing of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import hosts
from tests.hosts import run_by_mpi, run_by_torchrun

ECHO = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print(socket.gethostname(), flush=True)
    connection = server.accept()[0]
    while data := connection.recv(100):
        connection.sendall(data)
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        times.append(time.perf_counter() - start)
print(min(times))
"""
needs_root = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing() or "root")


def time_to_and_fro(asks: str, answers: str) -> float:
    """How long a byte takes to a host and back, in seconds."""
    command = hosts.inside(answers, [sys.executable, "-c", ECHO])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline().strip() == answers
        ask = hosts.inside(asks, [sys.executable, "-c", ASK, answers])
        try:
            return float(subprocess.run(ask, capture_output=True, text=True, check=True, timeout=20).stdout)
        finally:
            server.kill()


@needs_root
@pytest.mark.parametrize(("delay", "least_s"), [("", 0.0), ("5ms", 0.01)])
def test_hosts_reach_each_other_by_name(delay, least_s):
    with hosts.hosts(3, "1gbit", delay) as names:
        assert time_to_and_fro(names[0], names[2]) >= least_s
        assert time_to_and_fro(names[2], names[1]) >= least_s
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in names if name in listed]
    assert not [name for name in names if (Path("/etc/netns") / name).exists()]


def test_a_delay_without_a_unit_is_refused():
    with (
        pytest.raises(ValueError, match="delay='5' is no time; expected a number with a unit"),
        hosts.hosts(2, delay="5"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
def test_ranks_land_where_they_are_sent(counts, test_hosts):
    names = test_hosts[: len(counts)]
    want = sorted(
        f"{rank} of {sum(counts)} on {names[host]}" for rank, (host, _) in enumerate(hosts.places(counts))
    )
    code, printed = run_by_mpi(names, counts, "tests.bench.host_of_rank")
    assert code == 0 and sorted(printed.split("\n")[:-1]) == want, printed
    codes, each = run_by_torchrun(names, counts, "tests.bench.host_of_rank")
    assert not any(codes) and "".join(each).splitlines() == want, each


@needs_root
def test_hosts_of_a_process_that_was_killed_are_removed():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, own = f"fx{ended.pid}a", f"fx{os.getpid()}z"
    folder = Path("/etc/netns", left)
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    try:
        for name in (left, f"fx{ended.pid}-switch", own):
            subprocess.run(["ip", "netns", "add", name], check=True)
        hosts.remove_orphans()
        there = {path.name for path in Path("/run/netns").iterdir()}
        assert own in there and not {name for name in there if name.startswith(f"fx{ended.pid}")}
        assert not folder.exists()
    finally:
        subprocess.run(["ip", "netns", "del", own], check=True)
