"""What each rank does in the tests of arrays that are not contiguous: every call, as on plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import flagcx as fc
from tests.communicator.oracle import assert_same

SHAPE = (6, 4, 3)  # for 2 and 3 ranks: the first axis is a multiple of both
DTYPES = tuple(map(np.dtype, (np.float32, np.int64, np.complex128, np.bool_, ml_dtypes.bfloat16, "int8")))


def _plain(values: np.ndarray) -> np.ndarray:
    return values.copy()


def _fortran(values: np.ndarray) -> np.ndarray:
    return np.asfortranarray(values)


def _strided(values: np.ndarray) -> np.ndarray:
    wide = np.ones([2 * n + 1 for n in values.shape], values.dtype)
    part = wide[tuple(slice(1, None, 2) for _ in values.shape)]
    part[...] = values
    return part


def _backward(values: np.ndarray) -> np.ndarray:
    back = (slice(None, None, -1),) * values.ndim
    return values[back].copy()[back]


def _misaligned(values: np.ndarray) -> np.ndarray:
    raw = np.zeros(values.nbytes + 1, np.uint8)
    moved = raw[1:].view(values.dtype).reshape(values.shape)
    moved[...] = values
    return moved


LAYOUTS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (_plain, _fortran, _strided, _backward, _misaligned)


def _values(rank: int, dtype: np.dtype, shape: tuple[int, ...], salt: int = 0) -> np.ndarray:
    numbers = np.arange(int(np.prod(shape))) * 5 + 3 * rank + salt
    return (numbers % 2 if dtype == np.bool_ else numbers % 7).reshape(shape).astype(dtype)


def _unread(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _calls(comm: Any, dtype: np.dtype) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every call, as a function of a layout and ``async_op``, that returns a list of results."""
    rank, n = comm.rank, comm.size
    block = SHAPE[0] // n, *SHAPE[1:]
    flat = SHAPE[0] * SHAPE[1] * SHAPE[2]
    op = "lor" if dtype == np.bool_ else "sum"

    def x(to: Callable, shape: tuple[int, ...] = SHAPE, salt: int = 0) -> np.ndarray:
        return to(_values(rank, dtype, shape, salt))

    def ends(work: Any, *kept: Any) -> list[Any]:
        value = work.wait() if isinstance(work, fc.Work) else work
        return [value, *kept]

    def plain_calls(name: str, shape: tuple[int, ...], **more: Any) -> Iterator[tuple[str, Callable]]:
        method = getattr(comm, name)

        def new(to: Callable, **how: Any) -> list[Any]:
            return ends(method(_unread(x(to)), **more, **how))

        def given(to: Callable, **how: Any) -> list[Any]:
            out = x(to, shape, 1)
            result = ends(method(_unread(x(to)), out=out, **more, **how), out)
            assert result[0] is out or result[0] is None
            return result[1:]

        if name not in ("allreduce", "reduce"):
            yield name, new
        yield f"{name} out", given

    yield from plain_calls("allreduce", SHAPE, op=op)
    yield from plain_calls("allgather", (n, *SHAPE))
    yield from plain_calls("reduce_scatter", block, op=op)
    yield from plain_calls("alltoall", SHAPE)
    yield from plain_calls("gather", (n, *SHAPE), root=n - 1)
    yield from plain_calls("reduce", SHAPE, root=n - 1, op=op)

    def in_place(to: Callable, **how: Any) -> list[Any]:
        array = x(to)
        return ends(comm.allreduce(array, op, **how), array)

    def onto_itself(to: Callable, **how: Any) -> list[Any]:
        array = x(to)
        return ends(comm.allreduce(array, op, out=array[...], **how), array)

    def backward_onto_itself(to: Callable, **how: Any) -> list[Any]:
        array = x(to)
        return ends(comm.alltoall(array[::-1], out=array, **how), array)

    def reduce_in_place(to: Callable, **how: Any) -> list[Any]:
        array = x(to)
        return ends(comm.reduce(array, op, root=0, **how), array)[1:]

    def broadcast(to: Callable, **how: Any) -> list[Any]:
        array = x(to) if rank else _unread(x(to))
        return ends(comm.broadcast(array, root=0, **how), array)

    def scatter(to: Callable, **how: Any) -> list[Any]:
        out = x(to, block, 1)
        given = _unread(x(to)) if rank == 0 else None
        return ends(comm.scatter(given, root=0, out=out, **how), out)

    def many(to: Callable, **how: Any) -> list[Any]:
        arrays = [x(to, (5, 3)), x(_plain, (7,)), x(to, (4, 2), 1), x(to, (9, 1), 2)]
        return [*ends(comm.allreduce(arrays, op, **how))[0], *arrays]

    def many_out(to: Callable, **how: Any) -> list[Any]:
        arrays, outs = [x(to, (5, 3)), x(_plain, (7,))], [x(_plain, (5, 3), 1), x(to, (7,), 2)]
        return [*ends(comm.allreduce(arrays, op, out=outs, **how))[0], *arrays, *outs]

    def exchange(to: Callable, **how: Any) -> list[Any]:
        out = x(to, (4, 5), 3)
        work = comm.sendrecv(_unread(x(to, (4, 5))), (rank + 1) % n, out, (rank - 1) % n, **how)
        return ends(work, out)

    def swap(to: Callable, **how: Any) -> list[Any]:
        array = x(to, (4, 5))
        return ends(comm.sendrecv(array, (rank + 1) % n, array, (rank - 1) % n, **how), array)

    def hand_on(to: Callable, **how: Any) -> list[Any]:
        out = x(to, (4, 5), 3)
        if rank == 0:
            return ends(comm.send(_unread(x(to, (4, 5))), 1, **how))
        return ends(comm.recv(out, 0, **how), out) if rank == 1 else []

    def gatherv(to: Callable, **how: Any) -> list[Any]:
        counts = [q + 2 for q in range(n)]
        out = x(to, (sum(counts),), 4)
        work = comm.allgatherv(_unread(x(to, (rank + 2,))), counts, out=out, **how)
        return ends(work, out)

    def alltoallv(to: Callable, **how: Any) -> list[Any]:
        sent, received = [q + rank for q in range(n)], [rank + q for q in range(n)]
        out = x(to, (sum(received),), 4)
        return ends(comm.alltoallv(_unread(x(to, (sum(sent),))), sent, received, out=out, **how), out)

    def grouped(to: Callable, **how: Any) -> list[Any]:
        one, two, three, out = x(to), x(_plain, (5,)), x(to, (4, 5)), x(to, (4, 5), 1)
        gathered = x(to, (n, flat), 2)
        with comm.group():
            comm.allreduce(one, op)
            comm.allreduce(two, op)
            comm.allgather(x(to, (flat,)), out=gathered)
            comm.send(three, (rank + 1) % n)
            comm.recv(out, (rank - 1) % n)
        return [one, two, gathered, out]

    yield from (
        (call.__name__, call)
        for call in (
            *(
                in_place,
                onto_itself,
                backward_onto_itself,
                reduce_in_place,
                broadcast,
                scatter,
                many,
                many_out,
            ),
            *(exchange, swap, hand_on, gatherv, alltoallv, grouped),
        )
    )

    if dtype == np.float32:

        def compressed(to: Callable, **how: Any) -> list[Any]:
            array = x(to)
            return ends(comm.allreduce(array, compression="int8", **how), array)

        yield "compressed", compressed


def check_layouts() -> int:
    """Every call with every layout, another one on every rank, gives what plain arrays give."""
    comm, done = fc.init(), 0
    for dtype in DTYPES:
        for name, call in _calls(comm, dtype):
            expected = call(_plain)
            for k, _ in enumerate(LAYOUTS):
                layout = LAYOUTS[(comm.rank + k) % len(LAYOUTS)]
                for how in ({}, {"async_op": True}):
                    what = f"{name} of {dtype} laid out {layout.__name__} {how} on rank {comm.rank}"
                    found = call(layout, **how)
                    assert len(found) == len(expected), what
                    for one, other in zip(found, expected, strict=True):
                        assert (one is None) == (other is None), what
                        if one is not None:
                            assert_same(np.ascontiguousarray(one), other, what)
                    done += 1
    return done


def check_overlaps() -> None:
    """Arrays that overlap are reduced in the order of the list, with strides or without."""
    comm = fc.init()
    n = comm.size
    x = np.ones(12)
    comm.allreduce([x, x[::2], x[1::2], x[::-3]])
    expected = np.full(12, n * n)
    expected[11::-3] *= n
    np.testing.assert_array_equal(x, expected)
    y = np.ones((4, 4))
    comm.allreduce([y.T, y.T])
    np.testing.assert_array_equal(y, np.full((4, 4), n * n))
    beside = np.ones(12)
    comm.allreduce([beside[::2], beside[1::2]])
    np.testing.assert_array_equal(beside, np.full(12, n))
    comm.allreduce(x[:0:-1])
    empty = np.ones((3, 0, 2)).T
    assert comm.allreduce(empty) is empty


def check_quick_path() -> None:
    """A strided array does not take the way of a contiguous one of its shape, nor the other way round."""
    comm = fc.init()
    for _ in range(3):
        for x in (np.ones(6), np.ones(12)[::2], np.ones(6)):
            assert comm.allreduce(x) is x
            np.testing.assert_array_equal(x, np.full(6, comm.size))
            got = np.full((12, 2), -1.0)[::2, 1] if comm.rank else np.ones(12)[::2]
            got[...] = 7.0 if comm.rank == 0 else 0.0
            assert comm.broadcast(got) is got
            np.testing.assert_array_equal(got, np.full(6, 7.0))
            plain = np.full(6, float(comm.rank == 0))
            assert comm.broadcast(plain) is plain
            np.testing.assert_array_equal(plain, np.ones(6))


def check_shapes() -> None:
    """Shapes may differ between ranks, as long as the counts do not: elements meet in the order of C."""
    comm = fc.init()
    for shape in ((20,), (4, 5), (2, 5, 2)):
        x = np.arange(20.0).reshape((20,) if comm.rank else shape)
        for _ in range(2):
            got = comm.allreduce(x, out=np.empty_like(x))
            np.testing.assert_array_equal(got.reshape(-1), np.arange(20.0) * comm.size)
