"""Joins the topologies that several hosts detected of themselves to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flagcx.errors import TopologyError
from flagcx.topology import speeds
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind
from flagcx.topology.topology import Topology


def join(machines: Sequence[Topology]) -> Topology:
    """Puts the topologies of several hosts together, one host each, joined by one switch.

    No host can see the network between them, so one switch that never blocks is assumed, and the notes
    say so. Each NIC is joined to it at its speed.

    Args:
        machines: One topology for each host, of one host each, in the order of the hosts.

    Returns:
        One topology. GPUs are numbered on from host to host, in the order of their numbers there.

    Raises:
        TopologyError: There is no machine, or one has several hosts itself.

    Example:
        >>> from flagcx.topology import preset
        >>> join([preset("dgx-a100"), preset("dgx-1v")])
        <Topology 2 hosts: 2 hosts, 16 GPUs, 6 NVSwitches, 10 NUMA nodes, 12 NICs>
    """
    if not machines:
        raise TopologyError("no machine to join; give one topology for each host")
    for machine in machines:
        if len(machine.hosts) > 1:
            raise TopologyError(
                f"{machine!r} has {len(machine.hosts)} hosts; join takes machines of one host each"
            )
    if len(machines) == 1:
        return machines[0]
    devices: list[Device] = []
    links: list[Link] = []
    notes: list[str] = []
    counts: Counter[DeviceKind] = Counter()
    for host, machine in enumerate(machines):
        names = Copies(machine).add(host, devices, links, counts)
        notes += [note for note in machine.notes if note not in notes]
        for nic in _outward(machine):
            speed = nic_speed(nic)
            rate, latency = speed or speeds.DEFAULT_NIC_GB_PER_S, speeds.LATENCY_US["network"]
            links.append(Link(names[nic.id], "network", LinkKind.NETWORK, rate, latency, 1, speed == 0))
    devices.append(Device("network", DeviceKind.NETWORK_SWITCH, 0, -1))
    notes.append("the network between the hosts cannot be seen; one switch that never blocks is assumed")
    return Topology(devices, links, name=f"{len(machines)} hosts", notes=notes)


class Copies:
    """Adds copies of a machine to the devices and links of a cluster.

    What all copies have in common is found once: a cluster may have 10,000 of them.

    Args:
        machine: One host, or one NVLink domain of several.
    """

    def __init__(self, machine: Topology) -> None:
        hosts = {old: number for number, old in enumerate(machine.hosts)}
        order = {gpu.id: number for number, gpu in enumerate(machine.gpus)}
        self._hosts = range(len(hosts))
        self._kinds = list(dict.fromkeys(device.kind for device in machine.devices()))
        self._counts = [0] * len(self._kinds)
        self._devices = []
        for device in machine.devices():
            code, index = self._kinds.index(device.kind), order.get(device.id, device.index)
            self._counts[code] = max(self._counts[code], index + 1)
            local = "" if device.kind is DeviceKind.GPU else device.id.rpartition("/")[2]
            at = hosts.get(device.host, -1)
            rest = device.name, device.pci_bus_id, device.attributes, device.ports
            self._devices.append((code, device.kind, index, at, local, *rest))
        place = {device.id: number for number, device in enumerate(machine.devices())}
        self._nics = [(nic.id, place[nic.id]) for nic in machine.devices(DeviceKind.NIC)]
        self._links = [
            (place[link.a], place[link.b], link.kind, link.bandwidth_gb_per_s, link.latency_us, link.count,
             link.assumed)
            for link in machine.links
        ]  # fmt: skip

    def add(
        self, host: int, devices: list[Device], links: list[Link], counts: Counter[DeviceKind]
    ) -> dict[str, str]:
        """Adds one copy.

        Args:
            host: Its number in the cluster, or that of the first of its hosts.
            devices: Takes its devices.
            links: Takes its links.
            counts: The first free index of each kind of device, from which its indices run on; moved on.

        Returns:
            New id by old id, of its NICs.
        """
        first = [counts[kind] for kind in self._kinds]
        prefixes = [f"host{host + number}/" if host + number else "" for number in self._hosts]
        prefixes.append(f"domain{host}/" if host else "")  # of what is in no host
        names = []
        for code, kind, own, at, local, name, bus_id, attributes, ports in self._devices:
            index = first[code] + own
            id = prefixes[at] + (local or f"gpu{index}")
            names.append(id)
            number = host + at if at >= 0 else -1
            devices.append(Device(id, kind, index, number, name, bus_id, attributes, ports))
        links += [
            Link(names[a], names[b], kind, bandwidth, latency, count, assumed)
            for a, b, kind, bandwidth, latency, count, assumed in self._links
        ]
        for kind, start, count in zip(self._kinds, first, self._counts, strict=True):
            counts[kind] = start + count
        return {nic: names[place] for nic, place in self._nics}


def nic_speed(nic: Device) -> float:
    """GB/s of all ports of a NIC in one direction; 0 where it is unknown."""
    return sum(port.speed_gb_per_s for port in nic.ports)


def _outward(machine: Topology) -> list[Device]:
    """The NICs that may lead to other hosts: those with a PCI place, or all where there is none of these."""
    nics = machine.devices(DeviceKind.NIC)
    return [nic for nic in nics if nic.pci_bus_id] or nics
