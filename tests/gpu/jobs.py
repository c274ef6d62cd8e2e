"""What the ranks of the GPU tests do. Each returns the list of what went wrong on its rank."""

from __future__ import annotations

from typing import Any

import numpy as np

import flagcx as fc
from flagcx.algorithms import entries
from flagcx.dtypes import DTYPES, OPS, dtype_of
from flagcx.kernels.compile import load_kernel
from flagcx.kernels.source import NAME, has_kernel, kernel_source
from flagcx.schedule.collectives import COLLECTIVES
from tests.communicator import test_averages as edges
from tests.gpu import oracle


def algorithms_and_collectives(counts: list[int], peer_memory: bool = True) -> list[str]:
    """Every algorithm of every collective, for each count, out of place, against the oracle.

    Without peer memory only those that it would carry, which then are schedules over NCCL like the others.
    """
    comm = fc.init(peer_memory=peer_memory)
    faults: list[str] = []
    for collective in COLLECTIVES:
        if collective == "barrier":
            continue
        names = [str(e.algorithm) for e in entries(collective) if e.allows(comm.size)] + ["native", None]
        if collective == "allreduce":
            names += ["ring|ring", "ring 3/4|two_shot", "ring|double_binary_tree"]
        if not peer_memory:
            names = [name for name in names if name in ("one_shot", "two_shot", "direct")]
        for algorithm in names:
            for count in counts:
                faults += one_call(comm, collective, algorithm, count, dtype_of("float32"))
    return faults


def one_call(
    comm: Any, collective: str, algorithm: str | None, count: int, dtype: Any, op="sum"
) -> list[str]:
    """One call, with arrays that begin at an offset, and with every way of giving the result."""
    import cupy

    kind = COLLECTIVES[collective]
    root = comm.size - 1 if kind.rooted else None
    inputs = [
        oracle.data(q, count * kind.input_blocks(comm.size), dtype, op) if kind.has_input(q, root) else None
        for q in range(comm.size)
    ]
    want = oracle.expected(collective, comm.rank, comm.size, root, inputs, OPS[op], dtype)
    x = None if inputs[comm.rank] is None else with_offset(cupy, inputs[comm.rank])
    out = None if want is None else with_offset(cupy, np.zeros_like(want))
    options: dict[str, Any] = {"algorithm": algorithm}
    if kind.rooted:
        options["root"] = root
    if kind.reduces:
        options["op"] = op
    if collective == "broadcast":
        got = comm.broadcast(x if x is not None else out, **options)
    else:
        got = getattr(comm, collective)(x, out=out, **options)
    where = f"rank {comm.rank} of {comm.size}: {collective} {algorithm} {count} {dtype.name} {op}"
    faults = compare(where, got, want)
    if x is not None and collective != "broadcast":
        faults += compare(f"{where}: INPUT was written", x, inputs[comm.rank])
    if collective == "allreduce":
        y = with_offset(cupy, inputs[comm.rank])
        faults += compare(f"{where} in place", comm.allreduce(y, **options), want)
    return faults


def with_offset(cupy: Any, array: np.ndarray) -> Any:
    """The array on the GPU, beginning one element behind the start of its memory."""
    size = array.itemsize
    memory = cupy.empty((len(array) + 1) * size, np.uint8)[size:]
    memory.set(array.view(np.uint8))
    return memory.view(array.dtype)


def compare(where: str, got: Any, want: np.ndarray | None) -> list[str]:
    """What is wrong with a result: bit for bit, but for the sign of zero and the kind of NaN."""
    if want is None:
        return []
    found = got.reshape(-1).view(np.uint8).get().view(got.dtype)
    want = want.reshape(-1)
    wide = (
        np.float32 if want.dtype.kind == "V" or want.dtype.name.startswith(("float8", "bf")) else want.dtype
    )
    same = np.array_equal(found.astype(wide), want.astype(wide), equal_nan=want.dtype.kind != "b")
    if same and found.dtype == want.dtype:
        return []
    bad = np.flatnonzero(found.astype(wide) != want.astype(wide))[:3]
    return [f"{where}: at {bad.tolist()} got {found[bad].tolist()}, expected {want[bad].tolist()}"]


def dtypes_and_ops(algorithms: list[str], counts: list[int]) -> list[str]:
    """Every dtype with every operation that it has, by schedules over NCCL."""
    import cupy

    comm = fc.init(peer_memory=False)
    comm.allreduce(cupy.ones(1))
    kinds = [(d, op) for d in DTYPES.values() for op in OPS.values() if d.kind in op.kinds]
    device = comm._device.transport.device
    for dtype, op in kinds[comm.rank :: comm.size]:  # the ranks share the compiling
        if has_kernel(dtype, op):
            load_kernel(cupy, device, kernel_source(dtype, op), NAME)
    comm.barrier()
    faults: list[str] = []
    for dtype, op in kinds:
        for algorithm in algorithms:
            for count in counts:
                faults += one_call(comm, "allreduce", algorithm, count, dtype, op.name)
    return faults


def native_dtypes() -> list[str]:
    """NCCL's own all-reduce for what it knows; a clear refusal for the rest."""
    from flagcx.errors import OperationError

    comm = fc.init()
    faults: list[str] = []
    for dtype in DTYPES.values():
        for op in OPS.values():
            if dtype.kind not in op.kinds:
                continue
            try:
                found = one_call(comm, "allreduce", "native", 77, dtype, op.name)
                faults += [] if dtype.accumulate is not None else found
            except OperationError as error:
                if "NCCL's own allreduce does not do" not in str(error):
                    faults.append(str(error))
    return faults


def large(count: int) -> list[str]:
    """All-reduces of many elements, by schedules over NCCL and by NCCL's own."""
    comm = fc.init(peer_memory=False)
    faults: list[str] = []
    for algorithm in ("ring", "one_shot", "two_shot", "double_binary_tree", "halving_doubling", "native"):
        faults += one_call(comm, "allreduce", algorithm, count, dtype_of("float32"))
    faults += one_call(comm, "allreduce", "two_shot", count, dtype_of("bfloat16"))
    return faults


def subnormals() -> list[str]:
    """The smallest numbers of each dtype, by every algorithm of ours: none may be taken for zero."""
    import cupy

    comm, faults = fc.init(), []
    for name in ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float64"):
        dtype = dtype_of(name).numpy
        bits = np.dtype(f"uint{8 * dtype.itemsize}")
        few = 1 if comm.size > 3 else 2
        # As whole numbers the bits of subnormal numbers add up as the numbers do.
        mine = (np.arange(1003) + comm.rank) % few + (comm.rank == 0)
        want = sum((np.arange(1003) + q) % few for q in range(comm.size)) + 1
        for algorithm in [str(e.algorithm) for e in entries("allreduce") if e.allows(comm.size)] + [None]:
            if algorithm is None and dtype.itemsize > 1:
                continue  # This may be NCCL's own.
            x = cupy.asarray(mine.astype(bits)).view(dtype)
            got = cupy.asnumpy(comm.allreduce(x, algorithm=algorithm).view(bits))
            if got.tolist() != want.tolist():
                faults.append(f"rank {comm.rank}: {algorithm} of {name}: bits {got[:4]}, expected {want[:4]}")
    return faults


def averages(block: int, peer_memory: bool) -> list[str]:
    """Averages at the edge of overflow by every algorithm but NCCL's own, in place and not, and again."""
    import cupy

    comm = fc.init(peer_memory=peer_memory)
    size, rank, faults = comm.size, comm.rank, []
    for name in ("float16", "bfloat16", "float8_e5m2", "uint8", "int16", "int32", "int64", "uint64"):
        x, mean = edges.contribution(rank, block * size, name), edges.mean_of(size, block * size, name)
        own = mean[rank * block :][:block]
        for collective, want in (("allreduce", mean), ("reduce", mean), ("reduce_scatter", own)):
            for entry in entries(collective):
                where = f"rank {rank}: {collective} {entry.algorithm} {name}"
                call, options = getattr(comm, collective), {"algorithm": str(entry.algorithm)}
                given = with_offset(cupy, x)
                away = collective == "reduce" and rank > 0
                out = None if away else with_offset(cupy, np.zeros_like(want))
                for _ in range(4):  # captured at the third
                    faults += compare(where, call(given, "avg", out=out, **options), None if away else want)
                faults += compare(f"{where}: INPUT was written", given, x)
                if collective == "allreduce":
                    faults += compare(f"{where} in place", call(given, "avg", **options), want)
    return faults
