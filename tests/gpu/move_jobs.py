"""What the ranks of the tests of moved blocks do: v-forms, counts on the GPU, messages, barriers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import flagcx as fc
from tests.gpu.jobs import compare
from tests.gpu.peer_jobs import connected, placed

SIZES = (0, 1, 7, 16, 255, 4096, 5000, 70_001, 300_000)


def _bytes_of(sender: int, receiver: int, number: int, nbytes: int) -> np.ndarray:
    """Bytes that differ for each message and place."""
    return ((np.arange(nbytes) * (2 * sender + 3) + 7 * receiver + 13 * number) % 251).astype(np.uint8)


def _often(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a call returns at last, which has gone all ways: checked, like an earlier one, and by a graph."""
    return [call(*args, **options) for _ in range(5)][-1]


def v_forms(times: int, large: int = 0) -> list[str]:
    """Collectives with blocks of any size, by the way that is chosen, which must be peer memory."""
    import cupy

    comm, _ = connected()
    n, r, random = comm.size, comm.rank, np.random.default_rng(11)
    faults: list[str] = []
    for i in range(times):
        sizes = random.choice((*SIZES, large), (n, n))
        root, offset, row = int(random.integers(0, n)), i % 3, sizes[0]
        blocks = [_bytes_of(q, 0, i, int(row[q])) for q in range(n)]
        x = placed(cupy, blocks[r], offset)
        counts = [int(c) for c in row]
        want = np.concatenate(blocks)
        faults += compare(f"{r}: allgatherv {counts}", _often(comm.allgatherv, x, counts), want)
        got = _often(comm.gatherv, x, counts, root)
        faults += compare(f"{r}: gatherv {counts}", got, want if r == root else None)
        numbers = [(np.arange(len(want)) % 97 + q).astype(np.float32) for q in range(n)]
        start, total = int(row[:r].sum()), np.sum(numbers, axis=0)[: int(row[: r + 1].sum())]
        mine = placed(cupy, numbers[r], offset)
        got = _often(comm.reduce_scatterv, mine, counts)
        faults += compare(f"{r}: reduce_scatterv {counts}", got, total[start:])
        whole = placed(cupy, want, offset) if r == root else None
        part = placed(cupy, np.zeros_like(blocks[r]), offset)
        got = _often(comm.scatterv, whole, counts, root, out=part)
        faults += compare(f"{r}: scatterv {counts}", got, blocks[r])
        sent = np.concatenate([_bytes_of(r, q, i, int(sizes[r, q])) for q in range(n)])
        want = np.concatenate([_bytes_of(q, r, i, int(sizes[q, r])) for q in range(n)])
        given = placed(cupy, sent, offset)
        lists = sizes[r].tolist(), sizes[:, r].tolist()
        got = _often(comm.alltoallv, given, *lists)
        faults += compare(f"{r}: alltoallv {sizes.tolist()}", got, want)
        out = placed(cupy, np.zeros(len(want) + 40, np.uint8), offset)
        out.fill(9)
        on_gpu = cupy.asarray(sizes[r])
        comm.alltoallv(given, on_gpu, out=out)
        taken = comm.alltoall(on_gpu)
        _often(comm.alltoallv, given, on_gpu, taken, out=out)
        want = np.concatenate([want, np.full(40, 9, np.uint8)])
        faults += compare(f"{r}: alltoallv by counts on the GPU {sizes.tolist()}", out, want)
    ran = {(o.operation.collective, o.operation.protocol) for o in comm.profiler.records()}
    for collective in ("allgather", "gather", "scatter", "alltoall", "reduce_scatter"):
        if not {(collective, "peer_memory"), (collective, "peer_packets")} & ran:
            faults.append(f"{collective} did not go through peer memory: {sorted(ran)}")
    return faults


def messages(times: int, large: int = 0) -> list[str]:
    """Sends and receives of any size: alone, both at once, in groups, and to the rank itself."""
    import cupy

    comm, _ = connected()
    n, r, random = comm.size, comm.rank, np.random.default_rng(12)
    faults: list[str] = []

    def both(number: int, target: int, source: int, sizes: Any) -> tuple[Any, Any, np.ndarray]:
        given = placed(cupy, _bytes_of(r, target, number, int(sizes[r, target])), number % 3)
        want = _bytes_of(source, r, number, int(sizes[source, r]))
        return given, placed(cupy, np.zeros_like(want), (number + r) % 2), want

    for i in range(times):
        sizes = random.choice((*SIZES, large), (n, n))
        shift = int(random.integers(0, n))
        target, source = (r + shift) % n, (r - shift) % n
        given, out, want = both(i, target, source, sizes)
        faults += compare(
            f"{r}: sendrecv {sizes[r, target]}", _often(comm.sendrecv, given, target, out, source), want
        )
        a, b = i % n, (i + 1) % n
        if r in (a, b):
            given, out, want = both(i, a + b - r, a + b - r, sizes)
            if r == a:
                comm.send(given, b)
            else:
                faults += compare(f"{r}: recv {sizes[a, b]}", comm.recv(out, a), want)
        made = [both(10 * i + k, (r + k) % n, (r - k) % n, sizes) for k in range(n)]
        with comm.group():
            for _ in range(2):  # the second of each pair follows the first
                for k, (given, out, _) in enumerate(made):
                    comm.recv(out, (r - k) % n)
                    comm.send(given, (r + k) % n)
        for k, (_, out, want) in enumerate(made):
            faults += compare(f"{r}: in a group, from {(r - k) % n}", out, want)
        own, back = placed(cupy, np.arange(3000, dtype=np.float32), i % 2), cupy.zeros(3000, cupy.float32)
        comm.send(own, r)
        faults += compare(f"{r}: to itself", comm.recv(back, r), np.arange(3000, dtype=np.float32))
    return faults


def started(times: int, large: int = 0) -> list[str]:
    """Messages that are started and waited for in any order, beside collectives: as MPI lets them move."""
    import cupy

    comm = fc.init(timeout_s=12.0)
    n, r, random = comm.size, comm.rank, np.random.default_rng(14)
    faults: list[str] = []
    after, before = (r + 1) % n, (r - 1) % n

    def got(what: str, out: Any, source: int, number: int) -> None:
        nonlocal faults
        want = _bytes_of(source, r, number, len(out))
        faults += compare(f"{r}: {what}, {len(out)} bytes from {source}", out, want)

    def pair(number: int, target: int, source: int, sizes: Any) -> tuple[Any, Any]:
        given = placed(cupy, _bytes_of(r, target, number, int(sizes[r, target])), number % 3)
        return given, placed(cupy, np.zeros(int(sizes[source, r]), np.uint8), (number + r) % 2)

    for i in range(times):
        sizes = random.choice((*SIZES, large), (n, n))
        given, out = pair(i, after, before, sizes)
        total = cupy.full(1000 + i, r, cupy.float32)
        receive = comm.recv(out, before, async_op=True)
        comm.allreduce(total)  # the first of all calls, at first: its kernel is compiled meanwhile
        comm.send(given, after, async_op=True).wait()
        got("recv, allreduce, send", receive.wait(), before, i)
        faults += compare(f"{r}: beside it", total, np.full(1000 + i, n * (n - 1) / 2, np.float32))

        given, out = pair(i + 1, after, before, sizes)
        send = comm.send(given, after, async_op=True)
        value = comm.broadcast(cupy.full(70_000, r, cupy.int32), i % n)
        comm.barrier(stream=cupy.cuda.get_current_stream())
        comm.recv(out, before)
        send.wait()
        got("send, broadcast, recv, wait", out, before, i + 1)
        faults += compare(f"{r}: broadcast", value, np.full(70_000, i % n, np.int32))

        arrays = [pair(10 * i + k, (r + k) % n, (r - k) % n, sizes) for k in range(n)]
        works = [comm.recv(out, (r - k) % n, async_op=True) for k, (_, out) in enumerate(arrays)]
        works += [comm.send(x, (r + k) % n, async_op=True) for k, (x, _) in enumerate(arrays)]
        for k in random.permutation(len(works)):
            works[k].wait()
        for k, (_, out) in enumerate(arrays):
            got("all at once", out, (r - k) % n, 10 * i + k)
        given, out = pair(i + 5, after, before, sizes)
        work = comm.sendrecv(given, after, out, before, async_op=True)
        got("sendrecv", work.synchronize(), before, i + 5)
    return faults


def farm(tasks: int) -> list[str]:
    """Rank 0 gives tasks to whichever rank has answered; the others answer until they get a 0."""
    import cupy

    comm = fc.init(timeout_s=12.0)
    faults: list[str] = []
    if comm.rank == 0:
        answers = {q: cupy.zeros(50_000, cupy.int64) for q in range(1, comm.size)}
        works = {q: comm.recv(answers[q], q, async_op=True) for q in answers}
        for task in range(1, tasks + comm.size):
            q = next(q for q in itertools.cycle(works) if works[q].done())
            works.pop(q).wait()
            if (answers[q] != answers[q][0]).any() or int(answers[q][0]) % 3:
                faults.append(f"rank {q} answered {answers[q][:3]}")
            comm.send(cupy.full(1, task if task <= tasks else 0, cupy.int64), q)
            if task <= tasks:
                works[q] = comm.recv(answers[q], q, async_op=True)
        return faults
    task, answer = cupy.zeros(1, cupy.int64), cupy.zeros(50_000, cupy.int64)
    while True:
        comm.send(answer, 0)
        comm.recv(task, 0)
        if not int(task[0]):
            return faults
        answer[...] = 3 * task


def in_graphs(times: int) -> list[str]:
    """A graph with every kind of moved call, replayed."""
    import cupy

    comm, _ = connected()
    n, r = comm.size, comm.rank
    x = cupy.zeros(5000 * n, cupy.float32)
    counts = cupy.full(n, 5000, cupy.int64)
    gathered, exchanged, got = (cupy.zeros_like(x) for _ in range(3))
    total, out = cupy.zeros(300_000, cupy.float32), cupy.zeros(300_000, cupy.float32)
    wrong, step_number = cupy.zeros((), cupy.int64), cupy.zeros((), cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    sizes = [5000] * n

    def step() -> None:
        step_number[...] = (step_number + 1) % 1000
        x.fill(r)
        x.__iadd__(step_number)
        total.fill(r)
        total.__iadd__(step_number)
        comm.allgatherv(x[:5000], sizes, out=gathered)
        comm.alltoallv(x, counts, counts, out=exchanged)
        comm.sendrecv(x, (r + 1) % n, got, (r - 1) % n)
        comm.reduce(total, root=1, out=out if r == 1 else None)
        comm.broadcast(total, root=1)
        comm.barrier(stream=stream)
        want = cupy.repeat(cupy.arange(n, dtype=cupy.float32), 5000) + step_number
        for each in (gathered, exchanged):
            wrong.__iadd__((each != want).any())
        wrong.__iadd__((got != (r - 1) % n + step_number).any())
        wrong.__iadd__((total != 1 + step_number).any())
        if r == 1:
            wrong.__iadd__((out != n * step_number + n * (n - 1) / 2).any())

    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for _ in range(times):
            graph.launch(stream)
    stream.synchronize()
    return [f"{int(wrong)} results of {times} replays are wrong"] if int(wrong) else []


def barriers() -> list[str]:
    """The stream of a rank waits for the other rank's; the host does not."""
    import cupy

    comm, _ = connected()
    stream = cupy.cuda.Stream(non_blocking=True)
    comm.barrier(stream=stream)
    stream.synchronize()
    comm.barrier()
    start = time.perf_counter()
    if comm.rank == 1:
        time.sleep(0.5)
    comm.barrier(stream=stream)
    enqueued = time.perf_counter() - start
    stream.synchronize()
    took = time.perf_counter() - start
    faults = [] if took > 0.45 else [f"{comm.rank}: the stream did not wait: {took:.3f} s"]
    if comm.rank != 1 and enqueued > 0.2:
        faults.append(f"{comm.rank}: the host waited {enqueued:.3f} s")
    return faults


def wrong_sizes(path: str) -> None:
    """A message of another size than is expected, and counts that do not fit: each rank writes its error."""
    import cupy

    comm = fc.init(timeout_s=20.0)
    x = cupy.ones(1000, cupy.float32)
    comm.allreduce(x)
    cupy.cuda.get_current_stream().synchronize()
    outcome = "nothing was raised"
    start = time.time()
    try:
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x[:500], 0)
        for _ in range(40):
            time.sleep(0.25)
            comm.allreduce(x)
    except fc.FlagcxError as error:
        outcome = f"{type(error).__name__}: {error}"
    with open(f"{path}.{comm.rank}", "w") as file:
        file.write(f"{time.time() - start:.2f}\n{outcome}")
