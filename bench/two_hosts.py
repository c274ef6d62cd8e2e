"""All-reduce between hosts on a slow link: flagcx over UCX, or over MPI beside Open MPI's own Allreduce.

    sudo python bench/two_hosts.py --rate 1gbit --ranks 2,2 --sizes 4K,1M,64M

The hosts are those of ``hosts.py``, as many as ``--ranks`` has numbers. Needs root, and the programs ip and
tc. With ``--run COMMAND`` the ranks run that instead of the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hosts import hosts, missing, mpirun_line, start_ranks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def mpirun(names: Sequence[str], counts: Sequence[int], command: list[str], timeout_s: float) -> str:
    """Starts ranks on the hosts by Open MPI, from inside the first, and returns what they print."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            mpirun_line(names, counts, command, Path(folder)),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=timeout_s,
        ).stdout


def torchrun(names: Sequence[str], counts: Sequence[int], command: list[str], timeout_s: float) -> str:
    """Starts ranks on the hosts with torchrun's variables, and returns what they print."""
    own = {"PYTHONPATH": str(ROOT), "FLAGCX_STORE_KEY": secrets.token_hex(16), "UCX_TLS": "tcp,self"}
    ranks = start_ranks(names, counts, command, {**os.environ, **own})
    late = threading.Timer(timeout_s, lambda: [rank.kill() for rank in ranks])
    late.start()
    try:
        return "".join([rank.communicate()[0] for rank in ranks])
    finally:
        late.cancel()
        for rank in ranks:
            rank.kill()


def measure(sizes: list[int], rounds: int, codecs: list[str]) -> None:
    """Runs on every rank; rank 0 prints JSON lines."""
    import numpy as np

    import flagcx as fc

    comm = fc.init()
    for nbytes in sizes:
        x, want = _data(comm, nbytes // 4)
        y = np.empty_like(x)
        for name, call in _ways(comm, x, y, codecs).items():
            times = []
            for n in range(rounds + 1):
                comm.barrier()
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e6)
                error = float(np.linalg.norm(y - want) / max(np.linalg.norm(want), 1e-30))
                if n == 1 and max(comm.allgather_object(times[0])) > 2e6:
                    break  # Seconds a call: two will do.
            times = comm.allgather_object(times[1:])
            each = [max(column) for column in zip(*times, strict=True)]
            row = {
                "collective": "allreduce", "library": name, "over": comm._host.transport.name,
                "ranks": comm.size, "hosts": len(set(comm.hosts)),
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


def _ways(comm: Any, x: Any, y: Any, codecs: list[str]) -> dict[str, Callable[[], Any]]:
    """For each library and codec: a call that adds up ``x`` of all ranks into ``y``."""
    theirs: dict[str, Callable[[], Any]] = {}
    if comm._host.transport.name == "mpi":
        from mpi4py import MPI

        theirs["Open MPI"] = lambda: MPI.COMM_WORLD.Allreduce(x, y)
    coded = {
        f"flagcx {codec}": lambda codec=codec: comm.allreduce(x, out=y, compression=codec) for codec in codecs
    }
    return {
        "flagcx": lambda: comm.allreduce(x, out=y),
        "flagcx ring": lambda: comm.allreduce(x, out=y, algorithm="ring"),
        **coded,
        **theirs,
    }


def main() -> None:
    """Makes the hosts, runs the ranks, and prints a table."""
    from flagcx.cli.sizes import parse_nbytes

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay", default="", help="from host to host, such as 200us")
    parser.add_argument(
        "--start", choices=("mpirun", "torchrun"), default="mpirun", help="torchrun: over UCX"
    )
    parser.add_argument("--ranks", default="2,2", help="on each host, by commas")
    parser.add_argument("--sizes", default="4K,64K,1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codecs", default="", help="also all-reduces compressed by these, by commas")
    parser.add_argument("--run", default="", help="a command for the ranks, in place of the benchmark")
    parser.add_argument("--out", default="", help="file that JSON lines are added to")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        codecs = [name for name in given.codecs.split(",") if name]
        measure([parse_nbytes(s) for s in given.sizes.split(",")], given.rounds, codecs)
        return
    command = shlex.split(given.run) or [
        sys.executable, str(Path(__file__).resolve()), "--inside", "--sizes", given.sizes,
        "--rounds", str(given.rounds), "--codecs", given.codecs,
    ]  # fmt: skip
    if missing():
        parser.error(missing())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    counts = [int(count) for count in given.ranks.split(",")]
    with hosts(len(counts), given.rate, given.delay) as names:
        start = mpirun if given.start == "mpirun" else torchrun
        printed = start(names, counts, command, timeout_s=600)
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
