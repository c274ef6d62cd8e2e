"""What calls on GPU arrays cost the host: microseconds until a call returns, beside bare launches and NCCL.

    python bench/gpu_overhead.py --ranks 2             # CuPy arrays
    python bench/gpu_overhead.py --ranks 2 --torch     # dist.all_reduce of NCCL's group and of ours

Bursts of all calls take turns, each short enough not to fill the queue, so that a drift of the machine hits
all alike. ``bare`` calls into NCCL, ``launch`` launches an empty kernel, ``graph`` replays a graph of an
all-reduce, and ``captured`` is a ring, which is such a replay after the look-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_common import free_port, need_gpu
from report import list_of, write_json_lines

import flagcx as fc

BURST, ROUNDS = 20, 100


def in_turns(
    barrier: Callable[[], Any], synchronize: Callable[[], Any], calls: dict[str, Callable[[], Any]]
) -> dict[str, list]:
    """Host microseconds of a call, for each name one number a round."""
    times: dict[str, list] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(5):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            synchronize()
            barrier()
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            times[name].append((time.perf_counter() - start) / BURST * 1e6)
            synchronize()
    return times


def measure(nbytes: int) -> dict[str, Any]:
    """Runs on every rank; what this rank found, for CuPy arrays."""
    import cupy
    from cupy.cuda import nccl

    comm = fc.init()
    stream = cupy.cuda.Stream(non_blocking=True)
    n, r = comm.size, comm.rank
    with stream:
        x, y = cupy.ones(nbytes // 4, cupy.float32), cupy.zeros(nbytes // 4, cupy.float32)
        many, own = cupy.zeros(nbytes // 4 * n, cupy.float32), cupy.zeros(nbytes // 4, cupy.float32)
        blocks = cupy.zeros_like(many)
        counts, on_gpu = [nbytes // 4] * n, cupy.full(n, nbytes // 4, cupy.int64)
        for _ in range(5):
            comm.allreduce(x, algorithm="native")
            comm.allreduce(x)
        stream.synchronize()
        stream.begin_capture()
        comm.allreduce(x)
        graph = stream.end_capture()
        transport = comm._device.transport
        bare, at, count, s = transport._communicator._comm, x.data.ptr, x.size, stream.ptr
        empty = cupy.RawKernel('extern "C" __global__ void k() {}', "k").kernel
        launch = cupy.cuda.driver.launchKernel
        root = r == 0
        calls: dict[str, Callable[[], Any]] = {
            "launch": lambda: launch(empty.ptr, 1, 1, 1, 32, 1, 1, 0, s, 0, 0),
            "graph": lambda: graph.launch(stream),
            "bare": lambda: bare.allReduce(at, at, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, s),
            "native": lambda: comm.allreduce(x, algorithm="native"),
            "allreduce": lambda: comm.allreduce(x),
            "allreduce_out": lambda: comm.allreduce(x, out=y),
            "captured": lambda: comm.allreduce(x, algorithm="ring"),
            "broadcast": lambda: comm.broadcast(x),
            "reduce": lambda: comm.reduce(x, out=y if root else None),
            "allgather": lambda: comm.allgather(x, out=many),
            "reduce_scatter": lambda: comm.reduce_scatter(many, out=own),
            "gather": lambda: comm.gather(x, out=many if root else None),
            "scatter": lambda: comm.scatter(many if root else None, out=own),
            "alltoall": lambda: comm.alltoall(many, out=blocks),
            "allgatherv": lambda: comm.allgatherv(x, counts, out=many),
            "alltoallv_gpu": lambda: comm.alltoallv(many, on_gpu, on_gpu, out=blocks),
            "sendrecv": lambda: comm.sendrecv(x, (r + 1) % n, y, (r - 1) % n),
            "barrier": lambda: comm.barrier(stream=stream),
        }
        times = in_turns(comm.barrier, stream.synchronize, calls)
    row: dict[str, Any] = {"ranks": n, "rank": r, "nbytes": nbytes, "nccl": nccl.get_version()}
    row |= {name: _quartiles(each) for name, each in times.items()}
    return row


def measure_torch(nbytes: int, port: int) -> dict[str, Any]:
    """Runs on every rank; what this rank found, for ``dist.all_reduce``.

    NCCL refuses ranks that share a GPU unless they seem to be on different hosts; then it uses sockets.
    """
    import torch
    import torch.distributed as dist

    comm = fc.init()
    if comm.size > torch.cuda.device_count():
        os.environ.setdefault("NCCL_HOSTID", f"rank-{comm.rank}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=comm.rank, world_size=comm.size)
    ours = fc.enhance_process_group(dist.new_group(backend="cpu:gloo,cuda:nccl"))
    x = torch.ones(nbytes // 4, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "flagcx": lambda: dist.all_reduce(x, group=ours),
        "flagcx_async": lambda: dist.all_reduce(x, group=ours, async_op=True).wait(),
        "nccl": lambda: dist.all_reduce(x),
        "nccl_async": lambda: dist.all_reduce(x, async_op=True).wait(),
    }
    array = ours.membership.queue_of([x]).views.elements(x)
    calls["communicator"] = lambda: ours.membership.queue_of([x]).comm.allreduce(array)
    times = in_turns(comm.barrier, torch.cuda.synchronize, calls)
    row: dict[str, Any] = {
        "ranks": comm.size,
        "rank": comm.rank,
        "nbytes": nbytes,
        "torch": torch.__version__,
    }
    return row | {name: _quartiles(each) for name, each in times.items()}


def _quartiles(times: list[float]) -> list[float]:
    return [round(q, 2) for q in statistics.quantiles(times, n=4)]


def main() -> None:
    """Measures and prints JSON lines: quartiles of the host's time, in us."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=list_of(int), default="2,8", help="each above 1")
    parser.add_argument("--nbytes", type=int, default=4096)
    parser.add_argument("--torch", action="store_true", help="torch's all_reduce in place of CuPy's arrays")
    parser.add_argument("--own-gpu", action="store_true", help="one rank on each GPU")
    parser.add_argument("--out", type=Path, help="file for JSON lines")
    arguments = parser.parse_args()
    need_gpu()
    rows = []
    for ranks in arguments.ranks:
        job, args = (measure, (arguments.nbytes,))
        if arguments.torch:
            job, args = measure_torch, (arguments.nbytes, free_port())  # type: ignore[assignment]
        rows += fc.launch(job, ranks=ranks, args=args, timeout_s=120, share_gpu=not arguments.own_gpu)[:2]
    rows = [{**row, "command": " ".join(sys.argv)} for row in rows]
    if arguments.out:
        write_json_lines(arguments.out, rows)
    print(*map(json.dumps, rows), sep="\n")


if __name__ == "__main__":
    main()
