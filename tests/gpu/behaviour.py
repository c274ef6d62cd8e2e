"""What the ranks of the GPU tests do about streams, graphs, memory, precision, other libraries and faults."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

import flagcx as fc
from flagcx.dtypes import dtype_of
from flagcx.errors import CommunicationError, FlagcxError


def two_streams() -> list[str]:
    """Calls that alternate between two streams, and a stream's own order."""
    import cupy

    comm = fc.init()
    total = comm.size * (comm.size + 1) / 2
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    arrays = []
    for i in range(40):
        with streams[i % 2]:
            x = cupy.full(5000, comm.rank + 1, cupy.float32)
            x *= i
            comm.allreduce(x, algorithm=("two_shot", "ring", "native")[i % 3])
            x += 1
            arrays.append(x)
    for stream in streams:
        stream.synchronize()
    return [f"call {i}" for i, x in enumerate(arrays) if not bool((x == total * i + 1).all())]


def replayed(algorithm: str, times: int) -> list[str]:
    """One call again and again, on data that changes; it must end in a CUDA graph."""
    import cupy

    comm = fc.init(peer_memory=False)
    x, y = cupy.zeros(3001, cupy.float32), cupy.zeros(3001, cupy.float32)
    wrong = cupy.zeros((), cupy.int64)
    base = sum(range(comm.size))
    for i in range(times):
        x.fill(comm.rank + i % 7)
        comm.allreduce(x, out=y, algorithm=algorithm)
        wrong += (y != base + comm.size * (i % 7)).any()
    faults = [f"{int(wrong)} of {times} results are wrong"] if int(wrong) else []
    graphs = sum(p.graphs for p in comm._device.transport._plans)
    return faults + ([] if graphs else ["nothing was captured"])


def enqueues_of_a_replay() -> list[str]:
    """A replay makes no call into NCCL and launches no kernel: one launch of a graph does it all."""
    import cupy

    comm = fc.init()
    x = cupy.ones(1 << 16, cupy.float32)
    for _ in range(4):
        comm.allreduce(x, algorithm="ring")
    transport = comm._device.transport
    (plan,) = (p for p in transport._plans if p.graphs)
    calls = []
    plan._enqueue = lambda *_: calls.append("enqueue")
    for _ in range(5):
        comm.allreduce(x, algorithm="ring")
    cupy.cuda.get_current_stream().synchronize()
    return calls + ([] if bool((x == float(comm.size) ** 9).all()) else [f"wrong: {x[:3]}"])


def captured_by_the_caller() -> list[str]:
    """Our calls between the caller's kernels in a graph of his own."""
    import cupy

    comm = fc.init()
    x, y = cupy.full(4099, comm.rank + 1.0, cupy.float32), cupy.zeros(4099, cupy.float32)
    for algorithm in ("ring", "native"):
        comm.allreduce(x, out=y, algorithm=algorithm)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        x += 1
        comm.allreduce(x, out=y, algorithm="ring")
        y *= 2
        comm.allreduce(y, algorithm="native")
        graph = stream.end_capture()
    for _ in range(10):
        graph.launch(stream)
    stream.synchronize()
    one = sum(q + 11.0 for q in range(comm.size))
    want = 2 * one * comm.size
    return [] if bool((y == want).all()) else [f"got {y[:3]}, expected {want}"]


def captured_on_two_streams(algorithm: str | None) -> list[str]:
    """A graph with started work and with calls on a stream beside: one after the other, as outside."""
    import cupy

    comm = fc.init()
    arrays = [cupy.full(300_007, comm.rank + 1.0 + i, cupy.float32) for i in range(4)]
    for x in arrays:
        comm.allreduce(x, algorithm=algorithm)
    stream, beside = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        work = comm.allreduce(arrays[0], "avg", algorithm=algorithm, async_op=True)
        comm.allreduce(arrays[1], "avg", algorithm=algorithm)
        beside.wait_event(stream.record())
        comm.allreduce(arrays[2], "avg", algorithm=algorithm, stream=beside)
        comm.allreduce(arrays[3], "avg", algorithm=algorithm)
        stream.wait_event(beside.record())
        work.wait()
        for x in arrays:
            x += 1
        graph = stream.end_capture()
    kept = len(comm._device.transport._order._kept)
    for _ in range(50):
        graph.launch(stream)
    comm.allreduce(cupy.ones(5), stream=stream)
    stream.synchronize()
    total = comm.size * (comm.size + 1) / 2
    faults = [f"{kept} lists of arrays are kept"] if kept else []
    for i, x in enumerate(arrays):
        want = total + comm.size * i + 50
        if not bool((abs(x - want) < 0.001).all()):  # NCCL's mean of three rounds each rank's part first.
            faults.append(f"array {i}: got {x[:3]}, expected {want}")
    return faults


def fails_alone(path: str) -> None:
    """Rank 0 fails by itself while a kernel of its own waits for a peer, and closes at once."""
    import cupy

    comm = fc.init()
    x = cupy.ones(1 << 20, cupy.float32)
    comm.allreduce(x)
    cupy.cuda.Device().synchronize()
    comm.barrier()
    start, outcome = time.time(), "nothing was raised"
    if comm.rank == 0:
        comm.allreduce(x)  # the others do not come to this
        comm._device.broke(MemoryError("no memory is left"))
        comm.close()
        outcome = "closed"
    else:
        time.sleep(2.0)
        try:
            comm.allreduce(x)
        except CommunicationError as error:
            outcome = f"{type(error).__name__}: {error}"
    with open(f"{path}.{comm.rank}", "w") as file:
        file.write(f"{time.time() - start:.2f}\n{outcome}")


def close_tells(path: str) -> None:
    """Rank 1 stays away from the last call; nobody looks at its result before close."""
    import cupy

    comm = fc.init(timeout_s=3.0)
    x = cupy.ones(1 << 20, cupy.float32)
    comm.allreduce(x)
    cupy.cuda.Device().synchronize()
    comm.barrier()
    outcome = "nothing was raised"
    try:
        if comm.rank != 1:
            comm.allreduce(x)
            time.sleep(6.0)
        comm.close()
    except CommunicationError as error:
        outcome = f"{type(error).__name__}: {error}"
    with open(f"{path}.{comm.rank}", "w") as file:
        file.write(outcome)


def growth(times: int) -> int:
    """Bytes of GPU memory that ``times`` operations leave behind, on rank 0."""
    import cupy

    comm = fc.init()
    arrays = [cupy.ones(n, cupy.float32) for n in (7, 1000, 20000, 65536)]
    names = ["ring", "one_shot", "two_shot", "native", "bruck"]

    def some(count: int) -> None:
        for i in range(count):
            array = arrays[i % 4] if i % 5 else cupy.ones(500 + i % 50, cupy.float32)
            comm.allreduce(array, "avg", algorithm=names[i % 5])
        cupy.cuda.Device().synchronize()
        comm.barrier()

    some(2000)
    before = cupy.cuda.runtime.memGetInfo()[0]
    comm.barrier()
    some(times)
    after = cupy.cuda.runtime.memGetInfo()[0]
    comm.barrier()
    return before - after


def asynchronous() -> list[str]:
    """Work on the communicator's own stream, beside work of the caller's."""
    import cupy

    comm = fc.init()
    total = comm.size * (comm.size + 1) / 2
    works, faults = [], []
    for i in range(1, 30):
        x = cupy.full(20000, (comm.rank + 1) * i, cupy.float32)
        works.append(comm.allreduce(x, async_op=True))
        del x
    for i, work in enumerate(works, 1):
        result = work.wait()
        if not bool((result == total * i).all()):
            faults.append(f"work {i} gave {result[:3]}")
    work = comm.allreduce(cupy.ones(1 << 20, cupy.float32), async_op=True)
    if not bool((work.synchronize() == comm.size).all()) or not work.done():
        faults.append("synchronize")
    return faults


def rounding(name: str, count: int) -> dict[str, float]:
    """The largest error of each algorithm's sum against float64, in roundings of the exact sum."""
    import cupy

    comm = fc.init()
    dtype = dtype_of(name)
    values = [np.random.default_rng(q).uniform(0, 1, count).astype(dtype.numpy) for q in range(comm.size)]
    exact = np.sum([v.astype(np.float64) for v in values], axis=0)
    bits = {"float16": 10, "bfloat16": 7}[name]
    least = {"float16": 2.0**-14, "bfloat16": 2.0**-126}[name]
    half_ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), least))) - bits - 1)
    worst = {}
    for algorithm in ("one_shot", "two_shot", "ring", "tree", "double_binary_tree", "native"):
        x = cupy.empty(count, dtype.numpy)
        x.set(values[comm.rank])
        got = comm.allreduce(x, algorithm=algorithm).get().astype(np.float64)
        worst[algorithm] = float(np.max(np.abs(got - exact) / half_ulp))
    return worst


def other_libraries() -> list[str]:
    """Arrays of torch, JAX and Numba, and of dtypes that some of them lack."""
    import cupy

    comm = fc.init()
    n, faults = comm.size, []
    try:
        import torch
    except ImportError:
        return ["skipped: torch is not installed"]
    for name in ("float32", "bfloat16", "float16", "int64", "float8_e4m3fn", "complex64", "bool"):
        x = torch.ones(77, device="cuda").to(getattr(torch, name))
        got = comm.allreduce(x)
        torch.cuda.synchronize()
        want = torch.full((77,), n if name != "bool" else 1, device="cuda").to(x.dtype)
        if got is not x or not bool((x.to(torch.complex64) == want.to(torch.complex64)).all()):
            faults.append(f"torch {name}: {x[:3]}")
        gathered = comm.allgather(x)
        torch.cuda.synchronize()
        alike = type(gathered) is torch.Tensor and (gathered.dtype, gathered.device) == (x.dtype, x.device)
        if (
            not alike
            or bool((gathered[0].to(torch.complex64) != x.to(torch.complex64)).any())
            or gathered.shape != (n, 77)
        ):
            faults.append(f"torch allgather of {name}: {gathered}")
    gradient = torch.ones(5, device="cuda", requires_grad=True)
    comm.allreduce(gradient)
    if gradient.tolist() != [n] * 5:
        faults.append(f"a tensor with gradients: {gradient}")
    faults += _strided(comm, cupy, torch)
    faults += _jax(comm, cupy)
    return faults + _numba(comm)


def _strided(comm: Any, cupy: Any, torch: Any) -> list[str]:
    """Arrays with strides are packed and unpacked, in every kind of call; in place, into others, in lists."""
    n, faults = comm.size, []
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int64", "complex64"):
        x = torch.arange(24, device="cuda").reshape(4, 6).remainder(3).to(getattr(torch, dtype)).t()
        want = (x.to(torch.complex64) * n).cpu()
        for _ in range(2):
            y = x.t().clone().t()
            if comm.allreduce(y) is not y or not torch.equal(y.to(torch.complex64).cpu(), want):
                faults.append(f"strided torch {dtype}: {y}")
    base = cupy.arange(60, dtype=cupy.float32).reshape(5, 12)
    part = base[::2, ::-3]
    kept, whole = part.copy(), base.copy()
    out = cupy.zeros((4, 2 * 3), cupy.float32).T[::2]
    if comm.allreduce(part, out=out) is not out or not (out == n * kept).all() or not (base == whole).all():
        faults.append(f"strided into strided: {out}")
    work = comm.allreduce(base[::2, ::-3], async_op=True)
    poison = [cupy.full(part.shape, -1, cupy.float32) for _ in range(64)]
    work.wait()
    whole[::2, ::-3] *= n
    faults += [] if (base == whole).all() else [f"strided asynchronous: {base}"]
    del poison
    gathered = comm.allgather(kept.T)
    if not all((block == kept.T).all() for block in gathered):
        faults.append(f"strided allgather: {gathered}")
    one, two = cupy.ones((8, 8), cupy.float32).T, cupy.ones(10, cupy.float32)
    comm.allreduce([one, two, two[:0]])
    with comm.group():
        comm.allreduce(one)
        comm.allreduce(two)
    if not ((one == n * n).all() and (two == n * n).all()):
        faults.append(f"strided in a list and a group: {one}, {two}")
    squeezed = cupy.ones((64, 64), cupy.float32).T
    comm.allreduce(squeezed, compression="int8")
    if abs(squeezed - n).max() > 0.05 * n:
        faults.append(f"strided and compressed: {squeezed}")
    told = cupy.full((6, 4), float(comm.rank), cupy.float32)[:, ::2]
    comm.broadcast(told, root=n - 1)
    faults += [] if (told == n - 1).all() else [f"strided broadcast: {told}"]
    got = cupy.zeros((4, 4), cupy.float32).T[::2]
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    comm.sendrecv(cupy.full((8, 2), comm.rank + 1, cupy.float32).T[:, ::2], after, got, before)
    faults += [] if (got == before + 1).all() else [f"strided sendrecv: {got}"]
    return faults


def _jax(comm: Any, cupy: Any) -> list[str]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return []
    with jax.default_device(jax.devices()[cupy.cuda.runtime.getDevice()]):
        x = jnp.ones(33, jnp.float32)
    if "cuda" not in str(x.device).lower():
        return []
    y = cupy.zeros(33, cupy.float32)
    comm.allreduce(x, out=y)
    faults = [] if bool((y == comm.size).all()) else [f"jax: {y[:3]}"]
    for name, new, shape in (
        ("allreduce", comm.allreduce(x), (33,)),
        ("started allreduce", comm.allreduce(x, async_op=True).wait(), (33,)),
        ("allgather", comm.allgather(x), (comm.size, 33)),
        ("broadcast", comm.broadcast(x), (33,)),
    ):
        want = comm.size if "allreduce" in name else 1
        if not isinstance(new, jax.Array) or new.shape != shape or not bool((new == want).all()):
            faults.append(f"jax {name}: {type(new)} {new}")
    return faults + _refused(lambda: comm.allreduce(y, out=x), "JAX array")


def _numba(comm: Any) -> list[str]:
    try:
        from numba import cuda
    except ImportError:
        return []
    x = cuda.to_device(np.ones(33, np.float32))
    comm.allreduce(x)
    return [] if x.copy_to_host().tolist() == [comm.size] * 33 else [f"numba: {x.copy_to_host()}"]


def _refused(call: Any, message: str) -> list[str]:
    try:
        call()
    except FlagcxError as error:
        return [] if message in str(error) else [f"expected {message!r} in {error}"]
    return [f"not refused: {message}"]


def own_operations() -> list[str]:
    """A ufunc that CuPy shares with NumPy, and a kernel of the caller's own."""
    import cupy

    comm = fc.init()
    x = cupy.full(101, 3.0 + comm.rank, cupy.float64)
    comm.allreduce(x, np.hypot if comm.rank else cupy.hypot)
    want = np.sqrt(sum((3.0 + q) ** 2 for q in range(comm.size)))
    faults = [] if bool(abs(x - want).max() < 1e-12) else [f"hypot: {x[:3]}, expected {want}"]
    kernel = cupy.ElementwiseKernel("T a, T b", "T c", "c = a + b - a * b", "flagcx_probabilities")
    y = cupy.full(101, 0.5, cupy.float64)
    for _ in range(5):
        y.fill(0.5)
        comm.allreduce(y, kernel, algorithm="ring")
    faults += [] if bool(abs(y - (1 - 0.5**comm.size)).max() < 1e-12) else [f"kernel: {y[:3]}"]
    return faults


def other_calls() -> list[str]:
    """v forms, transfers, groups, split, barrier, scaled sums and objects, on GPU arrays."""
    import cupy

    comm = fc.init()
    n, r, faults = comm.size, comm.rank, []

    def check(what: str, got: Any, want: Any) -> None:
        if cupy.asnumpy(got).tolist() != np.asarray(want).tolist():
            faults.append(f"{what}: got {got}, expected {want}")

    counts = [2 * q + 1 for q in range(n)]
    everything = np.concatenate([np.full(c, q) for q, c in enumerate(counts)])
    for algorithm in (None, "ring"):
        check("allgatherv", comm.allgatherv(cupy.full(counts[r], r), counts, algorithm=algorithm), everything)
        x = cupy.asarray(everything)
        own = np.full(counts[r], r * n)
        check("reduce_scatterv", comm.reduce_scatterv(x, counts, algorithm=algorithm), own)
    sent = [q + 1 for q in range(n)]
    x = cupy.concatenate([cupy.full(q + 1, 10 * r + q) for q in range(n)])
    want = np.concatenate([np.full(r + 1, 10 * q + r) for q in range(n)])
    check("alltoallv", comm.alltoallv(x, sent, [r + 1] * n), want)
    out = cupy.zeros(9)
    comm.sendrecv(cupy.full(9, float(r)), (r + 1) % n, out, (r - 1) % n)
    check("sendrecv", out, np.full(9, (r - 1) % n))
    small = [cupy.full(5 + i, float(i)) for i in range(6)]
    with comm.group():
        for array in small:
            comm.allreduce(array)
    for i, array in enumerate(small):
        check("group", array, np.full(5 + i, float(i * n)))
    half = comm.split(r % 2)
    members = [q for q in range(n) if q % 2 == r % 2]
    check("split", half.allreduce(cupy.full(3, float(r))), np.full(3, float(sum(members))))
    half.close()
    check("scaled", comm.allreduce(cupy.full(3, 2.0), fc.scaled_sum(0.25)), np.full(3, 0.5 * n))
    comm.barrier()
    return faults


def exception_in_a_group() -> list[str]:
    """A group that fails half way launches nothing, and the next one works."""
    import cupy

    comm = fc.init()
    n, r = comm.size, comm.rank
    x, y = cupy.full(8, r + 1.0), cupy.zeros(8)
    comm.allreduce(cupy.ones(3), algorithm="ring")
    link = comm._device.transport._communicator
    stream = cupy.cuda.get_current_stream().ptr
    right = [(True, 0, 0, 64, (r + 1) % n), (False, 1, 0, 64, (r - 1) % n)]
    memories = (x.data.ptr, y.data.ptr, 0, 0)

    def interrupted() -> Any:
        yield right[0]
        raise KeyboardInterrupt

    for moves, error in (
        ([right[0], (True, 0, 0, 64, n + 5)], Exception),
        (interrupted(), KeyboardInterrupt),
    ):
        try:
            link.group(moves, memories, stream)
            return ["no exception"]
        except error:
            pass
    link.group(right, memories, stream)
    got = y.get()
    return [] if got.tolist() == [(r - 1) % n + 1.0] * 8 else [f"got {got}"]


def device_memory_and_threads_stay_in_order() -> list[str]:
    """A communicator that is closed gives up its graphs, and a new one works."""
    import cupy

    comm = fc.init()
    child = comm.split(0)
    x = cupy.ones(100)
    for _ in range(5):
        child.allreduce(x, algorithm="ring")
    child.close()
    faults = _refused(lambda: child.allreduce(x, algorithm="ring"), "closed")
    y = comm.allreduce(cupy.ones(4))
    return faults + ([] if y.get().tolist() == [comm.size] * 4 else ["the parent"])


def killed(victim: int, waits_in: str, path: str) -> None:
    """One rank is killed; the others are inside an all-reduce. Each writes when and how it ended."""
    import cupy

    comm = fc.init()
    x = cupy.ones(1 << 20, cupy.float32)
    for _ in range(5):
        comm.allreduce(x, algorithm="ring")
    cupy.cuda.get_current_stream().synchronize()
    comm.barrier()
    start = time.time()
    if comm.rank == victim:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = "nothing was raised"
    try:
        work = comm.allreduce(x, algorithm="ring", async_op=True)
        if waits_in == "work":
            work.synchronize()
        else:
            cupy.cuda.Device().synchronize()
            comm.allreduce(x, algorithm="ring")
    except CommunicationError as error:
        outcome = f"{type(error).__name__}: {error}"
    with open(f"{path}.{comm.rank}", "w") as file:
        file.write(f"{time.time() - start:.2f}\n{outcome}")
    sys.stdout.flush()


def absent(path: str) -> None:
    """One rank stays away from an all-reduce and lives on; the time-out ends the others."""
    import cupy

    comm = fc.init(timeout_s=4.0)
    x = cupy.ones(1000, cupy.float32)
    comm.allreduce(x, algorithm="ring")
    cupy.cuda.get_current_stream().synchronize()
    start, outcome = time.time(), "nothing was raised"
    try:
        if comm.rank == 1:
            time.sleep(6.0)
        comm.allreduce(x, algorithm="ring", async_op=True).synchronize()
    except FlagcxError as error:
        outcome = f"{type(error).__name__}: {error}"
    with open(f"{path}.{comm.rank}", "w") as file:
        file.write(f"{time.time() - start:.2f}\n{outcome}")


def mismatched() -> str:
    """Debug mode with one rank that passes another count: what is raised."""
    import cupy

    comm = fc.init(debug="check")
    comm.allreduce(cupy.ones(10))
    try:
        comm.allreduce(cupy.ones(11 if comm.rank == 1 else 10))
    except FlagcxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def unshared() -> str:
    """Ranks on one GPU that were not allowed to share it: what is raised."""
    import cupy

    comm = fc.init(share_gpu=False)
    cupy.cuda.Device(0).use()
    try:
        comm.allreduce(cupy.ones(10))
    except FlagcxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def bound_to_its_own_gpu() -> list[str]:
    """Ranks with a GPU each: the device that init made current, sums, and an array on another one's."""
    import cupy

    comm = fc.init()
    device = cupy.cuda.runtime.getDevice()
    faults = [] if device == comm.rank else [f"rank {comm.rank} is bound to device {device}"]
    total = comm.allreduce(cupy.full(1000, comm.rank + 1.0))
    if not (total == comm.size * (comm.size + 1) / 2).all():
        faults.append(f"wrong sum on device {device}: {total[:3]}")
    with cupy.cuda.Device((device + 1) % comm.size):
        elsewhere = cupy.ones(10)
        try:
            comm.allreduce(elsewhere)
            faults.append("a current device of another rank was accepted")
        except FlagcxError as error:
            faults += [] if f"uses device {device}" in str(error) else [f"unclear: {error}"]
    topology = fc.get_topology()
    peers = {*topology["nvlink_peers"][device], *topology["pcie_peers"][device]}
    if sorted(peers) != [d for d in range(comm.size) if d != device]:
        faults.append(f"GPU {device} has the peers {peers}")
    return faults


def an_array_on_another_gpu() -> str:
    """What is raised for an array of another device than the rank's."""
    import cupy

    comm = fc.init()
    device = cupy.cuda.runtime.getDevice()
    comm.allreduce(cupy.ones(10))
    with cupy.cuda.Device((device + 1) % comm.size):
        elsewhere = cupy.ones(10)
    try:
        comm.allreduce(elsewhere)
    except FlagcxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def digits_learnt() -> list[str]:
    """The example's training, on GPU arrays and on NumPy arrays."""
    import cupy

    path = os.path.join(os.path.dirname(__file__), os.pardir, os.pardir, "examples")
    sys.path.insert(0, path)
    import train_digits

    comm = fc.init()
    learnt = []
    for xp in (cupy, np):
        (pixels, labels), _ = train_digits.load_pictures(xp, 0)
        steps = list(train_digits.batches(len(pixels), 64, 5, 0))
        network = train_digits.Network(xp, 0)
        train_digits.train(comm, network, pixels, labels, 0.1, steps)
        learnt.append(cupy.asnumpy(network.parameters))
    apart = float(np.abs(learnt[0] - learnt[1]).max())
    return [] if apart < 1e-3 else [f"parameters differ by {apart}"]


def stream_argument() -> list[str]:
    """Calls on a stream that is given, whose arrays are dropped at once."""
    import cupy

    comm = fc.init()
    stream = cupy.cuda.Stream(non_blocking=True)
    total, results = comm.size * (comm.size + 1) / 2, []
    for i in range(1, 20):
        with stream:
            x = cupy.full(30000, (comm.rank + 1.0) * i)
        results.append(comm.allreduce(x, out=cupy.empty(30000), algorithm="two_shot", stream=stream))
        del x
    gathered = comm.allgather(results[0], stream=stream)
    stream.synchronize()
    faults = [f"call {i}" for i, y in enumerate(results, 1) if not bool((y == total * i).all())]
    faults += [] if bool((gathered == total).all()) else ["allgather"]
    return faults + _refused(lambda: comm.allreduce(np.ones(3), stream=stream), "for arrays on a GPU")
