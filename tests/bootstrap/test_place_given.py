"""Ranks whose program tells them their place: no launcher, any way of starting processes."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import subprocess
import sys

import numpy as np
import pytest

import flagcx as fc
from flagcx.bootstrap.environment import identify, located, place_given
from flagcx.errors import ArgumentError, BootstrapError


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _sum_in_pool(place):
    comm = fc.init(**place)
    try:
        return float(comm.allreduce(np.full(3, comm.rank + 1.0))[0]), comm.rank, comm.size
    finally:
        comm.close()


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_pool_of_processes_is_a_job_again_and_again(everywhere):
    """On one host by 127.0.0.1; by an address of all interfaces, with a key."""
    host = "0.0.0.0" if everywhere else "127.0.0.1"
    key = {"key": secrets.token_hex(16)} if everywhere else {}
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        for _ in range(2):
            address = f"{host}:{_free_port()}"
            places = [{"rank": rank, "size": 3, "address": address, **key} for rank in range(3)]
            assert sorted(pool.map(_sum_in_pool, places, chunksize=1)) == [
                (6.0, rank, 3) for rank in range(3)
            ]


def _take_places(tasks, done):
    for place in iter(tasks.get, None):
        done.put((_sum_in_pool(place), os.getpid()))


@pytest.mark.parametrize("everywhere", [False, True])
def test_processes_that_change_places_may_use_one_address(everywhere):
    """Who is rank 0 next time listens where another process has just done."""
    address = f"{'0.0.0.0' if everywhere else '127.0.0.1'}:{_free_port()}"
    key = {"key": secrets.token_hex(16)} if everywhere else {}
    context = multiprocessing.get_context("spawn")
    tasks, done = [context.Queue() for _ in range(2)], context.Queue()
    processes = [context.Process(target=_take_places, args=(each, done)) for each in tasks]
    for process in processes:
        process.start()
    hosts = []
    for order in ([0, 1], [0, 1], [1, 0], [1, 0], [0, 1]):
        for rank, each in zip(order, tasks, strict=True):
            each.put({"rank": rank, "size": 2, "address": address, **key})
        told = sorted(done.get(timeout=60) for _ in range(2))
        assert [result for result, _ in told] == [(3.0, rank, 2) for rank in range(2)]
        hosts.append(told[0][1])
    assert len(set(hosts)) == 2
    for each in tasks:
        each.put(None)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


def test_rank_and_size_by_hand():
    program = "import flagcx as fc, numpy as np; print(fc.init().allreduce(np.ones(1))[0])"
    address = f"127.0.0.1:{_free_port()}"
    environ = {**os.environ, "FLAGCX_SIZE": "2", "FLAGCX_STORE_ADDRESS": address}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program], env={**environ, "FLAGCX_RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == [b"2.0\n"] * 2
    del environ["FLAGCX_STORE_ADDRESS"]
    with pytest.raises(BootstrapError, match="FLAGCX_STORE_ADDRESS is not; set it to host:port of rank 0"):
        identify({**environ, "FLAGCX_RANK": "0"})


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"rank": 1}, r"init\(rank=1, size=None\): give both"),
        ({"address": "127.0.0.1:1"}, r"init\(rank=None, size=None\): give both"),
        ({"rank": 2, "size": 2}, "rank=2 is not a rank of this communicator; expected 0 to 1"),
        ({"rank": 0.0, "size": 2}, "rank=0.0 is not an integer; expected 0 to 1"),
        ({"rank": True, "size": 2}, "rank=True is not an integer"),
        ({"rank": 0, "size": 2.0}, "size must be an integer from 1 up, got 2.0"),
        ({"rank": -1, "size": 2}, "rank=-1 is not a rank"),
        ({"rank": 0, "size": 2, "address": 29400}, "address=29400 is not where rank 0 can be met"),
        ({"rank": 0, "size": 1, "address": "localhost"}, "address='localhost' is not where"),
        ({"rank": 0, "size": 2, "address": "a:1", "key": b"ab"}, "key must be a str of hex.* got bytes"),
        ({"rank": 0, "size": 2, "address": "a:1", "key": "secret"}, "key= must be hexadecimal digits, two"),
        (
            {"rank": 0, "size": 2, "address": "a:1", "key": "00ff"},
            "key= has 2 bytes, which can be guessed",
        ),
        ({"rank": 0, "size": 2}, "address='' is not where rank 0 can be met; expected host:port"),
        ({"rank": 0, "size": 2, "address": "localhost:0"}, "address='localhost:0' is not where rank 0"),
        ({"rank": 0, "size": 2, "address": "localhost:99999"}, "address='localhost:99999' is not"),
    ],
)
def test_a_place_that_is_no_ranks_is_refused(place, message):
    with pytest.raises(ArgumentError, match=message):
        fc.init(**place)


def test_a_key_is_needed_where_other_hosts_reach_the_address():
    with pytest.raises(BootstrapError, match=r"127\.0\.0\.1 without one"):
        fc.init(rank=0, size=2, address=f"0.0.0.0:{_free_port()}", init_timeout_s=5)


def test_a_given_place_wins_over_a_launchers():
    started = {"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "OMPI_COMM_WORLD_RANK": "1"}
    environ = place_given({**started, "FLAGCX_LOCAL_RANK": "7", "HOME": "/"}, 1, 2, "10.0.0.1:4000", "ab")
    found = identify(environ)
    assert (found.rank, found.size, found.local_size, environ["HOME"]) == (1, 2, 0, "/")
    assert located(found, ["elsewhere", found.host]).local_rank == 0
    assert located(found, [found.host, found.host]).local_size == 2
