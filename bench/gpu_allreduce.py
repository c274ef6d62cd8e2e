"""All-reduce on GPU arrays: flagcx beside cupyx.distributed, torch.distributed and the bare NCCL call.

    python bench/gpu_allreduce.py --ranks 2,4,8 --sizes 4K,1M,64M --out results.jsonl

All libraries run in the same processes on the same arrays, one after the other at each size, and every
result is checked. Two times are taken: the *host* time of a call, until it has been enqueued, in bursts
short enough not to fill the queue; and the time of a call with the GPU's work, in a row of calls. Ranks
share one GPU where there are fewer GPUs than ranks, and the record says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from needs import need_gpu
from report import parse_size

import flagcx as fc
from flagcx.config import environment

OURS = ("native", "one_shot", "two_shot", "ring", "double_binary_tree")
BURST, BURSTS = 10, 40


Maker = Callable[[Any], Callable[[], Any]]


def subjects(comm: Any, ports: tuple[int, int], wanted: list[str]) -> dict[str, Maker]:
    """For each library: (array) -> a call that adds it up in place over all ranks."""
    import cupy
    from cupy.cuda import nccl

    made: dict[str, Maker] = {}
    without_peers = comm.split(0)
    without_peers.config = replace(comm.config, peer_memory=False)
    for name in OURS:
        made[f"flagcx {name}"] = lambda x, name=name: lambda: comm.allreduce(x, algorithm=name)
    for name in ("one_shot", "two_shot"):
        made[f"flagcx {name} over NCCL"] = lambda x, name=name: (
            lambda: without_peers.allreduce(x, algorithm=name)
        )
    comm.allreduce(cupy.ones(1))
    bare = comm._device.transport._communicator._comm
    stream = cupy.cuda.get_current_stream().ptr

    def direct(x: Any) -> Callable[[], Any]:
        at, count = x.data.ptr, x.size
        return lambda: bare.allReduce(at, at, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

    made["NcclCommunicator.allReduce"] = direct
    with contextlib.suppress(ImportError):
        made["cupyx.distributed"] = _cupyx(comm, ports[0])
    with contextlib.suppress(ImportError):
        made["torch.distributed"] = _torch(comm, ports[1])
    return {name: make for name, make in made.items() if not wanted or any(w in name for w in wanted)}


def _cupyx(comm: Any, port: int) -> Maker:
    from cupyx import distributed

    group = distributed.init_process_group(comm.size, comm.rank, backend="nccl", host="127.0.0.1", port=port)
    return lambda x: lambda: group.all_reduce(x, x)


def _torch(comm: Any, port: int) -> Maker:
    import torch
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=comm.rank, world_size=comm.size)

    def make(x: Any) -> Callable[[], Any]:
        tensor = torch.from_dlpack(x)
        return lambda: dist.all_reduce(tensor)

    return make


def measure(sizes: list[int], ports: tuple[int, int], wanted: list[str], calls: int) -> list[dict[str, Any]]:
    """What rank 0 found; runs on every rank."""
    import cupy

    comm = fc.init()
    stream = cupy.cuda.Stream(non_blocking=False)
    rows = []
    with stream:
        made = subjects(comm, ports, wanted)
        for nbytes in sizes:
            for name, make in made.items():
                row = _one(comm, cupy, name, make, nbytes, calls)
                if row is not None:
                    rows.append(row)
    return rows if comm.rank == 0 else []


def _one(comm: Any, cupy: Any, name: str, make: Callable, nbytes: int, calls: int) -> dict[str, Any] | None:
    if name.startswith("flagcx one_shot") and nbytes * comm.size > 256 << 20:
        return None  # Its scratch has every rank's message.
    count = nbytes // 4
    x = cupy.asarray(np.arange(count) % 1021 + comm.rank, cupy.float32)
    want = comm.size * (np.arange(count) % 1021) + comm.size * (comm.size - 1) // 2
    call = make(x)
    synchronize = _synchronizer(cupy)
    call()
    synchronize()
    wrong = int(cupy.count_nonzero(x != cupy.asarray(want, cupy.float32)))
    x.fill(0)
    for _ in range(6):
        call()
    synchronize()
    few = max(3, min(calls, int(calls * (1 << 20) / max(nbytes, 1 << 20))))
    host, both = [], []
    burst, bursts = (BURST, BURSTS) if nbytes <= 1 << 20 else (2, 3)
    for _ in range(bursts):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(burst):
            call()
        host.append((time.perf_counter() - start) / burst)
        synchronize()
    for _ in range(5):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(few):
            call()
        synchronize()
        both.append((time.perf_counter() - start) / few)
    host_us, time_us = statistics.median(host) * 1e6, statistics.median(both) * 1e6
    return {
        "collective": "allreduce", "library": name, "ranks": comm.size, "nbytes": nbytes, "dtype": "float32",
        "host_us": round(host_us, 2), "time_us": round(time_us, 2),
        "spread_us": [round(min(both) * 1e6, 2), round(max(both) * 1e6, 2)],
        "algbw_gb_per_s": round(nbytes / time_us / 1e3, 3),
        "busbw_gb_per_s": round(nbytes / time_us / 1e3 * 2 * (comm.size - 1) / comm.size, 3), "wrong": wrong,
    }  # fmt: skip


def _synchronizer(cupy: Any) -> Callable[[], None]:
    """Waits for everything on the device: other libraries use streams of their own."""
    return cupy.cuda.Device().synchronize


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def versions() -> dict[str, Any]:
    """What is measured, and on what."""
    import cupy
    from cupy.cuda import nccl

    found = {"python": platform.python_version(), "cupy": cupy.__version__, "nccl": nccl.get_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    found["gpu"] = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    found["gpus"] = cupy.cuda.runtime.getDeviceCount()
    found["nccl_environment"] = {k: v for k, v in environment().items() if k.startswith("NCCL_")}
    return found


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--sizes", default="4K,64K,1M,4M,64M")
    parser.add_argument("--only", default="", help="names of libraries to measure, parts of them, by commas")
    parser.add_argument("--calls", type=int, default=200, help="calls in a row, for small messages")
    parser.add_argument("--out", default="", help="file for JSON lines")
    arguments = parser.parse_args()
    need_gpu()
    sizes = [parse_size(s) for s in arguments.sizes.split(",")]
    wanted = [name for name in arguments.only.split(",") if name]
    rows = []
    for ranks in (int(n) for n in arguments.ranks.split(",")):
        ports = free_port(), free_port()
        rows += fc.launch(
            measure, ranks=ranks, args=(sizes, ports, wanted, arguments.calls), timeout_s=240, share_gpu=True
        )[0]
    header = {"command": " ".join(sys.argv), **versions()}
    if arguments.out:
        with Path(arguments.out).open("a") as file:
            file.writelines(json.dumps({**row, "run": header}) + "\n" for row in rows)
    print(json.dumps(header))
    print(
        f"{'ranks':>5} {'bytes':>10}  {'library':26} {'host us':>9} {'time us':>10} {'busbw GB/s':>10} wrong"
    )
    for r in rows:
        what = (
            f"{r['ranks']:>5} {r['nbytes']:>10}  {r['library']:26} {r['host_us']:>9.2f} {r['time_us']:>10.1f}"
        )
        print(f"{what} {r['busbw_gb_per_s']:>10.3f} {r['wrong']:>5}")


if __name__ == "__main__":
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    main()
