"""Small random machines, and slow ways to know the right answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import networkx

from flagcx.topology import Device, DeviceKind, Link, LinkKind, Topology
from flagcx.topology.loads import PairLoads, pair_loads
from flagcx.topology.routes import Routes


def random_machine(seed: int, gpus: int, *, mesh: float = 0.4) -> Topology:
    """GPUs on one or two sockets, some behind switches, some joined by NVLink."""
    rng = random.Random(seed)
    sockets = rng.choice((1, 2, 2))
    devices = [Device(f"cpu{n}", DeviceKind.CPU, n) for n in range(sockets)]
    links = []
    if sockets == 2:
        links.append(Link("cpu0", "cpu1", LinkKind.SOCKET, rng.choice((6.0, 10.0, 32.0)), 0.5))
    for number in range(gpus):
        cpu = f"cpu{number * sockets // gpus}"
        devices.append(Device(f"gpu{number}", DeviceKind.GPU, number))
        switch = f"switch{number // 2}"
        if rng.random() < 0.5:
            if all(device.id != switch for device in devices):
                devices.append(Device(switch, DeviceKind.PCIE_SWITCH, number // 2))
                links.append(Link(switch, cpu, LinkKind.PCIE, rng.choice((12.0, 24.0)), 0.5))
            links.append(Link(f"gpu{number}", switch, LinkKind.PCIE, 24.0, 0.5))
        else:
            links.append(Link(f"gpu{number}", cpu, LinkKind.PCIE, rng.choice((12.0, 24.0)), 0.5))
    for a, b in combinations(range(gpus), 2):
        if rng.random() < mesh:
            count = rng.choice((1, 2, 4))
            links.append(Link(f"gpu{a}", f"gpu{b}", LinkKind.NVLINK, 20.0 * count, 0.6, count))
    return Topology(devices, links, name=f"random-{seed}")


def random_links(seed: int, terminals: int, others: int) -> tuple[dict[frozenset[str], float], list[str]]:
    """A connected network of terminals and forwarding nodes with whole-numbered bandwidths."""
    rng = random.Random(seed)
    names = [f"t{n}" for n in range(terminals)] + [f"s{n}" for n in range(others)]
    links = {
        frozenset(pair): float(rng.randint(1, 9)) for pair in combinations(names, 2) if rng.random() < 0.45
    }
    for a, b in pairwise(names):
        links.setdefault(frozenset((a, b)), float(rng.randint(1, 9)))
    return links, names[:terminals]


def partitions(items: list) -> Iterator[list[list]]:
    """Every way to cut a list into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for place in range(len(smaller)):
            yield [*smaller[:place], [first, *smaller[place]], *smaller[place + 1 :]]


def min_cut(links: dict[frozenset[str], float], inside: list[str], outside: list[str]) -> float:
    """By networkx: the least bandwidth between two groups of terminals."""
    graph = networkx.DiGraph()
    for ends, bandwidth in links.items():
        a, b = sorted(ends)
        graph.add_edge(a, b, capacity=bandwidth)
        graph.add_edge(b, a, capacity=bandwidth)
    for node in inside:
        graph.add_edge("source", node)
    for node in outside:
        graph.add_edge(node, "sink")
    return networkx.maximum_flow_value(graph, "source", "sink")


def slow_bound(links: dict[frozenset[str], float], terminals: list[str]) -> float:
    """The least over all partitions of sum of cuts / (2 (k - 1)), one by one."""
    best = float("inf")
    for groups in partitions(terminals):
        if len(groups) > 1:
            cuts = [min_cut(links, group, [t for t in terminals if t not in group]) for group in groups]
            best = min(best, sum(cuts) / (2 * (len(groups) - 1)))
    return best


def pair_loads_of(machine: Topology) -> PairLoads:
    """The loads between all GPUs of a machine."""
    return pair_loads(machine, machine["gpus"], Routes(machine))
