"""Test hosts: network namespaces of this machine, each with a host name of its own, joined by a switch.

::

    host a            switch            host b          Each cable is a pair of virtual devices; ``tc`` limits
    fx1av <---------> fx1ap fx1bp <---------> fx1bv     its rate in each direction. Where the kernel cannot
                         (bridge)                       delay packets (netem), a thread carries them instead.

The hosts share one kernel: its boot id, /dev/shm and processes, so that what tells hosts apart must be the
host name. Needs root, and the programs ip and tc. Nothing of the hosts is left behind: what a killed process
could not remove, the next that makes hosts does.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import re
import select
import shlex
import shutil
import struct
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.213.7"
AGENT = """#!/bin/sh
# In place of ssh: drops the options, takes the host's name, runs the rest inside that host.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' "$host" "$*"
"""
_TUN_SET, _TUN, _NO_HEAD = 0x400454CA, 0x0001, 0x1000
_LARGEST_PACKET_NBYTES = 60_000
_OWNED = re.compile(r"fx(\d+)([a-z]|-switch)")
"""The name of a host, or a switch, with its maker's process."""
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def missing() -> str:
    """Why no test hosts can be made here; empty where they can."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return "test hosts need root, and the programs ip and tc"
    return ""


def address_of(number: int) -> str:
    """The address of the host with this number."""
    return f"{NETWORK}.{number + 1}"


@contextlib.contextmanager
def hosts(count: int, rate: str = "", delay: str = "") -> Iterator[tuple[str, ...]]:
    """Makes hosts that are joined by a network.

    Args:
        count: Number of hosts.
        rate: Of each host's link in each direction, in tc's words: "1gbit"; no limit if empty.
        delay: From one host to another, such as "50us" or "1ms"; none if empty.

    Yields:
        Their names. The device of a host is called as the host with a "v" after it.

    Raises:
        ValueError: ``delay`` is no time.
    """
    seconds = _seconds(delay)
    names = tuple(f"fx{os.getpid()}{chr(ord('a') + number)}" for number in range(count))
    switch = f"fx{os.getpid()}-switch"
    etc = [Path("/etc/netns") / name for name in names]
    remove_orphans()
    with contextlib.ExitStack() as stack:
        for name, folder in zip(names, etc, strict=True):
            stack.callback(_remove, name, folder)
            _do(f"ip netns add {name}")
            folder.mkdir(parents=True, exist_ok=True)
            known = "".join(f"{address_of(n)} {other}\n" for n, other in enumerate(names))
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        if seconds:
            relay = stack.enter_context(Relay(names, seconds))
            relay.start()
        else:
            stack.callback(_remove, switch, None)
            _join(switch, names, rate)
        for number, name in enumerate(names):
            _do(f"ip -n {name} addr add {address_of(number)}/24 dev {name}v")
            _do(f"ip -n {name} link set {name}v up")
            _do(f"ip -n {name} link set lo up")
            _limit(name, f"{name}v", rate)
        yield names


def remove_orphans() -> None:
    """Removes the hosts, and switches, of processes that have ended without doing so."""
    for place in (Path("/run/netns"), Path("/etc/netns")):
        for path in place.glob("fx*") if place.is_dir() else ():
            owner = _OWNED.fullmatch(path.name)
            if owner and not Path("/proc", owner[1]).exists():
                _remove(path.name, Path("/etc/netns") / path.name)


def _seconds(delay: str) -> float:
    """Reads ``delay``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", delay)
    if found is None and delay:
        raise ValueError(f"delay={delay!r} is no time; expected a number with a unit, such as 50us or 1ms")
    return float(found[1]) * _UNITS_S[found[2]] if found else 0.0


def _join(switch: str, names: Sequence[str], rate: str) -> None:
    """Joins hosts by cables to a switch, which is a host of its own."""
    _do(f"ip netns add {switch}")
    _do(f"ip -n {switch} link add bridge type bridge")
    _do(f"ip -n {switch} link set bridge up")
    for name in names:
        _do(f"ip link add {name}v netns {name} type veth peer name {name}p netns {switch}")
        _do(f"ip -n {switch} link set {name}p master bridge up")
        if len(names) > 2:  # several hosts may send to one; two have each other's limit
            _limit(switch, f"{name}p", rate)


def _limit(name: str, device: str, rate: str) -> None:
    if rate:
        _do(f"ip netns exec {name} tc qdisc add dev {device} root tbf rate {rate} burst 256kb latency 50ms")


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _remove(name: str, folder: Path | None) -> None:
    subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / "hosts").unlink()
            folder.rmdir()


@dataclass(frozen=True, slots=True, order=True)
class _Packet:
    due: float
    number: int
    target: int
    content: bytes


class Relay(threading.Thread):
    """Carries the packets of hosts that no cable joins, and keeps each for a while. A context.

    Args:
        names: The hosts. Each gets a device.
        delay_s: How long a packet is kept, in seconds. The thread adds some tens of microseconds.
    """

    def __init__(self, names: Sequence[str], delay_s: float) -> None:
        super().__init__(name="relay", daemon=True)
        self._delay_s, self._ends = delay_s, os.pipe()
        self._devices = [_device(name) for name in names]

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ends[1])
        self.join()
        for number in (self._ends[0], *self._devices):
            os.close(number)

    def run(self) -> None:
        """Carries packets until the context ends."""
        kept: list[_Packet] = []
        end, number = self._ends[0], 0
        while True:
            wait_s = max(kept[0].due - time.monotonic(), 0.0) if kept else None
            ready, _, _ = select.select([end, *self._devices], [], [], wait_s)
            if end in ready:
                return
            now = time.monotonic()
            for device in ready:
                content = os.read(device, 1 << 16)
                if content[0] >> 4 == 4 and 0 < (last := content[19]) <= len(self._devices):
                    number += 1
                    heapq.heappush(kept, _Packet(now + self._delay_s, number, last - 1, content))
            while kept and kept[0].due <= now:
                packet = heapq.heappop(kept)
                with contextlib.suppress(OSError):  # the host's device is down
                    os.write(self._devices[packet.target], packet.content)


def _device(host: str) -> int:
    """Makes the device of a host, whose packets this process reads and writes."""
    number = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(number, _TUN_SET, struct.pack("16sH22x", f"{host}v".encode(), _TUN | _NO_HEAD))
    _do(f"ip link set {host}v mtu {_LARGEST_PACKET_NBYTES} netns {host}")
    return number


def inside(host: str, command: Sequence[str]) -> list[str]:
    """The command that runs another one inside a host."""
    return [
        "ip",
        "netns",
        "exec",
        host,
        "unshare",
        "--uts",
        "sh",
        "-c",
        'hostname "$0"; exec "$@"',
        host,
        *command,
    ]


def places(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The host and the place on it of each rank, of so many on each host.

    Example:
        >>> places([1, 2])
        [(0, 0), (1, 0), (1, 1)]
    """
    return [(host, place) for host, count in enumerate(counts) for place in range(count)]


def start_ranks(
    names: Sequence[str],
    counts: Sequence[int],
    command: Sequence[str],
    environ: Mapping[str, str],
    port: int = 29500,
) -> list[subprocess.Popen[str]]:
    """Starts ranks with torchrun's variables, which say where rank 0 is.

    Args:
        names: The hosts.
        counts: Ranks on each.
        command: What each rank runs.
        environ: Variables for all of them; ``FLAGCX_STORE_KEY`` is one that ranks of several hosts need.
        port: The master's.

    Returns:
        Their processes; standard output and error are one stream.
    """
    ranks = places(counts)
    base = {"MASTER_ADDR": address_of(0), "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{len(ranks)}"}
    return [
        subprocess.Popen(
            inside(names[host], command),
            env={
                **environ, **base, "RANK": f"{rank}", "LOCAL_RANK": f"{place}",
                "LOCAL_WORLD_SIZE": f"{counts[host]}",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, (host, place) in enumerate(ranks)
    ]  # fmt: skip


def mpirun_line(
    names: Sequence[str],
    counts: Sequence[int],
    command: Sequence[str],
    folder: Path,
    options: Sequence[str] = (),
) -> list[str]:
    """The command by which Open MPI starts ranks on hosts, from inside the first.

    Args:
        names: The hosts.
        counts: Ranks on each.
        command: What each rank runs.
        folder: For a script that stands in place of ssh.
        options: More options of mpirun.
    """
    line = [
        str(Path(sysconfig.get_path("scripts")) / "mpirun"), "--allow-run-as-root", *options,
        "--prtemca", "plm_ssh_agent", str(write_agent(folder)), "--prtemca", "plm_ssh_no_tree_spawn", "1",
        "--host", ",".join(f"{host}:{count}" for host, count in zip(names, counts, strict=True)),
        "--map-by", "slot:OVERSUBSCRIBE", "--mca", "btl_tcp_if_include", f"{NETWORK}.0/24",
        "-n", str(sum(counts)), "-x", "PYTHONPATH", *command,
    ]  # fmt: skip
    return inside(names[0], ["sh", "-c", f"exec {shlex.join(line)}"])


def mpiexec_line(
    names: Sequence[str], counts: Sequence[int], command: Sequence[str], folder: Path
) -> list[str]:
    """The command by which MPICH starts ranks on hosts; see ``mpirun_line``."""
    line = [
        str(Path(sysconfig.get_path("scripts")) / "mpiexec.hydra"),
        "-launcher", "ssh", "-launcher-exec", str(write_agent(folder)), "-iface", f"{names[0]}v",
        "-hosts", ",".join(f"{host}:{count}" for host, count in zip(names, counts, strict=True)),
        "-n", str(sum(counts)), *command,
    ]  # fmt: skip
    return inside(names[0], ["sh", "-c", f"exec {shlex.join(line)}"])


def write_agent(folder: Path) -> Path:
    """Writes the script that stands in place of ssh, and returns where it is."""
    agent = folder / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    return agent
