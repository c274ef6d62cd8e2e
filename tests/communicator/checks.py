"""What each rank does in the tests of the collectives. Run by ``test_collectives.py`` on many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

import flagcx as fc
from flagcx.algorithms import entries
from flagcx.dtypes import DTYPES, OPS
from tests.communicator.oracle import assert_same, contribution, reduced

POISON = 113
T = TypeVar("T")


def counts_for(size: int) -> list[int]:
    return sorted({0, 1, max(size - 1, 0), size, size + 1, 17, 1009})


def _poisoned(count: int, dtype) -> np.ndarray:
    return np.full(count, POISON % 2 if np.dtype(dtype) == np.bool_ else POISON).astype(dtype)


def in_turn(values: Sequence[T], size: int, number: int, few: int = 1) -> Sequence[T]:
    """All values on up to three ranks; on more ``few`` of them, others each time."""
    return values if size <= 3 else [values[(few * number + i) % len(values)] for i in range(few)]


def check_allreduce_dtypes(counts: Sequence[int] = ()) -> int:
    """Every dtype with every operation that it has; of these counts, or of some that matter."""
    comm, done = fc.init(), 0
    both = [(dtype, op) for dtype in DTYPES.values() for op in OPS.values() if dtype.kind in op.kinds]
    for number, (dtype, op) in enumerate(both):
        for count in counts or in_turn(counts_for(comm.size), comm.size, number, few=2):
            expected = reduced(comm.size, count, dtype.numpy, op.name)
            what = f"allreduce {dtype.name} {op.name} count {count} of {comm.size}"
            x = contribution(comm.rank, count, dtype.numpy, op.name)
            for _ in range(2):  # the second goes the quick way
                out = _poisoned(count, dtype.numpy)
                assert comm.allreduce(x, op.name, out=out) is out
                assert_same(x, contribution(comm.rank, count, dtype.numpy, op.name), what + " (x kept)")
                assert_same(out, expected, what + " out of place")
            room = _poisoned(count + 1, dtype.numpy)
            room[:count] = x
            comm.allreduce(room[:count], op.name, out=room[1:])
            assert_same(room[1:], expected, what + " into an array that overlaps")
            for _ in range(2):  # the second goes the quick way
                x = contribution(comm.rank, count, dtype.numpy, op.name)
                assert comm.allreduce(x, op.name) is x
                assert_same(x, expected, what)
            done += 1
    return done


def check_allreduce_algorithms() -> int:
    """Every algorithm, over counts up to 1e6, for both placements and views with an offset."""
    comm, done = fc.init(), 0
    for entry in entries("allreduce"):
        if not entry.allows(comm.size):
            continue
        for number, count in enumerate([*counts_for(comm.size), *([100_003] if comm.size <= 9 else [])]):
            kinds = (np.float32, "sum"), (np.int64, "max"), (np.float16, "avg")
            for dtype, op in in_turn(kinds, comm.size, number):
                what = f"allreduce by {entry.algorithm} {np.dtype(dtype)} count {count} of {comm.size}"
                expected = reduced(comm.size, count, dtype, op)
                holder = _poisoned(count + 3, dtype)
                x = holder[3:]
                x[...] = contribution(comm.rank, count, dtype, op)
                comm.allreduce(x, op, algorithm=entry.algorithm)
                assert_same(x, expected, what)
                assert_same(holder[:3], _poisoned(3, dtype), what + " (beside)")
                x[...] = contribution(comm.rank, count, dtype, op)
                out = comm.allreduce(x, op, out=_poisoned(count, dtype), algorithm=str(entry.algorithm))
                assert_same(out, expected, what + " out of place")
                done += 1
    return done


def check_allreduce_large() -> int:
    """Sizes for which the transport goes other ways; private and shared arrays, and both at once."""
    comm, done = fc.init(), 0
    few = comm.size > 4
    for count in (20_000, 1_100_003) if few else (5_000, 65_536, 100_000, 1_000_003, 1_200_007):
        for dtype, op in ((np.float32, "sum"), (np.float16, "avg"))[: 1 if few else 2]:
            expected = reduced(comm.size, count, dtype, op)
            for shared in (set(), set(range(comm.size)), {0}, set(range(1, comm.size))):
                make = comm.empty if comm.rank in shared else np.empty
                what = f"allreduce {np.dtype(dtype)} {op} count {count} shared on {sorted(shared)}"
                x, out = make(count, dtype), make(count, dtype)
                for _ in range(2):
                    x[...] = contribution(comm.rank, count, dtype, op)
                    comm.allreduce(x, op)
                    assert_same(x, expected, what)
                x[...] = contribution(comm.rank, count, dtype, op)
                out[...] = 0
                comm.allreduce(x, op, out=out)
                assert_same(out, expected, what + " out of place")
                assert_same(x, contribution(comm.rank, count, dtype, op), what + " (x kept)")
                done += 1
    return done


def check_others() -> int:
    """Every other collective by every algorithm; on up to three ranks with every root."""
    comm, done = fc.init(), 0
    roots = range(comm.size) if comm.size <= 5 else sorted({0, comm.size // 2, comm.size - 1})
    for number, count in enumerate([*counts_for(comm.size), 20_011]):
        dtypes = in_turn((np.float32, np.complex128), comm.size, number)
        for dtype in dtypes if count < 2_000 else (np.float32,):
            for name in ("reduce", "broadcast", "gather", "scatter"):
                for at, entry in enumerate(entries(name)):
                    for root in in_turn(roots, comm.size, number + at) if entry.allows(comm.size) else ():
                        _ROOTED[name](comm, count, dtype, root, entry.algorithm)
                        done += 1
            for name in ("allgather", "reduce_scatter", "alltoall"):
                for entry in entries(name):
                    if entry.allows(comm.size):
                        _UNROOTED[name](comm, count, dtype, entry.algorithm)
                        done += 1
    return done


def _reduce(comm, count, dtype, root, algorithm) -> None:
    what = f"reduce {np.dtype(dtype)} count {count} root {root} of {comm.size} by {algorithm}"
    x = contribution(comm.rank, count, dtype)
    result = comm.reduce(x, root=root, algorithm=algorithm)
    if comm.rank == root:
        assert result is x
        assert_same(x, reduced(comm.size, count, dtype), what)
    else:
        assert result is None
        assert_same(x, contribution(comm.rank, count, dtype), what + " (x kept)")
    out = _poisoned(count, dtype) if comm.rank == root else None
    comm.reduce(contribution(comm.rank, count, dtype), root=root, out=out, algorithm=algorithm)
    if out is not None:
        assert_same(out, reduced(comm.size, count, dtype), what + " out of place")


def _broadcast(comm, count, dtype, root, algorithm) -> None:
    x = contribution(root, count, dtype) if comm.rank == root else _poisoned(count, dtype)
    assert comm.broadcast(x, root, algorithm=algorithm) is x
    what = f"broadcast {np.dtype(dtype)} count {count} root {root} of {comm.size} by {algorithm}"
    assert_same(x, contribution(root, count, dtype), what)


def _blocks(comm, count, dtype) -> np.ndarray:
    return np.concatenate([contribution(q, count, dtype) for q in range(comm.size)])


def _gather(comm, count, dtype, root, algorithm) -> None:
    what = f"gather {np.dtype(dtype)} count {count} root {root} of {comm.size} by {algorithm}"
    result = comm.gather(contribution(comm.rank, count, dtype), root, algorithm=algorithm)
    if comm.rank != root:
        assert result is None
        return
    assert result.shape == (comm.size, count)
    assert_same(result, _blocks(comm, count, dtype), what)


def _scatter(comm, count, dtype, root, algorithm) -> None:
    what = f"scatter {np.dtype(dtype)} count {count} root {root} of {comm.size} by {algorithm}"
    x = _blocks(comm, count, dtype) if comm.rank == root else None
    out = _poisoned(count, dtype)
    assert comm.scatter(x, root, out=out, algorithm=algorithm) is out
    assert_same(out, contribution(comm.rank, count, dtype), what)


def _allgather(comm, count, dtype, algorithm) -> None:
    what = f"allgather {np.dtype(dtype)} count {count} of {comm.size} by {algorithm}"
    result = comm.allgather(contribution(comm.rank, count, dtype), algorithm=algorithm)
    assert_same(result, _blocks(comm, count, dtype), what)
    out = _poisoned(count * comm.size, dtype)
    own = out[comm.rank * count : (comm.rank + 1) * count]
    own[...] = contribution(comm.rank, count, dtype)
    comm.allgather(own, out=out, algorithm=algorithm)
    assert_same(out, _blocks(comm, count, dtype), what + " in place")


def _reduce_scatter(comm, count, dtype, algorithm) -> None:
    what = f"reduce_scatter {np.dtype(dtype)} count {count} of {comm.size} by {algorithm}"
    x = contribution(comm.rank, count * comm.size, dtype)
    expected = reduced(comm.size, count * comm.size, dtype)[comm.rank * count : (comm.rank + 1) * count]
    assert_same(comm.reduce_scatter(x, algorithm=algorithm), expected, what)
    assert_same(x, contribution(comm.rank, count * comm.size, dtype), what + " (x kept)")
    own = x[comm.rank * count : (comm.rank + 1) * count]
    comm.reduce_scatter(x, out=own, algorithm=algorithm)
    assert_same(own, expected, what + " in place")


def _alltoall(comm, count, dtype, algorithm) -> None:
    what = f"alltoall {np.dtype(dtype)} count {count} of {comm.size} by {algorithm}"

    def sent(a: int, b: int) -> np.ndarray:
        return contribution(a, count, dtype, offset=b * 1000)

    x = np.concatenate([sent(comm.rank, q) for q in range(comm.size)])
    expected = np.concatenate([sent(q, comm.rank) for q in range(comm.size)])
    assert_same(comm.alltoall(x, algorithm=algorithm), expected, what)
    comm.alltoall(x, out=x, algorithm=algorithm)
    assert_same(x, expected, what + " onto itself")


_ROOTED = {"reduce": _reduce, "broadcast": _broadcast, "gather": _gather, "scatter": _scatter}
_UNROOTED = {"allgather": _allgather, "reduce_scatter": _reduce_scatter, "alltoall": _alltoall}


def check_uneven() -> int:
    """The v forms, with counts that differ and some of 0, by every algorithm that serves them."""
    comm, done = fc.init(), 0
    size, rank = comm.size, comm.rank
    for sizes in ([(q * 5) % 7 for q in range(size)], [3 if q == size - 1 else 0 for q in range(size)]):
        whole = np.concatenate([contribution(q, sizes[q], np.int32) for q in range(size)])
        start = sum(sizes[:rank])
        mine = slice(start, start + sizes[rank])
        for entry in (e for e in entries("allgather") if e.uneven and e.allows(size)):
            x = contribution(rank, sizes[rank], np.int32)
            assert_same(comm.allgatherv(x, sizes, algorithm=entry.algorithm), whole, "allgatherv")
            assert_same(comm.allgatherv(x), whole, "allgatherv without counts")
            for at in (start, min(rank * sizes[rank], sum(sizes) - sizes[rank])):  # its block, and another
                out = _poisoned(sum(sizes), np.int32)
                own = out[at : at + sizes[rank]]
                own[...] = x
                comm.allgatherv(own, sizes, out=out, algorithm=entry.algorithm)
                assert_same(out, whole, f"allgatherv from {at} of its own result")
            done += 1
        for entry in (e for e in entries("reduce_scatter") if e.uneven and e.allows(size)):
            x = contribution(rank, sum(sizes), np.int32)
            expected = reduced(size, sum(sizes), np.int32)[mine]
            assert_same(
                comm.reduce_scatterv(x, sizes, algorithm=entry.algorithm), expected, "reduce_scatterv"
            )
            done += 1
        for root in range(size):
            for entry in (e for e in entries("gather") if e.uneven and e.allows(size)):
                x = contribution(rank, sizes[rank], np.int32)
                result = comm.gatherv(x, sizes, root, algorithm=entry.algorithm)
                if rank == root:
                    assert_same(result, whole, "gatherv")
            for entry in (e for e in entries("scatter") if e.uneven and e.allows(size)):
                x = whole if rank == root else None
                part = comm.scatterv(x, sizes, root, dtype=np.int32, algorithm=entry.algorithm)
                assert_same(part, whole[mine], "scatterv")
                done += 1
    for entry in (e for e in entries("alltoall") if e.uneven and e.allows(size)):
        sent = [(rank + 2 * q) % 4 for q in range(size)]
        x = np.concatenate([contribution(rank, c, np.int32, offset=9 * q) for q, c in enumerate(sent)])
        received = [contribution(q, (q + 2 * rank) % 4, np.int32, offset=9 * rank) for q in range(size)]
        result = comm.alltoallv(x, sent, algorithm=entry.algorithm)
        assert_same(result, np.concatenate(received), "alltoallv")
        room = _poisoned(len(x) + len(result), np.int32)
        x, out = room[: len(x)], room[len(x) // 2 : len(x) // 2 + len(result)]
        x[...] = np.concatenate([contribution(rank, c, np.int32, offset=9 * q) for q, c in enumerate(sent)])
        comm.alltoallv(x, sent, out=out, algorithm=entry.algorithm)
        assert_same(out, np.concatenate(received), "alltoallv into part of what it sends")
        done += 1
    return done


def check_back_to_back(calls: int = 1500) -> int:
    """Calls of all sizes and ways, one after the other, with ranks out of step: slots are used again and
    again, and none may be written before all have read it."""
    import time

    comm = fc.init()
    same = np.random.default_rng(5)  # the same draws on every rank
    own = np.random.default_rng(100 + comm.rank)
    counts = (3, 1_000, 9_000, 20_000, 60_000, 65_536, 70_000, 200_000)
    shared = comm.empty(max(counts), np.float32)
    private = np.empty(max(counts), np.float32)
    for i in range(calls):
        count = int(same.choice(counts, p=(0.2, 0.2, 0.15, 0.15, 0.1, 0.1, 0.05, 0.05)))
        x = (shared if same.random() < 0.3 else private)[:count]
        algorithm = same.choice(["two_shot", "two_shot", "ring", None])
        x[...] = (comm.rank + 1) * (i + 1) % 1000
        x[-1] = comm.rank + i % 7
        if own.random() < 0.05:
            time.sleep(own.random() * 2e-3)
        comm.allreduce(x, algorithm=algorithm)
        value = sum((q + 1) * (i + 1) % 1000 for q in range(comm.size))
        assert (x[:-1] == value).all(), f"call {i} of {count} by {algorithm}"
        assert x[-1] == sum(q + i % 7 for q in range(comm.size)), f"call {i} of {count} by {algorithm}"
    return calls


def check_bits() -> str:
    """Sums that round: the same bits on every rank. Returns a digest of them."""
    import hashlib

    comm = fc.init()
    random = np.random.default_rng(comm.rank)
    digest = hashlib.sha256()
    for count in (100, 5_000, 50_000, 3_000_000):
        for dtype in (np.float32, np.float16):
            x = random.standard_normal(count).astype(dtype)
            digest.update(comm.allreduce(x).tobytes())
            shared = comm.empty(count, dtype)
            shared[...] = random.standard_normal(count)
            digest.update(comm.allreduce(shared).tobytes())
    return digest.hexdigest()
