"""All-reduce between two hosts on a slow link: flagcx over MPI beside Open MPI's own Allreduce.

    sudo python bench/two_hosts.py --rate 1gbit --ranks-per-host 2 --sizes 4K,1M,64M

The hosts are network namespaces of this machine, joined by a virtual cable whose rate ``tc`` limits; each has
a host name of its own. Needs root, and the programs ip and tc. Nothing of them is left behind. With ``--run
COMMAND`` the ranks run that instead of the benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NETWORK = "10.213.7"
AGENT = """#!/bin/sh
# In place of ssh: drops the options, takes the host's name, runs the rest inside that host.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' "$host" "$*"
"""


@contextlib.contextmanager
def two_hosts(rate: str, delay: str = "") -> Iterator[tuple[str, str]]:
    """Makes two hosts that are joined by a link.

    Args:
        rate: Of the link in each direction, in tc's words: "1gbit".
        delay: Of the link in each direction, in tc's words: "50us"; none if empty.

    Yields:
        The names of the hosts.
    """
    names = tuple(f"fx{os.getpid()}{end}" for end in "ab")
    etc = [Path("/etc/netns") / name for name in names]
    try:
        for name in names:
            _do(f"ip netns add {name}")
        _do(f"ip link add {names[0]}v netns {names[0]} type veth peer name {names[1]}v netns {names[1]}")
        for number, name in enumerate(names):
            _do(f"ip -n {name} addr add {NETWORK}.{number + 1}/24 dev {name}v")
            _do(f"ip -n {name} link set {name}v up")
            _do(f"ip -n {name} link set lo up")
            slow = (
                f" netem delay {delay} rate {rate}" if delay else f" tbf rate {rate} burst 256kb latency 50ms"
            )
            _do(f"ip netns exec {name} tc qdisc add dev {name}v root{slow}")
            etc[number].mkdir(parents=True, exist_ok=True)
            hosts = "".join(f"{NETWORK}.{n + 1} {other}\n" for n, other in enumerate(names))
            (etc[number] / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        yield names
    finally:
        for name, folder in zip(names, etc, strict=True):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            with contextlib.suppress(OSError):
                (folder / "hosts").unlink()
                folder.rmdir()


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True)


def mpirun(hosts: tuple[str, str], per_host: int, command: list[str], timeout_s: float) -> str:
    """Starts ranks on both hosts by Open MPI, from inside the first, and returns what they print."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            mpirun_line(hosts, per_host, command, Path(folder)),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=timeout_s,
        ).stdout


def mpirun_line(
    hosts: tuple[str, str], per_host: int, command: list[str], folder: Path, options: tuple[str, ...] = ()
) -> list[str]:
    """The command that starts ranks on both hosts, from inside the first.

    Args:
        hosts: Their names.
        per_host: Ranks on each.
        command: What each rank runs.
        folder: For a script that stands in place of ssh.
        options: More options of mpirun.
    """
    agent = folder / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    line = [
        str(Path(sysconfig.get_path("scripts")) / "mpirun"), "--allow-run-as-root", *options,
        "--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "plm_ssh_no_tree_spawn", "1",
        "--host", ",".join(f"{host}:{per_host}" for host in hosts),
        "--map-by", f"ppr:{per_host}:node:OVERSUBSCRIBE",
        "--mca", "btl_tcp_if_include", f"{NETWORK}.0/24", "-n", str(2 * per_host),
        "-x", "PYTHONPATH", *command,
    ]  # fmt: skip
    inside = f"hostname {hosts[0]}; exec {shlex.join(line)}"
    return ["ip", "netns", "exec", hosts[0], "unshare", "--uts", "sh", "-c", inside]


def measure(sizes: list[int], rounds: int, codecs: list[str]) -> None:
    """Runs on every rank; rank 0 prints JSON lines."""
    import numpy as np
    from mpi4py import MPI

    import flagcx as fc

    comm, world = fc.init(), MPI.COMM_WORLD
    for nbytes in sizes:
        x, want = _data(comm, nbytes // 4)
        y = np.empty_like(x)
        for name, call in _ways(comm, world, x, y, codecs).items():
            times = []
            for n in range(rounds + 1):
                world.Barrier()
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e6)
                error = float(np.linalg.norm(y - want) / max(np.linalg.norm(want), 1e-30))
                if n == 1 and world.allreduce(times[0], MPI.MAX) > 2e6:
                    break  # Seconds a call: two will do.
            times = world.allgather(times[1:])
            each = [max(column) for column in zip(*times, strict=True)]
            row = {
                "collective": "allreduce", "library": name, "ranks": comm.size, "hosts": len(set(comm.hosts)),
                "nbytes": nbytes, "time_us": round(statistics.median(each), 1),
                "spread_us": [round(min(each), 1), round(max(each), 1)], "error": error,
            }  # fmt: skip
            if comm.rank == 0:
                print(json.dumps(row), flush=True)


def _data(comm: Any, count: int) -> tuple[Any, Any]:
    """This rank's numbers, small whole ones in disorder, and the sum of all ranks'."""
    import numpy as np

    each = [
        np.random.default_rng(q).integers(-1000, 1000, count).astype(np.float32) for q in range(comm.size)
    ]
    return each[comm.rank], sum(each)


def _ways(comm: Any, world: Any, x: Any, y: Any, codecs: list[str]) -> dict[str, Callable[[], Any]]:
    """For each library and codec: a call that adds up ``x`` of all ranks into ``y``."""
    coded = {
        f"flagcx {codec}": lambda codec=codec: comm.allreduce(x, out=y, compression=codec) for codec in codecs
    }
    return {
        "flagcx": lambda: comm.allreduce(x, out=y),
        "flagcx ring": lambda: comm.allreduce(x, out=y, algorithm="ring"),
        **coded,
        "Open MPI": lambda: world.Allreduce(x, y),
    }


def main() -> None:
    """Makes the hosts, runs the ranks, and prints a table."""
    from gpu_allreduce import parse_size

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay", default="")
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--sizes", default="4K,64K,1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codecs", default="", help="also all-reduces compressed by these, by commas")
    parser.add_argument("--run", default="", help="a command for the ranks, in place of the benchmark")
    parser.add_argument("--out", default="", help="file that JSON lines are added to")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        codecs = [name for name in given.codecs.split(",") if name]
        measure([parse_size(s) for s in given.sizes.split(",")], given.rounds, codecs)
        return
    command = shlex.split(given.run) or [
        sys.executable, str(Path(__file__).resolve()), "--inside", "--sizes", given.sizes,
        "--rounds", str(given.rounds), "--codecs", given.codecs,
    ]  # fmt: skip
    with two_hosts(given.rate, given.delay) as hosts:
        printed = mpirun(hosts, given.ranks_per_host, command, timeout_s=600)
    if given.run:
        print(printed, end="")
        return
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    header = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "rate": given.rate}
    if given.out:
        with open(given.out, "a") as file:
            file.writelines(json.dumps({**row, "run": header}) + "\n" for row in rows)
    print(f"{'bytes':>10}  {'library':12} {'time us':>12} {'error':>9}")
    for row in rows:
        print(f"{row['nbytes']:>10}  {row['library']:12} {row['time_us']:>12.1f} {row['error']:>9.2g}")


if __name__ == "__main__":
    main()
