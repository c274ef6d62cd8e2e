"""Measuring what messages take between hosts, over a transport of threads that takes its time."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import MappingProxyType

import pytest

from flagcx.cost.hosts import HostLinks
from flagcx.selection.host_links import describe_hosts, measure_host_links
from flagcx.selection.table import machine_here
from flagcx.transport.steps import HostTransport

SLOW_US = 4000.0


class Slow(HostTransport):
    """Messages that take the longer the more bytes they have; the first of a length may wait for a core."""

    name = "slow"

    def __init__(self, rank, size, queues, us_per_kib, waits_us):
        self.rank, self.size, self._queues, self._us = rank, size, queues, us_per_kib
        self._waits_us = {**waits_us}

    def transfer(self, sends, receives):
        for array, peer in sends:
            took_us = self._us * array.nbytes / 1024 + self._waits_us.pop(array.nbytes, 0.0)
            end = time.perf_counter() + took_us * 1e-6
            while time.perf_counter() < end:
                time.sleep(0)
            self._queues[self.rank, peer].put(array.copy())
        for array, peer in receives:
            array[...] = self._queues[peer, self.rank].get(timeout=20)

    def abort(self, reason, culprit):
        pass

    def close(self):
        pass


def measured(groups, us_per_kib, waits_us=MappingProxyType({})):
    """The table of every rank."""
    size = sum(map(len, groups))
    hosts = []
    queues = {(a, b): SimpleQueue() for a in range(size) for b in range(size)}
    told, meet = {what: [b""] * size for what in ("links", "calls", "machines")}, threading.Barrier(size)

    def rank(number):
        def exchange(what, mine):
            told[what][number] = mine
            meet.wait(20)
            return list(told[what])

        links = measure_host_links(Slow(number, size, queues, us_per_kib, waits_us), groups, exchange)
        hosts.append(describe_hosts(groups, links, exchange))
        return links

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(rank, range(size)))
    assert all(one == hosts[0] for one in hosts)
    return found, told, hosts[0]


@pytest.mark.parametrize("groups", [((0,), (1,)), ((1, 0), (2, 3)), ((2,), (0, 1, 3))], ids=str)
def test_all_ranks_get_the_table_of_those_that_measured(groups):
    found, told, hosts = measured(groups, 1.0)
    assert len(set(found)) == 1
    first, here = groups[0][0], next((group[0] for group in groups if len(group) > 1), groups[0][0])
    assert [list(pair) for pair in found[0].between] == json.loads(told["links"][first])[0]
    assert [list(pair) for pair in found[0].inside] == json.loads(told["links"][here])[1]
    assert found[0].step_us == max(json.loads(mine)[0] for mine in told["calls"])
    lengths = [nbytes for nbytes, _ in found[0].between]
    assert lengths == sorted(set(lengths)) and lengths[0] == 1 << 10 and len(lengths) >= 2
    assert hosts == {
        "groups": [[*group] for group in groups],
        "machines": [machine_here()] * len(groups),
        "latency_us": found[0].between[0][1],
        "bandwidth_gb_per_s": HostLinks.law(found[0].between, 2 << 20)[1],
    }
    assert found[0].copy_gb_per_s > 0 and found[0].add_gb_per_s > 0 and found[0].cores >= 1


def test_on_a_slow_link_few_lengths_are_tried():
    """Of 4 ms for each KiB: two lengths, which give the speed, and none that would take minutes."""
    (found, *_), _, hosts = measured(((0,), (1,)), SLOW_US)
    assert hosts["bandwidth_gb_per_s"] == pytest.approx(1024 / SLOW_US / 1e3, rel=0.3)
    assert [nbytes for nbytes, _ in found.between] == [1 << 10, 8 << 10]
    assert HostLinks.law(found.between, 1 << 20)[1] == pytest.approx(1024 / SLOW_US / 1e3, rel=0.3)


def test_a_message_that_waits_for_a_core_is_not_taken_for_a_slow_link():
    """Of 8 us for each KiB, as on 1 Gbit/s; one round of 8 KiB takes 20 ms more."""
    (found, *_), *_ = measured(((0,), (1,)), 8.0, {8 << 10: 20_000.0})
    assert HostLinks.law(found.between, 64 << 20)[1] == pytest.approx(0.128, rel=0.3)
    assert found.between[1][1] < 10_000.0
