"""Peer memory on GPUs: what each kernel takes in graph replays, over sizes, blocks of threads and chunks.

    python bench/gpu_peer_memory.py --ranks 2,4,8 --sizes 4K,1M,64M --out results.jsonl
    python bench/gpu_peer_memory.py --ranks 8 --sizes 64M --ways two_shot --blocks 8,16,24 --chunks 256,512

A graph of several calls is replayed on all ranks at once; a replay's time is that of the slowest rank,
divided by its calls. Every result is checked, and the bandwidth of a copy is measured in the same run: all
ranks copy at once. Where all ranks use one GPU, ``floor_us`` is what the memory traffic of two-shot would
take at that bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_common import need_gpu, replayed, versions
from report import list_of, write_json_lines

import flagcx as fc
from flagcx.algorithms import build
from flagcx.bootstrap.environment import host_name
from flagcx.cli.sizes import parse_nbytes
from flagcx.cli.start_ranks import count_gpus
from flagcx.dtypes import OPS, dtype_of
from flagcx.kernels.peer import PEER_MEMORY, PEER_PACKETS
from flagcx.transport.base import Call
from flagcx.transport.device import DeviceIdentity, identify_device
from flagcx.transport.peer_memory import connect
from flagcx.transport.stream_order import StreamOrder

WAYS = {
    "packets": ("one_shot", PEER_PACKETS, False),
    "two_shot_packets": ("two_shot", PEER_PACKETS, False),
    "one_shot": ("one_shot", PEER_MEMORY, False),
    "two_shot": ("two_shot", PEER_MEMORY, False),
    "in_place": ("two_shot", PEER_MEMORY, True),
}
COPY_NBYTES = 1 << 30


class Bench:
    """One rank's measurements."""

    def __init__(self, dtype: str, replays: int) -> None:
        import cupy

        self.cupy, self.comm, self.dtype, self.replays = cupy, fc.init(), dtype_of(dtype), replays
        self.device = cupy.cuda.runtime.getDevice()
        store = self.comm._store.scoped("bench/")
        own = identify_device(cupy, self.device, host_name(), 0).pack()
        self.identities = [DeviceIdentity.unpack(i) for i in store.exchange("devices", own, 60)]
        self.order = StreamOrder(cupy, self.device, self.comm.rank)
        self.peers, self.reason = connect(cupy, store, self.identities, self.order, fc.Config(timeout_s=20.0))
        self.one_gpu = len({i.uuid for i in self.identities}) == 1
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def replayed(self, call: Callable[[], Any], calls: int) -> list[float]:
        """Seconds a call; see ``gpu_common.replayed``."""
        with self.stream:
            times = replayed(self.comm, self.cupy, self.stream, call, calls, self.replays)
        return [us * 1e-6 for us in times]

    def copy_bandwidth(self) -> float:
        """GB/s of bytes read and written when all ranks copy at once, summed over those of a GPU."""
        n = COPY_NBYTES // 8
        a, b = self.cupy.empty(n, "u1"), self.cupy.empty(n, "u1")
        a.fill(1)
        times = self.replayed(lambda: self.cupy.copyto(b, a), 4)
        sharing = self.comm.size if self.one_gpu else 1
        return 2 * n * sharing / statistics.median(times) / 1e9

    def plan(self, way: str, count: int, blocks: int, chunk: int) -> Any:
        """A compiled all-reduce, or None where it cannot be."""
        algorithm, protocol, _ = WAYS[way]
        schedule = build("allreduce", algorithm, self.comm.size)
        call = Call(schedule, self.comm.rank, count, self.dtype, OPS["sum"], True, protocol)
        try:
            return self.peers.compile(call, blocks, chunk)
        except fc.ArgumentError:
            return None

    def measure(self, way: str, nbytes: int, blocks: int, chunk: int, copy: float) -> dict[str, Any] | None:
        """One row; None where the way does not carry the size."""
        cupy, size = self.cupy, self.comm.size
        count = nbytes // self.dtype.numpy.itemsize
        plan = self.plan(way, count, blocks, chunk)
        if plan is None or (WAYS[way][1] == PEER_PACKETS and plan.kernel == "chunks"):
            return None
        make = self.peers.segments.empty if WAYS[way][2] else cupy.empty
        x = make(count, self.dtype.numpy)
        wrong = self._check(plan, x)
        x.fill(0)
        cupy.cuda.Device().synchronize()
        calls = 20 if nbytes <= 4 << 20 else 5 if nbytes <= 256 << 20 else 2
        times = sorted(self.replayed(lambda: plan.run(x, x), calls))
        self.peers.check()
        quartiles = statistics.quantiles(times, n=4)
        floor = (3 if WAYS[way][2] else 5) + 1 / size
        row = {
            "ranks": size, "gpus": len({i.uuid for i in self.identities}), "nbytes": nbytes, "way": way,
            "dtype": self.dtype.name, "blocks": plan.grid.blocks, "chunk": plan.grid.chunk,
            "steps": plan.grid.steps, "kernel": plan.kernel, "time_us": round(quartiles[1] * 1e6, 2),
            "quartiles_us": [round(q * 1e6, 2) for q in (quartiles[0], quartiles[2])],
            "least_us": round(times[0] * 1e6, 2), "calls": calls, "replays": self.replays, "wrong": wrong,
            "copy_gb_per_s": round(copy, 1),
        }  # fmt: skip
        if self.one_gpu:
            row["floor_us"] = round(floor * size * nbytes / copy / 1e3, 2)
            row["of_floor"] = round(row["floor_us"] / row["time_us"], 3)
        return row

    def _check(self, plan: Any, x: Any) -> int:
        """Wrong elements of a call on data that differs in every (rank, index); sums are exact."""
        cupy, size = self.cupy, self.comm.size
        index = cupy.arange(x.size, dtype=cupy.int64)
        x[...] = (index * 7 % 1021 + self.comm.rank).astype(self.dtype.numpy)
        cupy.cuda.Device().synchronize()
        with self.stream:
            plan.run(x, x)
        self.stream.synchronize()
        self.peers.check()
        want = (size * (index * 7 % 1021) + size * (size - 1) // 2).astype(self.dtype.numpy)
        return int(cupy.count_nonzero(x != want))


def measure(
    sizes: list[int],
    ways: list[str],
    blocks: list[int],
    chunks: list[int],
    dtype: str,
    replays: int,
    until: float,
) -> list[dict[str, Any]]:
    """What rank 0 found; runs on every rank."""
    bench = Bench(dtype, replays)
    if bench.peers is None:
        return [{"ranks": bench.comm.size, "unavailable": bench.reason}] if bench.comm.rank == 0 else []
    copy = bench.copy_bandwidth()
    rows = []
    for nbytes in sizes:
        for way in ways:
            seen: set[tuple[int, int]] = set()
            for block in blocks:
                for chunk in chunks:
                    late = bench.comm.allgather_object(time.time() > until)[0]
                    row = None if late else bench.measure(way, nbytes, block, chunk, copy)
                    if row is None or (row["blocks"], row["chunk"]) in seen:
                        continue
                    seen.add((row["blocks"], row["chunk"]))
                    rows.append(row)
                    if bench.comm.rank == 0:
                        print(json.dumps(row), flush=True)
    bench.peers.close()
    return rows if bench.comm.rank == 0 else []


def main() -> None:
    """Measures and prints JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = list_of(int)
    parser.add_argument("--ranks", type=numbers, default="2,4,8")
    parser.add_argument("--sizes", type=list_of(parse_nbytes), default="4K,64K,1M,4M,16M,64M,256M")
    parser.add_argument("--ways", type=list_of(str), default=",".join(WAYS))
    parser.add_argument("--blocks", type=numbers, default="0", help="blocks of threads; 0 for the rule's")
    parser.add_argument("--chunks", type=numbers, default="0", help="packs of a chunk; 0 for the rule's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1e6, help="when to stop")
    parser.add_argument("--own-gpu", action="store_true", help="one rank on each GPU")
    parser.add_argument("--out", type=Path, help="file for JSON lines")
    arguments = parser.parse_args()
    need_gpu()
    until = time.time() + arguments.seconds
    header = {"command": " ".join(sys.argv), **versions()}
    for ranks in arguments.ranks:
        if arguments.own_gpu and ranks > count_gpus():
            print(f"{ranks} ranks are left out: there are {count_gpus()} GPUs")
            continue
        given = arguments
        args = (given.sizes, given.ways, given.blocks, given.chunks, given.dtype, given.replays, until)
        share = not arguments.own_gpu
        rows = fc.launch(measure, ranks=ranks, args=args, timeout_s=500, share_gpu=share)[0]
        if arguments.out:
            write_json_lines(arguments.out, ({**row, "run": header} for row in rows))


if __name__ == "__main__":
    main()
