"""What the ranks of the GPU tests of fusion and of gradients do. Each returns what went wrong on its rank."""

from __future__ import annotations

from typing import Any

import numpy as np

import flagcx as fc

DTYPES = ("float32", "int64", "float16", "complex64", "uint8", "bool", "bfloat16", "float8_e4m3fn")
SHAPES = ((5,), (3, 7), (), (0,), (2, 3, 4), (70_001,))


def _host_values(rank: int, i: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    count = int(np.prod(shape))
    return ((np.arange(count) * 3 + 2 * i + rank) % 5).reshape(shape).astype(dtype)


def _to_device(cupy: Any, array: np.ndarray, offset: int) -> Any:
    """The array on the GPU, ``offset`` elements behind the start of its memory."""
    memory = cupy.empty((array.size + offset) * array.itemsize + 16, np.uint8)
    part = memory[offset * array.itemsize :][: array.nbytes]
    part.set(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return part.view(array.dtype).reshape(array.shape)


def _to_host(array: Any) -> np.ndarray:
    return array.reshape(-1).view(np.uint8).get().view(array.dtype).reshape(array.shape)


def _arrays(comm: Any) -> tuple[list[Any], list[np.ndarray]]:
    import cupy
    import ml_dtypes

    kinds = [np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES]
    wanted = [(shape, kind) for shape in SHAPES for kind in kinds]
    mine, sums = [], []
    for i, (shape, kind) in enumerate(wanted):
        mine.append(_to_device(cupy, _host_values(comm.rank, i, shape, kind), i % 3))
        total = _host_values(0, i, shape, kind)
        for rank in range(1, comm.size):
            total = np.asarray(total + _host_values(rank, i, shape, kind))
        sums.append(total)
    return mine, sums


def _faults(where: str, got: list[Any], want: list[np.ndarray]) -> list[str]:
    faults = []
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        found = _to_host(a) if a.size else np.empty(a.shape, a.dtype)
        if not np.array_equal(found.astype(complex), b.astype(complex)):
            faults.append(f"{where}: array {i}, {a.dtype} of {a.shape}, is wrong")
    return faults


def lists_and_groups() -> list[str]:
    """All dtypes and shapes, wherever arrays begin, again and again, also on other streams."""
    import cupy

    comm, faults = fc.init(), []
    for turn in range(4):
        arrays, sums = _arrays(comm)
        comm.allreduce(arrays)
        faults += _faults(f"list, turn {turn}", arrays, sums)
        arrays, _ = _arrays(comm)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            with comm.group():
                for array in arrays:
                    comm.allreduce(array)
            stream.synchronize()
        faults += _faults(f"group, turn {turn}", arrays, sums)
        arrays, _ = _arrays(comm)
        results = [_to_device(cupy, np.zeros(a.shape, a.dtype), turn) for a in arrays]
        comm.allreduce(arrays, out=results)
        faults += _faults(f"out, turn {turn}", results, sums)
        arrays, _ = _arrays(comm)
        work = comm.allreduce(arrays, async_op=True)
        faults += _faults(f"async, turn {turn}", work.wait(), sums)
        side = cupy.cuda.Stream(non_blocking=True)
        arrays, _ = _arrays(comm)
        comm.allreduce(arrays, stream=side)
        side.synchronize()
        faults += _faults(f"stream, turn {turn}", arrays, sums)
    return faults


def launches() -> list[str]:
    """A list that comes back makes one launch to pack, one to unpack, and one all-reduce."""
    import cupy

    from flagcx.kernels.pack import PackKernel

    comm = fc.init()
    arrays = [cupy.full(1 + i % 300, float(i % 7), cupy.float32) for i in range(1000)]
    comm.allreduce(arrays)
    counted = []
    launch = PackKernel.launch
    PackKernel.launch = lambda self, *args: (counted.append(1), launch(self, *args))[1]  # type: ignore
    upload = PackKernel.upload
    PackKernel.upload = lambda self, *args: (counted.append("upload"), upload(self, *args))[1]  # type: ignore
    issued = comm._device.transport._order.issued
    try:
        comm.allreduce(arrays)
    finally:
        PackKernel.launch, PackKernel.upload = launch, upload  # type: ignore[method-assign]
    faults = [] if counted == [1, 1] else [f"launches of the packing kernel: {counted}, expected two"]
    issued = comm._device.transport._order.issued - issued
    if issued != 1:
        faults.append(f"{issued} operations were enqueued, expected one")
    want = comm.size**2
    faults += [f"array {i}" for i, a in enumerate(arrays) if not bool((a == want * (i % 7)).all())][:3]
    return faults


def come_back(turns: int) -> list[str]:
    """The same arrays, parts of them, and new ones in their memory, by turns, in groups of two operations."""
    import cupy

    comm, faults = fc.init(), []
    kinds = (cupy.float32, cupy.float16, cupy.float32, cupy.int64)
    whole = [cupy.empty(1 + 7 * i, kinds[i % 4]) for i in range(60)]
    for turn in range(turns):
        last = 60 if turn % 3 else 20 + turn
        arrays = [a.view() for a in whole[:last]] if turn % 4 == 3 else whole[:last]
        for i, array in enumerate(arrays):
            array[...] = cupy.arange(array.size) % 5 + (i + turn + comm.rank) % 7
        if turn % 5 == 4:
            comm.allreduce(arrays, "max")
        else:
            with comm.group():
                for i, array in enumerate(arrays):
                    comm.allreduce(array, "max" if i % 3 == 2 else "sum")
        for i, array in enumerate(arrays):
            ranks = [(i + turn + q) % 7 for q in range(comm.size)]
            most = turn % 5 == 4 or i % 3 == 2
            ramp = cupy.arange(array.size) % 5
            want = ramp + max(ranks) if most else comm.size * ramp + sum(ranks)
            if not bool((array == want).all()):
                faults.append(f"turn {turn}: array {i} is {array[:3]}, expected {want[:3]}")
    return faults[:5]


def captured() -> list[str]:
    """A list in a graph of the caller's, replayed."""
    import cupy

    comm = fc.init()
    arrays = [cupy.full(100 + i, float(comm.rank), cupy.float32) for i in range(50)]
    comm.allreduce(arrays, "max")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        comm.allreduce(arrays)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
    stream.synchronize()
    want = (comm.size - 1) * comm.size**3
    return [f"array {i}: {a[:2]}" for i, a in enumerate(arrays) if not bool((a == want).all())][:3]


def synchronizer(steps: int) -> list[str]:
    """Averages in buckets, with gradients of two streams, new arrays now and then, and accumulation."""
    import cupy

    comm, faults = fc.init(), []
    shapes = [(300, 200), (200,), (200, 1000), (1000,), ()]
    other = cupy.cuda.Stream(non_blocking=True)
    kinds = [cupy.float32, cupy.float16]
    gradients = [cupy.zeros(s, kinds[i % 2]) for i, s in enumerate(shapes)]
    with fc.GradientSynchronizer(comm, gradients, bucket_bytes=300_000) as sync:
        for step in range(steps):
            fresh = step % 3 == 2
            arrays = [cupy.empty_like(g) for g in gradients] if fresh else gradients
            for i in reversed(range(len(shapes))):
                with other if i % 2 else cupy.cuda.Stream.null:
                    arrays[i].fill(comm.rank * 2 + step % 5 + i)
                    sync.ready(i, arrays[i] if fresh else None)
            sync.wait()
            for i, array in enumerate(arrays):
                want = comm.size - 1 + step % 5 + i
                if not bool((array == want).all()):
                    faults.append(f"step {step}: gradient {i} is {array.reshape(-1)[:2]}, expected {want}")
        if len(sync.buckets) < 3:
            faults.append(f"buckets: {sync.buckets}")
    return faults[:5]


def steady(steps: int) -> list[str]:
    """Nothing is allocated in a training's steady state, by our pools or from the GPU; all comes back."""
    import cupy

    comm = fc.init()
    gradients = [cupy.ones(n, cupy.float32) for n in (300, 20_000, 7, 400_000)]
    small = [cupy.ones(n, cupy.float32) for n in range(1, 200)]
    sync = fc.GradientSynchronizer(comm, gradients, bucket_bytes=100_000)

    def step() -> None:
        for i in (3, 1, 0, 2):
            sync.ready(i)
        sync.wait()
        comm.allreduce(small, "max")

    for _ in range(20):
        step()
    cupy.cuda.Device().synchronize()
    comm.barrier()
    before, free = fc.memory_stats(), cupy.cuda.runtime.memGetInfo()[0]
    comm.barrier()
    for _ in range(steps):
        step()
    cupy.cuda.Device().synchronize()
    comm.barrier()
    after, left = fc.memory_stats(), cupy.cuda.runtime.memGetInfo()[0]
    comm.barrier()
    faults = []
    for kind in before:
        if after[kind] != before[kind]:
            faults.append(f"{kind}: {before[kind]} became {after[kind]}")
    if free - left > 4 << 20:
        faults.append(f"{free - left:,} bytes of the GPU's memory are gone")
    sync.close()
    comm.close()
    if any(fc.memory_stats()[kind].used_nbytes for kind in before):
        faults.append(f"after close:\n{fc.memory_stats()}")
    return faults
