"""What the ranks of the GPU tests of compression do. Each returns the list of what went wrong on its rank."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np

import flagcx as fc
from flagcx.compression import two_step

NAMES = ("fp16", "bf16", "fp8", "fp8_e5m2", "int8", "int4", "topk", "randomk", "powersgd", "sparse", "auto")
SAME_BITS = ("fp16", "bf16", "fp8", "fp8_e5m2", "int8", "int4", "sparse")


def data(rank: int, count: int, step: int = 0) -> np.ndarray:
    return np.random.default_rng([rank, count, step]).standard_normal(count).astype(np.float32)


def slot_of(feedback: fc.compression.Feedback, count: int) -> fc.compression.Slot:
    """The slot of an array that is a matrix, about square, and a rest."""
    rows = math.isqrt(count)
    columns = count // rows
    return feedback.slot("x", [(rows, columns), (count - rows * columns,)])


def as_on_the_host(
    counts: list[int], steps: int, piece_nbytes: int = two_step.DEVICE_PIECE_NBYTES
) -> list[str]:
    """Each codec with feedback, on CuPy arrays and on NumPy arrays, both in pieces of so many bytes."""
    import cupy

    two_step.DEVICE_PIECE_NBYTES = two_step.PIECE_NBYTES = piece_nbytes
    comm, faults = fc.init(), []
    for count in counts:
        for name in NAMES:
            device, host = fc.compression.Feedback(name), fc.compression.Feedback(name)
            for step in range(steps):
                x = cupy.asarray(data(comm.rank, count, step))
                got = comm.allreduce(x, "avg", compression=slot_of(device, count)).get()
                want = comm.allreduce(data(comm.rank, count, step), "avg", compression=slot_of(host, count))
                where = f"{name} of {count}, step {step}, rank {comm.rank} of {comm.size}"
                if len(set(comm.allgather_object(hashlib.sha256(got.tobytes()).hexdigest()))) > 1:
                    faults.append(f"{where}: ranks differ")
                distance = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
                # Where a number rounds otherwise, it is off by a whole step of its code.
                if distance > (0.02 if name in SAME_BITS else 0.05):
                    faults.append(f"{where}: {distance:.2g} from the host's")
    return faults


def nothing_is_lost(count: int, steps: int) -> list[str]:
    """All results and what the ranks keep add up to all gradients."""
    import cupy

    comm, faults = fc.init(), []
    for name in ("int8", "int4", "topk", "randomk", "powersgd"):
        slot = slot_of(fc.compression.Feedback(name), count)
        total = np.zeros(count)
        for step in range(steps):
            total += comm.allreduce(cupy.asarray(data(comm.rank, count, step)), compression=slot).get()
        kept = np.sum(comm.allgather_object(slot.residual.get()), axis=0, dtype=np.float64)
        every = [data(q, count, s) for q in range(comm.size) for s in range(steps)]
        worst = abs(total + kept - np.sum(every, axis=0, dtype=np.float64)).max()
        if worst > 1e-3:
            faults.append(f"{name}: {worst:.2g} of a gradient was lost or counted twice")
    return faults


def heals(count: int) -> list[str]:
    """A step with NaN or infinity on one rank is seen on all of them, once, and leaves all as it was."""
    import cupy

    comm, faults = fc.init(), []
    for name, momentum, residual in itertools.product(NAMES, (0.0, 0.9), (True, False)):
        for bad, dtype in ((np.nan, np.float32), (np.inf, np.float16)):
            feedback = fc.compression.Feedback(name, momentum=momentum, residual=residual)
            slot, spoilt = slot_of(feedback, count), []
            for step in range(4):
                x = cupy.asarray(data(comm.rank, count, step).astype(dtype))
                if step == 2 and comm.rank == comm.size - 1:
                    x[count // 3] = bad
                before = slot.state_dict()
                comm.allreduce(x, "avg", compression=slot)
                if not bool(cupy.isfinite(x).all()):
                    spoilt.append(step)
                    changed = _changed(before, slot.state_dict())
                    if changed:
                        faults.append(f"{name}, momentum {momentum}, residual {residual}: {changed} changed")
            if spoilt != [2]:
                faults.append(f"{name}, momentum {momentum}, residual {residual}, {bad}: {spoilt}")
    return faults


def _changed(before: dict, after: dict) -> list[str]:
    """The entries that are not the same in two states, but for the count of calls."""
    names = (before.keys() | after.keys()) - {"step"}
    return [n for n in names if n not in before or n not in after or not np.array_equal(before[n], after[n])]


def replayed(count: int) -> list[str]:
    """Calls of a graph, others between them, and spoilt ones end with the bits of plain calls."""
    import cupy

    comm, faults = fc.init(), []
    stream = cupy.cuda.Stream(non_blocking=True)
    for name in ("int8", "fp16"):
        ends = []
        for with_graph in (False, True):
            slot = fc.compression.Feedback(name, momentum=0.5)["x"]
            x, graph = cupy.empty(count, cupy.float32), None
            with stream:
                for step in range(8):
                    x.set(data(comm.rank, count, step))
                    if step in (3, 5) and comm.rank == 0:
                        x[7] = np.nan
                    if with_graph and step == 2:
                        stream.begin_capture()
                        comm.allreduce(x, "avg", compression=slot)
                        graph = stream.end_capture()
                    if graph is not None and step != 4:
                        graph.launch(stream)
                    else:
                        comm.allreduce(x, "avg", compression=slot)
                    stream.synchronize()
                    if bool(cupy.isfinite(x).all()) != (step not in (3, 5)):
                        faults.append(f"{name}, graph {with_graph}: step {step}")
                ends.append([x.get(), slot.state_dict()["residual"], slot.state_dict()["velocity"]])
        for number, (plain, again) in enumerate(zip(*ends, strict=True)):
            if not np.array_equal(plain, again):
                faults.append(f"{name}: array {number} differs")
    return faults


def continued(count: int) -> list[str]:
    """Error feedback that was saved on the GPU and loaded goes on with the same bits, on a GPU and a host."""
    import cupy

    comm, faults = fc.init(), []
    for name, momentum in itertools.product(("int8", "int4", "topk", "randomk", "powersgd"), (0.0, 0.9)):
        ends = []
        through = fc.compression.Feedback(name, momentum=momentum)
        again = fc.compression.Feedback(name, momentum=momentum)
        for feedback, first in ((through, 0), (again, 3)):
            for step in range(first, 6):
                if feedback is through and step == 3:
                    state = through.state_dict()
                if feedback is again and step == 3:
                    again.load_state_dict(state)
                x = cupy.asarray(data(comm.rank, count, step))
                comm.allreduce(x, "avg", compression=slot_of(feedback, count))
            ends.append(x.get().tobytes())
        if ends[0] != ends[1]:
            faults.append(f"{name}, momentum {momentum}: goes on with other bits")
        if not all(isinstance(value, (np.ndarray, int, float, str)) for value in state.values()):
            faults.append(f"{name}: the state is not plain")
        host = fc.compression.Feedback(name, momentum=momentum)
        host.load_state_dict(state)
        y = comm.allreduce(data(comm.rank, count, 3), "avg", compression=slot_of(host, count))
        if not np.isfinite(y).all():
            faults.append(f"{name}: does not go on on a host")
    return faults


def low_rank() -> list[str]:
    """PowerSGD takes the array as the matrix that it is."""
    import cupy

    comm, faults = fc.init(), []
    random = np.random.default_rng(3)
    w = (random.normal(size=(256, 2)) @ random.normal(size=(2, 1000))).astype(np.float32)
    for compression in ("powersgd", fc.compression.Feedback("powersgd")["w"]):
        x = cupy.asarray(w)
        comm.allreduce(x, "avg", compression=compression)
        error = float(np.linalg.norm(x.get() - w) / np.linalg.norm(w))
        if error > 1e-5:
            faults.append(f"{compression}: off by {error:.2g}")
    return faults


def sparse_means_have_the_bits_of_dense_ones(count: int) -> list[str]:
    """Sums and means of sparse arrays by the lossless codec; zeros have no sign there."""
    import cupy

    comm, faults = fc.init(), []
    random = np.random.default_rng(comm.rank)
    x = cupy.asarray(np.where(random.random(count) < 0.01, data(comm.rank, count), np.float32(0)))
    for op in ("sum", "avg"):
        want = comm.allreduce(x.copy(), op, algorithm="ring")
        got = comm.allreduce(x.copy(), op, compression="sparse")
        if comm.size == 2 and not bool((got == want).all()):
            faults.append(op)
    return faults


def momentum_and_bytes(count: int, steps: int) -> list[str]:
    """Momentum moves elements as far as without compression; bytes sent are recorded; speeds are a GPU's."""
    import cupy

    from flagcx.compression.link import measure_speed

    comm, faults = fc.init(), []
    for codec in (fc.compression.TopK(0.1), fc.compression.RandomK(0.1)):
        slot = fc.compression.Feedback(codec, momentum=0.8)["x"]
        total = np.zeros(count)
        for step in range(steps):
            total += comm.allreduce(cupy.asarray(data(comm.rank, count, step)), compression=slot).get()
        mine = slot.residual.get() + 4.0 * slot.velocity.get()
        kept = np.sum(comm.allgather_object(mine), axis=0, dtype=np.float64)
        every = [data(q, count, s) for q in range(comm.size) for s in range(steps)]
        worst = abs(total + kept - 5 * np.sum(every, axis=0, dtype=np.float64)).max()
        if worst > 0.02:
            faults.append(f"{codec.name}: {worst:.2g} of a gradient with momentum was lost")
    x = cupy.asarray(data(comm.rank, count))
    predicted = comm.explain_compression(x, "int8").sent_nbytes["int8"]
    comm.profiler.clear()
    comm.allreduce(x, compression="int8")
    rows = [r for r in comm.profiler.summary().rows if r.algorithm == "compressed (int8)"]
    if [abs(row.sent_nbytes - predicted) < 0.01 * predicted for row in rows] != [True]:
        faults.append(f"bytes sent: {[row.sent_nbytes for row in rows]}, not {predicted}")
    for name, entry in fc.compression.catalogue().items():
        speed = measure_speed(entry.codec, True, comm.size, entry.needs_feedback, 1 << 24)
        if not speed > (1 if entry.device_call_us else 50):
            faults.append(f"{name}: {speed:.3g} GB/s")
    chosen = comm.explain_compression(x, fc.compression.Auto(lossy=("int8", "topk", "randomk")))
    if "randomk" in chosen.predicted_us or "topk" not in chosen.predicted_us:
        faults.append(str(chosen))
    return faults


def sparse_and_other_dtypes(count: int) -> list[str]:
    """Lossless sums of sparse arrays, float16 and float64, async, and a stream."""
    import cupy

    comm, faults = fc.init(), []
    random = np.random.default_rng(comm.rank)
    x = np.where(random.random(count) < 0.01, data(comm.rank, count), np.float32(0))
    exact = np.sum(comm.allgather_object(x), axis=0)
    got = comm.allreduce(cupy.asarray(x), compression="sparse").get()
    if not np.allclose(got, exact, atol=1e-6):
        faults.append("sparse")
    for dtype in (np.float16, np.float64):
        y = comm.allreduce(cupy.asarray(data(comm.rank, count).astype(dtype)), compression="int8")
        want = np.sum([data(q, count) for q in range(comm.size)], axis=0)
        if y.dtype != dtype or np.linalg.norm(y.get() - want) > 0.02 * np.linalg.norm(want):
            faults.append(f"int8 of {np.dtype(dtype)}")
    z = cupy.asarray(data(comm.rank, count))
    plain = comm.allreduce(z.copy(), compression="int8").get()
    work = comm.allreduce(z, compression="int8", async_op=True)
    if not np.array_equal(work.wait().get(), plain):
        faults.append("async_op")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        z = cupy.asarray(data(comm.rank, count))
    stream.synchronize()
    comm.allreduce(z, compression="int8", stream=stream)
    stream.synchronize()
    if not np.array_equal(z.get(), plain):
        faults.append("stream")
    return faults
