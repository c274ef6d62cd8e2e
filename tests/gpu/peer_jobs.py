"""What the ranks of the peer-memory tests do. Each returns the list of what went wrong on its rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import flagcx as fc
from flagcx.algorithms import build
from flagcx.config import environment
from flagcx.dtypes import DTYPES, OPS, DType, ReduceOp, dtype_of
from flagcx.errors import CommunicationError, FlagcxError
from flagcx.kernels.peer import PEER_MEMORY, PEER_PACKETS
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Call
from tests.gpu import oracle
from tests.gpu.jobs import compare

ALLREDUCES = (
    ("allreduce", "one_shot", PEER_PACKETS),
    ("allreduce", "two_shot", PEER_PACKETS),
    ("allreduce", "two_shot", PEER_MEMORY),
)
FORMS = (
    *ALLREDUCES,
    ("allreduce", "one_shot", PEER_MEMORY),
    ("reduce_scatter", "direct", PEER_PACKETS),
    ("reduce_scatter", "direct", PEER_MEMORY),
    ("allgather", "direct", PEER_PACKETS),
    ("allgather", "direct", PEER_MEMORY),
    ("alltoall", "direct", PEER_PACKETS),
    ("alltoall", "direct", PEER_MEMORY),
    ("broadcast", "direct", PEER_PACKETS),
    ("broadcast", "direct", PEER_MEMORY),
    ("reduce", "direct", PEER_PACKETS),
    ("reduce", "direct", PEER_MEMORY),
    ("gather", "direct", PEER_MEMORY),
    ("scatter", "direct", PEER_MEMORY),
)
REDUCTIONS = ("sum", "prod", "min", "max", "avg")


def connected() -> tuple[Any, Any]:
    """The communicator and its peer memory."""
    import cupy

    comm = fc.init()
    comm.allreduce(cupy.ones(1))
    peers = comm._device.transport.peers
    assert peers is not None, comm._device.transport.no_peers
    return comm, peers


def plan_of(
    comm: Any, peers: Any, form: tuple[str, str, str], count: int, dtype: DType, op: ReduceOp | None
) -> Any:
    """A call compiled for one of the protocols, whatever would be chosen."""
    collective, algorithm, protocol = form
    root = comm.size - 1 if COLLECTIVES[collective].rooted else None
    schedule = build(collective, algorithm, comm.size, root=root)
    return peers.compile(Call(schedule, comm.rank, count, dtype, op, False, protocol))


def placed(cupy: Any, array: np.ndarray, offset: int) -> Any:
    """The array on the GPU, beginning ``offset`` elements behind the start of its memory."""
    start = offset * array.itemsize
    memory = cupy.empty(array.nbytes + start + 1, np.uint8)
    view = memory[start : start + array.nbytes]
    view.set(array.view(np.uint8))
    return view.view(array.dtype)


def one_call(
    comm: Any, peers: Any, form: tuple[str, str, str], count: int, dtype: DType, op: str, offset: int
) -> list[str]:
    """One call of a form with arrays at an offset of elements, against the oracle."""
    import cupy

    kind = COLLECTIVES[form[0]]
    root = comm.size - 1 if kind.rooted else None
    reduction = OPS[op] if kind.reduces else None
    inputs = [
        oracle.data(q, count * kind.input_blocks(comm.size), dtype, op) if kind.has_input(q, root) else None
        for q in range(comm.size)
    ]
    want = oracle.expected(form[0], comm.rank, comm.size, root, inputs, OPS[op], dtype)
    given = None if inputs[comm.rank] is None else placed(cupy, inputs[comm.rank], offset)
    result = None
    if want is not None:
        result = placed(cupy, np.zeros_like(want), (offset + comm.rank) % 3 if offset else 0)
    if form[0] == "broadcast" and given is not None:
        result = given
    plan_of(comm, peers, form, count, dtype, reduction).run(given, result)
    where = f"rank {comm.rank} of {comm.size}: {' '.join(form)} {count} {dtype.name} {op} at {offset}"
    faults = compare(where, result, want)
    if form[0] == "allreduce":
        x = placed(cupy, inputs[comm.rank], offset)
        plan_of(comm, peers, form, count, dtype, reduction).run(x, x)
        faults += compare(f"{where} in place", x, want)
    return faults


def every_form(counts: list[int], offsets: list[int]) -> list[str]:
    """Every collective and protocol for each count and offset, in float32."""
    comm, peers = connected()
    faults: list[str] = []
    for form in FORMS:
        for count in counts:
            for offset in offsets:
                faults += one_call(comm, peers, form, count, dtype_of("float32"), "sum", offset)
    peers.check()
    return faults


def _kinds() -> Iterator[tuple[DType, str]]:
    for dtype in DTYPES.values():
        for op in REDUCTIONS:
            if dtype.kind in OPS[op].kinds:
                yield dtype, op


def every_dtype(names: list[str], counts: list[int]) -> list[str]:
    """Every dtype with every operation, by packets and by chunks. Ranks share the compiling."""
    comm, peers = connected()
    wanted = [(f, d, o) for f in ALLREDUCES for d, o in _kinds() if not names or d.name in names]
    for form, dtype, op in wanted[comm.rank :: comm.size]:
        plan_of(comm, peers, form, 64, dtype, OPS[op])
    comm.barrier()
    faults: list[str] = []
    for form, dtype, op in wanted:
        for count in counts:
            faults += one_call(comm, peers, form, count, dtype, op, 1)
    peers.check()
    return faults


def many_calls(times: int) -> list[str]:
    """Calls of random sizes back to back, each result checked on the GPU, without a word of the host.

    Every second one is of a form drawn at random, so that all follow upon each other in the same memory.
    """
    import cupy

    comm, peers = connected()
    float32, forms = dtype_of("float32"), np.random.default_rng(8).integers(0, len(ALLREDUCES), times)
    plans: dict[tuple[int, int], Any] = {}
    sizes = np.unique(np.random.default_rng(5).integers(0, 19, 400) ** 4 + 1)
    sizes = np.unique(np.concatenate([sizes, np.random.default_rng(6).integers(1, 40000, 300)]))
    order = np.random.default_rng(7).integers(0, len(sizes), times)
    memory = cupy.empty(int(sizes.max()) + 8, cupy.float32)
    arrays = [memory[i % 5 : i % 5 + int(n)] for i, n in enumerate(sizes)]
    wrong = cupy.zeros((), cupy.int64)
    base = comm.size * (comm.size - 1) / 2
    check = cupy.ElementwiseKernel(
        "T x, T want",
        "raw int64 wrong",
        "if (x != want) atomicAdd((unsigned long long*)&wrong[0], 1ull)",
        "chk",
    )
    for i, which in enumerate(order):
        x = arrays[which]
        x.fill(comm.rank + i % 11)
        key = int(which), int(forms[i])
        if i % 2 == 0:
            comm.allreduce(x)
        else:
            if key not in plans:
                plans[key] = plan_of(comm, peers, ALLREDUCES[key[1]], x.size, float32, OPS["sum"])
            plans[key].run(x, x)
        check(x, cupy.float32(base + comm.size * (i % 11)), wrong)
    return [f"{int(wrong)} elements are wrong"] if int(wrong) else []


def replays(times: int) -> list[str]:
    """A graph of the caller's own with calls by packets, chunks and in place, again and again."""
    import cupy

    comm, _ = connected()
    arrays = [cupy.zeros(1000, cupy.float32), cupy.zeros(300_001, cupy.float32)]
    arrays.append(comm.empty(500_000, device="gpu"))
    want, wrong = cupy.zeros((), cupy.float32), cupy.zeros((), cupy.int64)
    for x in arrays:
        comm.allreduce(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def step() -> None:
        want[...] = (want + 1) % 1000
        for x in arrays:
            x.fill(comm.rank)
            x += want
            comm.allreduce(x)
            wrong.__iadd__((x != comm.size * want + comm.size * (comm.size - 1) / 2).any())

    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for _ in range(times):
            graph.launch(stream)
    stream.synchronize()
    return [f"{int(wrong)} of {times} replays gave a wrong result"] if int(wrong) else []


def seen_arrays(counts: list[int]) -> list[str]:
    """Arrays of ``comm.empty``: whole, parts at any offset, and beside other ranks' plain ones."""
    import cupy

    comm, _ = connected()
    n, r, faults = comm.size, comm.rank, []
    for count in counts:
        memory = comm.empty(2 * count + 64, device="gpu")
        plain = cupy.empty(count + 8, cupy.float32)
        cases = {
            "the whole": memory[:count],
            "offsets of 16 bytes": memory[4 * r : 4 * r + count],
            "any offset": memory[r + 1 : r + 1 + count],
            "one rank's is plain": plain[:count] if r == n - 1 else memory[:count],
        }
        for what, x in cases.items():
            x[...] = cupy.arange(count, dtype=cupy.float32) % 1021 + r
            y = comm.allreduce(x)
            want = n * (cupy.arange(count) % 1021) + n * (n - 1) // 2
            faults += [] if bool((y == want).all()) else [f"{what}, {count}: {y[:4]}, expected {want[:4]}"]
        x, y = memory[:count], memory[count + 32 : 2 * count + 32]
        x[...] = cupy.arange(count, dtype=cupy.float32) % 1021 + r
        comm.allreduce(x, out=y)
        faults += [] if bool((y == want).all()) else [f"out of place, {count}"]
        faults += [] if bool((x == cupy.arange(count) % 1021 + r).all()) else [f"INPUT was written, {count}"]
        del memory, cases, x, y
    return faults


def two_at_once(times: int) -> list[str]:
    """Two communicators at work on two streams at the same time, enqueued in one order on all ranks.

    Streams may share one queue of the GPU, so another order on another rank could wait for ever.
    """
    import cupy

    comm, _ = connected()
    other = comm.split(0)
    pairs = []
    for which, many in ((comm, 3_000_000), (other, 2_000_001)):
        x = cupy.empty(many, cupy.float32)
        x.fill(0)
        pairs.append((which, x, cupy.cuda.Stream(non_blocking=True), cupy.zeros((), cupy.int64)))
        which.allreduce(x)
    cupy.cuda.Device().synchronize()
    for i in range(times):
        for which, x, stream, wrong in pairs if i % 2 else pairs[::-1]:
            with stream:
                x.fill(comm.rank + i)
                which.allreduce(x)
                wrong += (x != comm.size * i + comm.size * (comm.size - 1) // 2).any()
    cupy.cuda.Device().synchronize()
    return [f"{int(wrong)} of {times} of {which}" for which, _, _, wrong in pairs if int(wrong)]


def freed(times: int) -> list[str]:
    """Communicators that come and go leave no GPU memory behind."""
    import cupy

    comm, _ = connected()

    def some(count: int) -> None:
        for _ in range(count):
            child = comm.split(0)
            x = child.empty(1 << 20, device="gpu")
            x.fill(1)
            child.allreduce(x)
            cupy.cuda.Device().synchronize()
            del x
            child.close()
        comm.barrier()

    some(2)
    before = cupy.cuda.runtime.memGetInfo()[0]
    comm.barrier()
    some(times)
    after = cupy.cuda.runtime.memGetInfo()[0]
    comm.barrier()
    return [f"{before - after} bytes are gone"] if before - after > 8 << 20 else []


def killed(victim: int, path: str) -> None:
    """One rank is killed; the others are inside an all-reduce. Each writes when and how it ended."""
    import cupy

    comm, _ = connected()
    x = cupy.ones(1 << 20, cupy.float32)
    for _ in range(5):
        comm.allreduce(x)
    cupy.cuda.get_current_stream().synchronize()
    comm.barrier()
    start = time.time()
    if comm.rank == victim:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = "nothing was raised"
    try:
        for _ in range(3):
            comm.allreduce(x, async_op=True).synchronize()
    except CommunicationError as error:
        outcome = f"{type(error).__name__}: {error}"
    free = cupy.cuda.runtime.memGetInfo()[0]
    comm.close()
    given_back = cupy.cuda.runtime.memGetInfo()[0] - free
    with open(f"{path}.{comm.rank}", "w") as file:
        file.write(f"{time.time() - start:.2f}\n{given_back}\n{outcome}")


def absent(path: str) -> None:
    """One rank stays away and lives on; the GPU itself gives up waiting, and says for whom."""
    import cupy

    comm = fc.init(timeout_s=30.0)
    x = cupy.ones(100_000, cupy.float32)
    comm.allreduce(x)
    cupy.cuda.get_current_stream().synchronize()
    peers = comm._device.transport.peers
    plan = plan_of(comm, peers, ALLREDUCES[2], x.size, dtype_of("float32"), OPS["sum"])
    plan.args.limit_ns = 1_000_000_000
    comm.barrier()
    start, outcome = time.time(), "nothing was raised"
    try:
        if comm.rank == 1:
            time.sleep(4.0)
        plan.run(x, x)
        cupy.cuda.get_current_stream().synchronize()
        peers.check()
    except FlagcxError as error:
        outcome = f"{type(error).__name__}: {error}"
    with open(f"{path}.{comm.rank}", "w") as file:
        file.write(f"{time.time() - start:.2f}\n{outcome}")


def host_cost(count: int) -> dict[str, float]:
    """Microseconds of host time of a call through the facade, and of a launch of a graph with one."""
    import cupy

    comm, _ = connected()
    x = cupy.ones(count, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            comm.allreduce(x)
        stream.synchronize()
        stream.begin_capture()
        comm.allreduce(x)
        graph = stream.end_capture()
        found: dict[str, list[float]] = {"call": [], "replay": []}
        for _ in range(200):
            for name, call in (("call", lambda: comm.allreduce(x)), ("replay", lambda: graph.launch(stream))):
                stream.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    call()
                found[name].append((time.perf_counter() - start) / 20 * 1e6)
    return {name: float(np.median(each)) for name, each in found.items()}


def chosen() -> list[str]:
    """What would carry small and large all-reduces."""
    comm, _ = connected()
    return [comm.explain("allreduce", nbytes).chosen.name for nbytes in (4096, 64 << 20)]


def unavailable() -> list[str]:
    """Where one rank does not want peer memory, nobody has it; calls still work, and the reason is told."""
    import cupy

    comm = fc.init(peer_memory=environment()["FLAGCX_RANK"] != "1")
    x = cupy.full(1000, comm.rank + 1.0)
    comm.allreduce(x)
    transport = comm._device.transport
    faults = [] if float(x[0]) == comm.size * (comm.size + 1) / 2 else [f"got {x[:3]}"]
    faults += [] if transport.peers is None else ["peers are there"]
    return [*faults, transport.no_peers]
