"""Clusters of one machine: so many hosts below a fat tree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from flagcx.errors import TopologyError
from flagcx.topology import speeds
from flagcx.topology.graph import Device, DeviceKind, Link, LinkKind, Port
from flagcx.topology.join import Copies, nic_speed
from flagcx.topology.topology import Topology


def cluster(
    machine: Topology,
    hosts: int,
    nics: int | None = None,
    *,
    hosts_per_leaf: int = 32,
    oversubscription: float = 1.0,
    network_gb_per_s: float | None = None,
) -> Topology:
    """So many of a machine, joined rail by rail under a fat tree.

    NIC i of each of ``hosts_per_leaf`` hosts hangs on one leaf switch (the rail's); all leaves hang below
    one spine, which stands for the spine layer as a whole. GPU numbers run on from host to host. Of a machine
    of several trays (an NVL72), NIC i of every tray is on rail i.

    Args:
        machine: One host, or one NVLink domain.
        hosts: How many.
        nics: How many NICs of each host are joined (its fastest first); all with a known speed by default.
        hosts_per_leaf: Hosts below one set of leaf switches.
        oversubscription: Bandwidth below a leaf over bandwidth above it; 1 is non-blocking.
        network_gb_per_s: GB/s of each NIC in one direction, in place of what the machine says of them; a
            machine without NICs gets one. The notes say so.

    Raises:
        TopologyError: An argument is out of range, or the machine has too few NICs of known speed.

    Example:
        >>> from flagcx.topology import preset
        >>> cluster(preset("dgx-h100"), hosts=4)
        <Topology dgx-h100 x 4: 4 hosts, 32 GPUs, 16 NVSwitches, 8 NUMA nodes, 32 NICs>
    """
    _check_cluster(machine, hosts, hosts_per_leaf, oversubscription, network_gb_per_s)
    if network_gb_per_s is not None:
        machine = _with_network(machine, network_gb_per_s)
    rails = _rails(machine, hosts, nics)
    devices: list[Device] = []
    links: list[Link] = []
    counts: Counter[DeviceKind] = Counter()
    below: Counter[str] = Counter()
    speed: dict[str, float] = {}

    def wire(a: str, b: str, gb_per_s: float) -> None:
        links.append(Link(a, b, LinkKind.NETWORK, gb_per_s, speeds.LATENCY_US["network"]))

    copies = Copies(machine)
    for host in range(hosts):
        names = copies.add(host * len(machine.hosts), devices, links, counts)
        for nic, rail in rails:
            leaf = f"leaf{host // hosts_per_leaf}.{rail}"
            wire(names[nic.id], leaf, nic_speed(nic))
            below[leaf] += 1
            speed[leaf] = nic_speed(nic)
    switches = list(below)
    if len(switches) > 1:
        for leaf in list(switches):
            wire(leaf, "spine", below[leaf] * speed[leaf] / oversubscription)
        switches.append("spine")
    devices += [Device(id, DeviceKind.NETWORK_SWITCH, index, -1) for index, id in enumerate(switches)]
    return Topology(devices, links, name=f"{machine.name} x {hosts}", notes=machine.notes)


def _rails(machine: Topology, hosts: int, nics: int | None) -> list[tuple[Device, int]]:
    """The NICs of a machine that are joined, each with its rail: its place among those of its tray."""
    if hosts == 1:
        return []
    known = [nic for nic in machine.devices(DeviceKind.NIC) if nic_speed(nic) > 0]
    known = [nic for nic in known if nic.pci_bus_id] or [nic for nic in known if nic.id == _ADDED]
    wanted = len(known) if nics is None else nics
    if not 1 <= wanted <= len(known):
        raise TopologyError(
            f"{machine!r} has {len(known)} NICs with a PCI place and a known speed; {wanted} were asked "
            f"for to join {hosts} hosts; expected 1 to {len(known)}, or network_gb_per_s "
            "(--network-gb-per-s on the command line) for the speed of each"
        )
    fastest = sorted(known, key=lambda nic: (-nic_speed(nic), nic.index))[:wanted]
    count: Counter[int] = Counter()
    rails = []
    for nic in sorted(fastest, key=lambda nic: nic.index):
        rails.append((nic, count[nic.host]))
        count[nic.host] += 1
    return rails


_ADDED = "network"


def _with_network(machine: Topology, gb_per_s: float) -> Topology:
    """The machine with NICs of that speed; with one, near every NUMA node, where it has none."""
    devices = [
        replace(device, ports=(Port(device.name, gb_per_s),)) if device.kind is DeviceKind.NIC else device
        for device in machine.devices()
    ]
    links = list(machine.links)
    note = f"each NIC is taken to have {gb_per_s:g} GB/s each way, as was asked for"
    nics = [device for device in devices if device.kind is DeviceKind.NIC and device.pci_bus_id]
    if not nics:
        for cpu in machine.devices(DeviceKind.CPU, host=machine.hosts[0]):
            links.append(
                Link(
                    cpu.id, _ADDED, LinkKind.PCIE, speeds.UNBOUND_GB_PER_S, speeds.LATENCY_US["pcie"], 1, True
                )
            )
        index = len(machine.devices(DeviceKind.NIC))
        devices.append(Device(_ADDED, DeviceKind.NIC, index, name=_ADDED, ports=(Port(_ADDED, gb_per_s),)))
        note = f"the machine names no NIC; each host is taken to have one of {gb_per_s:g} GB/s each way"
    return Topology(devices, links, name=machine.name, notes=[*machine.notes, note])


def _check_cluster(
    machine: Topology, hosts: int, per_leaf: int, oversubscription: float, network_gb_per_s: float | None
) -> None:
    if machine.devices(DeviceKind.NETWORK_SWITCH):
        raise TopologyError(
            f"a cluster is built of one machine; got {machine!r}, which has {len(machine.hosts)} hosts"
        )
    if not 1 <= hosts <= 1 << 16:
        raise TopologyError(f"hosts is {hosts!r}; expected 1 to {1 << 16}")
    if per_leaf < 1 or not oversubscription > 0:
        raise TopologyError(
            f"hosts_per_leaf is {per_leaf!r} and oversubscription {oversubscription!r}; both must be above 0"
        )
    if network_gb_per_s is not None and not 0 < network_gb_per_s < 1e6:
        raise TopologyError(f"network_gb_per_s is {network_gb_per_s!r}; expected a speed in GB/s above 0")
    indices = [gpu.index for gpu in machine.gpus]
    if indices != list(range(len(indices))):
        raise TopologyError(f"a cluster's machine needs GPUs numbered 0 to n-1; got {indices}")
