"""All-reduce on GPU arrays, timed by graph replays and by plain calls: flagcx beside NCCL, torch and cupyx.

    python bench/gpu_replays.py --ranks 2,4,8 --sizes 4K,1M,64M --dtypes float32,bfloat16 --out results.jsonl

Each library adds up the same data, and every result is checked. A graph of several calls is replayed, with
all ranks started together and fresh data before each replay; the time of a call is the median of the replays,
on the rank that took longest. Ranks share GPUs where there are fewer GPUs than ranks, and the record says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_common import free_port, need_gpu, versions
from nccl_symmetric import SymmetricNccl
from report import list_of, write_json_lines

import flagcx as fc
from flagcx.cli.sizes import parse_nbytes
from flagcx.dtypes import dtype_of
from flagcx.errors import FlagcxError

OURS = ("native", "ring", "ring|ring", "double_binary_tree", "tree", "one_shot", "two_shot")
REPLAYS, ROUNDS, LARGE = 15, 5, 16 << 20


@dataclass(frozen=True, slots=True)
class Subject:
    """A library's way to add up an array.

    Attributes:
        name: What the table calls it.
        make: (bytes) -> an empty array of the dtype, of the kind this way is at its best with.
        call: (array) -> a function that adds it up in place, or out of place with its result returned.
        largest: Messages above so many bytes are left out.
        torch: Whether it must be captured by torch.
        comm: The communicator that says what it ran, where it is one of ours.
    """

    name: str
    make: Callable[[int], Any]
    call: Callable[[Any], Callable[[], Any]]
    largest: int = 1 << 40
    torch: bool = False
    comm: Any = None


def ours(comm: Any, without_peers: Any, cupy: Any, dtype: Any) -> Iterator[Subject]:
    """flagcx: what it chooses, on plain arrays and on ``comm.empty``, and each algorithm by name.

    Two ranks have one neighbour, so there a ring cannot go both ways. Algorithms that may go through the
    peers' memory are measured as sends and receives through NCCL, too.
    """

    def plain(nbytes: int) -> Any:
        return cupy.empty(nbytes // dtype.itemsize, dtype)

    def reached(nbytes: int) -> Any:
        return comm.empty(nbytes // dtype.itemsize, dtype, device="gpu")

    yield Subject("flagcx", plain, lambda x: lambda: comm.allreduce(x), comm=comm)
    yield Subject("flagcx comm.empty", reached, lambda x: lambda: comm.allreduce(x), comm=comm)
    named = [(name, comm, "") for name in OURS if comm.size > 2 or name != "ring|ring"]
    named += [(name, without_peers, " over NCCL") for name in ("one_shot", "two_shot")]
    for name, by, words in named:
        largest = (1 << 30) // comm.size if name == "one_shot" else 1 << 40

        def call(x: Any, name: str = name, by: Any = by) -> Callable[[], Any]:
            return lambda: by.allreduce(x, algorithm=name)

        yield Subject(f"flagcx {name}{words}", plain, call, largest, comm=by)


def apart(comm: Any) -> Any:
    """The same ranks in a communicator that sends and receives through NCCL alone."""
    child = comm.split(0)
    child.config = replace(comm.config, peer_memory=False)
    return child


def nccl_itself(comm: Any, cupy: Any, dtype: Any, stream: Any) -> Iterator[Subject]:
    """The bare call into NCCL, and its symmetric kernels where they work."""
    from cupy.cuda import nccl

    def plain(nbytes: int) -> Any:
        return cupy.empty(nbytes // dtype.itemsize, dtype)

    comm.allreduce(cupy.ones(1))
    bare = comm._device.transport._communicator._comm
    kind = nccl.NCCL_FLOAT32 if dtype.itemsize == 4 else nccl.NCCL_BFLOAT16

    def direct(x: Any) -> Callable[[], Any]:
        at, count = x.data.ptr, x.size
        return lambda: bare.allReduce(at, at, count, kind, nccl.NCCL_SUM, stream.ptr)

    yield Subject("NCCL", plain, direct)
    try:
        symmetric = SymmetricNccl(comm, cupy)
    except (RuntimeError, OSError) as error:
        print(f"rank {comm.rank}: NCCL's symmetric kernels do not work here: {error}", file=sys.stderr)
        return

    def in_window(nbytes: int) -> Any:
        return symmetric.empty(nbytes, dtype)

    def registered(x: Any) -> Callable[[], Any]:
        return lambda: symmetric.allreduce(x, stream)

    yield Subject("NCCL symmetric", in_window, registered)


def cupys(comm: Any, cupy: Any, port: int) -> Iterator[Subject]:
    """``cupyx.distributed``, which knows no bfloat16."""
    from cupyx import distributed

    group = distributed.init_process_group(comm.size, comm.rank, backend="nccl", host="127.0.0.1", port=port)
    yield Subject(
        "cupyx.distributed",
        lambda nbytes: cupy.empty(nbytes // 4, cupy.float32),
        lambda x: lambda: group.all_reduce(x, x),
    )


def torchs(comm: Any, dtype: Any) -> Iterator[Subject]:
    """``torch.distributed`` over NCCL, and its symmetric memory where it works."""
    import torch
    import torch.distributed as dist

    kind = torch.float32 if dtype.itemsize == 4 else torch.bfloat16

    def plain(nbytes: int) -> Any:
        return torch.empty(nbytes // dtype.itemsize, dtype=kind, device="cuda")

    yield Subject("torch.distributed", plain, lambda x: lambda: dist.all_reduce(x), torch=True)
    try:
        import torch.distributed._symmetric_memory as symmetric

        name = dist.group.WORLD.group_name

        def registered(nbytes: int) -> Any:
            made = symmetric.empty(nbytes // dtype.itemsize, dtype=kind, device="cuda")
            symmetric.rendezvous(made, name)
            return made

        registered(4096)
    except Exception as error:
        print(f"rank {comm.rank}: torch's symmetric memory does not work here: {error}", file=sys.stderr)
        return
    one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
    yield Subject(
        "torch symmetric one-shot", registered, lambda x: lambda: one(x, "sum", name), 16 << 20, True
    )
    yield Subject(
        "torch symmetric two-shot", registered, lambda x: lambda: two(x, "sum", name), 256 << 20, True
    )


class Clock:
    """Times a subject on one stream, together with the other ranks.

    Args:
        comm: The communicator, whose ranks all do the same.
        cupy: The CuPy module.
        stream: Where everything runs.
    """

    def __init__(self, comm: Any, cupy: Any, stream: Any) -> None:
        self.comm, self.cupy, self.stream = comm, cupy, stream

    def measure(self, subject: Subject, nbytes: int, dtype: Any) -> dict[str, Any]:
        """One row: whether the sum is right, the time of a call in a replayed graph, and of a plain call."""
        x = subject.make(nbytes)
        seen = self.cupy.from_dlpack(x) if subject.torch else x
        bits = seen.view("uint32" if dtype.itemsize == 4 else "uint16")
        source, want = (_data(self.cupy, bits.size, dtype, self.comm, r) for r in (self.comm.rank, None))
        call = subject.call(x)
        bits[...] = source
        result = call()
        ran = {} if subject.comm is None else _ran(subject.comm)
        got = bits if result is None or result is x else self._bits_of(result, subject, bits.dtype)
        wrong = int(self.cupy.count_nonzero(got != want))
        del want, got, result
        calls = max(1, min(20, (64 << 20) // nbytes))
        replays = self._replays(subject, call, calls, lambda: bits.__setitem__(..., source))
        plain = self._plain(call, calls)
        slowest = max(self.comm.allgather_object((statistics.median(replays), min(replays), max(replays))))
        ms = max(self.comm.allgather_object(statistics.median(plain)))
        return {
            "library": subject.name, **ran, "ranks": self.comm.size, "nbytes": nbytes, "dtype": dtype.name,
            "replay_us": round(slowest[0], 2), "replay_spread_us": [round(t, 2) for t in slowest[1:]],
            "plain_us": round(ms, 2), "wrong": max(self.comm.allgather_object(wrong)),
            "busbw_gb_per_s": round(nbytes / slowest[0] / 1e3 * 2 * (self.comm.size - 1) / self.comm.size, 2),
        }  # fmt: skip

    def _bits_of(self, result: Any, subject: Subject, kind: Any) -> Any:
        return (self.cupy.from_dlpack(result) if subject.torch else result).view(kind)

    def _replays(self, subject: Subject, call: Callable, calls: int, refill: Callable) -> list[float]:
        """Microseconds of a call, for each replay of a graph of ``calls`` of them."""
        for _ in range(4):
            call()
        self.stream.synchronize()
        graph = self._captured(subject, call, calls)
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        times = []
        for n in range(REPLAYS + 2):
            refill()
            self.stream.synchronize()
            self.comm.barrier()
            start.record(self.stream)
            graph()
            end.record(self.stream)
            self.stream.synchronize()
            if n >= 2:
                times.append(self.cupy.cuda.get_elapsed_time(start, end) * 1e3 / calls)
        return times

    def _captured(self, subject: Subject, call: Callable, calls: int) -> Callable[[], None]:
        if subject.torch:
            import torch

            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="relaxed"):
                for _ in range(calls):
                    call()
            return graph.replay
        self.stream.begin_capture()
        for _ in range(calls):
            call()
        made = self.stream.end_capture()
        made.upload(self.stream)
        return lambda: made.launch(self.stream)

    def _plain(self, call: Callable, calls: int) -> list[float]:
        """Microseconds of a call with its enqueuing, in rows of calls."""
        times = []
        for _ in range(ROUNDS):
            self.stream.synchronize()
            self.comm.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self.cupy.cuda.Device().synchronize()
            times.append((time.perf_counter() - start) / calls * 1e6)
        return times


def _ran(comm: Any) -> dict[str, str]:
    """What the last call of a communicator was carried out by."""
    records = comm.profiler.records()
    if not records:
        return {}
    operation = records[-1].operation
    return {"algorithm": operation.algorithm, "protocol": operation.protocol}


def _data(cupy: Any, count: int, dtype: Any, comm: Any, rank: int | None) -> Any:
    """The bits of a rank's data, or of the sum of all ranks' for None: whole numbers, exact in bfloat16."""
    value = cupy.arange(count, dtype=cupy.int32) % 13
    if rank is None:
        value *= comm.size
        value += comm.size * (comm.size - 1) // 2
    else:
        value += rank
    bits = value.astype(cupy.float32).view(cupy.uint32)
    return bits if dtype.itemsize == 4 else (bits >> 16).astype(cupy.uint16)


def measure(
    sizes: list[int],
    dtypes: list[str],
    only: list[str],
    ports: tuple[int, int],
    out: Path | None,
    run: dict,
) -> list[dict]:
    """What rank 0 found; runs on every rank. Rows are written as soon as a size has been measured.

    Args:
        sizes: Bytes of each message.
        dtypes: Names of dtypes.
        only: Names of libraries; all if empty.
        ports: Free ports, for torch and for CuPy.
        out: The file that rank 0 adds JSON lines to; None for none.
        run: What is said of the run in every row.
    """
    import cupy

    comm, run = fc.init(), {**run, **versions()}
    stream = cupy.cuda.Stream(non_blocking=True)
    rows: list[dict] = []
    with stream, _torch_on(stream, comm, ports[0], only):
        clock, without_peers = Clock(comm, cupy, stream), apart(comm)
        peers = list(cupys(comm, cupy, ports[1])) if not only or "cupyx.distributed" in only else []
        for dtype in (dtype_of(name).numpy for name in dtypes):
            subjects = [*ours(comm, without_peers, cupy, dtype), *nccl_itself(comm, cupy, dtype, stream)]
            subjects += peers if dtype.itemsize == 4 else []
            if _wants_torch(only):
                with contextlib.suppress(ImportError):
                    subjects += torchs(comm, dtype)
            for nbytes in sizes:
                found: list[dict] = []
                for subject in subjects:
                    if nbytes <= subject.largest and (not only or subject.name in only):
                        found += [{**row, "run": run} for row in _try(clock, subject, nbytes, dtype)]
                rows += found
                if out is not None and comm.rank == 0:
                    write_json_lines(out, found)
    return rows if comm.rank == 0 else []


def _try(clock: Clock, subject: Subject, nbytes: int, dtype: Any) -> list[dict]:
    """A row; one that says why, where the library refuses."""
    try:
        return [clock.measure(subject, nbytes, dtype)]
    except (FlagcxError, ValueError, TypeError, AttributeError, MemoryError) as error:
        return [{"library": subject.name, "nbytes": nbytes, "dtype": dtype.name, "error": str(error)[:200]}]
    finally:
        clock.cupy.get_default_memory_pool().free_all_blocks()


def _wants_torch(only: list[str]) -> bool:
    return not only or any("torch" in name for name in only)


@contextlib.contextmanager
def _torch_on(stream: Any, comm: Any, port: int, only: list[str]) -> Iterator[None]:
    """torch on the same stream, with a process group of its own; nothing where torch is missing."""
    try:
        if not _wants_torch(only):
            raise ImportError
        import torch
        import torch.distributed as dist
    except ImportError:
        yield
        return
    torch.cuda.set_device(stream.device_id)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size
    )
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        yield
    comm.barrier()  # nobody needs the group any more
    dist.destroy_process_group()
    comm.barrier()  # rank 0 has torch's store: it stays until all have left


def table(rows: list[dict]) -> str:
    """The rows as a table: one line a size, microseconds of a replay, one column a library."""
    lines = []
    for ranks, dtype in sorted({(r["ranks"], r["dtype"]) for r in rows if "ranks" in r}):
        here = [r for r in rows if r.get("ranks") == ranks and r["dtype"] == dtype]
        names = list(dict.fromkeys(r["library"] for r in here))
        lines.append(f"{ranks} ranks, {dtype}: microseconds of a graph replay (*: wrong results)")
        lines.append(f"{'bytes':>11} " + " ".join(f"{n.replace('flagcx ', ''):>12.12}" for n in names))
        for nbytes in sorted({r["nbytes"] for r in here}):
            cells = {r["library"]: r for r in here if r["nbytes"] == nbytes}
            shown = (
                f"{cells[n]['replay_us']:.1f}{'*' if cells[n]['wrong'] else ''}" if n in cells else ""
                for n in names
            )
            lines.append(f"{nbytes:>11} " + " ".join(f"{s:>12}" for s in shown))
    return "\n".join(lines)


def _shown(command: list[str]) -> str:
    """The command for the records: without the file that they go to."""
    at = command.index("--out") if "--out" in command else len(command)
    return " ".join([*command[:at], *command[at + 2 :]])


def main() -> None:
    """Measures, prints a table, and writes JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes, names = list_of(parse_nbytes), list_of(str)
    parser.add_argument("--ranks", type=list_of(int), default="2")
    parser.add_argument("--sizes", type=sizes, default="1K,4K,64K,1M,4M,16M,64M,256M,1G,4G")
    parser.add_argument("--dtypes", type=names, default="float32")
    parser.add_argument("--only", type=names, default="", help="libraries as the table has them, by commas")
    parser.add_argument("--label", default="", help="a word for the records, such as: tuned")
    parser.add_argument("--out", type=Path, help="file that JSON lines are added to")
    given = parser.parse_args()
    need_gpu()
    out = given.out and given.out.resolve()
    run = {"command": _shown(sys.argv)} | ({"label": given.label} if given.label else {})
    rows: list[dict] = []
    for ranks in given.ranks:
        what = (given.sizes, given.dtypes, given.only, (free_port(), free_port()), out, run)
        rows += fc.launch(measure, ranks=ranks, args=what, timeout_s=400, share_gpu=True)[0]
    print(json.dumps(rows[-1]["run"] if rows else run))
    print(table(rows))
    for row in rows:
        if "error" in row:
            print(f"{row['library']}, {row['nbytes']} bytes, {row['dtype']}: {row['error']}")


if __name__ == "__main__":
    main()
