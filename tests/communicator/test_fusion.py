"""Many arrays in one call or group: right results in the very arrays, in few messages."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from flagcx.fusion.fuse import HostPacker, cut_into_messages
from flagcx.fusion.limits import Limits
from tests.ranks import run_ranks

DTYPES = ("float32", "int64", "float16", "complex64", "uint8", "bool", "float64", "bfloat16", "float8_e4m3fn")
SHAPES = ((5,), (3, 7), (), (0,), (2, 3, 4), (1,), (1000,))


def values(rank: int, i: int, shape: tuple[int, ...], dtype) -> np.ndarray:
    """Small whole numbers that differ in every (rank, array, index), exact in every dtype."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 3 + 2 * i + rank) % 5).reshape(shape).astype(dtype)


def arrays_and_sums(comm, many: int = 1):
    """Arrays of all dtypes and shapes of this rank, and the sums over all ranks."""
    import ml_dtypes

    kinds = [np.dtype(getattr(ml_dtypes, d, d)) for d in DTYPES]
    wanted = [(shape, kind) for _ in range(many) for shape in SHAPES for kind in kinds]
    mine = [values(comm.rank, i, *each) for i, each in enumerate(wanted)]
    sums = []
    for i, (shape, kind) in enumerate(wanted):
        total = values(0, i, shape, kind)
        for rank in range(1, comm.size):
            total = total + values(rank, i, shape, kind)
        sums.append(np.asarray(total))
    return mine, sums


def check(got, want) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a.astype(complex), b.astype(complex), err_msg=f"array {i}")


def _lists_and_groups() -> None:
    comm = fc.init()
    arrays, sums = arrays_and_sums(comm)
    assert comm.allreduce(arrays) is arrays
    check(arrays, sums)

    arrays, _ = arrays_and_sums(comm)
    with comm.group():
        for array in arrays:
            assert comm.allreduce(array) is array
        assert arrays[0][1] == values(comm.rank, 0, (5,), "float32")[1], "a group runs at its end"
    check(arrays, sums)

    arrays, _ = arrays_and_sums(comm)
    results = [np.empty_like(array) for array in arrays]
    assert comm.allreduce(tuple(arrays), out=results) is results
    check(results, sums)
    check(arrays, arrays_and_sums(comm)[0])

    arrays, _ = arrays_and_sums(comm)
    work = comm.allreduce(arrays, async_op=True)
    assert work.wait() is arrays
    check(arrays, sums)
    assert comm.allreduce([]) == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_dtypes_and_shapes(size):
    run_ranks(_lists_and_groups, size)


def _one_by_one() -> None:
    comm = fc.init()
    for _ in range(2):  # the second time by the quick path
        arrays, sums = arrays_and_sums(comm)
        check([comm.allreduce(array, out=np.empty_like(array)) for array in arrays], sums)
        check([comm.allreduce(array) for array in arrays], sums)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_single_arrays_of_any_shape(size):
    run_ranks(_one_by_one, size)


def _into_other_shapes() -> None:
    comm = fc.init()
    for shapes in (((3, 4), 12), ((2, 3, 2), (12,)), ((12,), (3, 4)), ((12,), (12, 1))):
        for order in ("C", "F"):
            for whole in (True, False):
                arrays = [np.asarray(np.full(shapes[0], comm.rank + i), order=order) for i in range(4)]
                outs = [np.zeros(shapes[1], int) if whole else np.zeros(24, int)[::2] for _ in arrays]
                for _ in range(2):
                    got = comm.allreduce(arrays, out=outs)
                for i, (result, out) in enumerate(zip(got, outs, strict=True)):
                    assert result is out and (out == comm.size * i + sum(range(comm.size))).all()


def test_results_may_have_any_shape_with_as_many_elements():
    run_ranks(_into_other_shapes, 2)


def _messages(count: int) -> None:
    comm = fc.init()
    arrays = [np.full(1 + i % 300, i % 7, (np.float32, np.int64, np.float64)[i % 3]) for i in range(count)]
    comm.barrier()
    comm.profiler.clear()
    comm.allreduce(arrays)
    with comm.group():
        for array in arrays:
            comm.allreduce(array, "max")
    made = [r for r in comm.profiler.records() if r.operation.collective == "allreduce"]
    assert len(made) == 6, [r.operation for r in made]
    assert sum(r.operation.nbytes for r in made) == 2 * sum(a.nbytes for a in arrays)
    for i, array in enumerate(arrays):
        assert (array == i % 7 * comm.size).all()


def test_a_message_for_each_dtype_and_operation():
    run_ranks(_messages, 2, 1000)


def _large_ones_go_alone() -> None:
    comm = fc.init()
    sizes = (10, 1 << 20, 10, 300_000, 400_000, 10, 1 << 22, 7)
    arrays = [np.arange(n, dtype=np.float32) % 1000 + i + comm.rank for i, n in enumerate(sizes)]
    comm.allreduce(arrays)
    for i, array in enumerate(arrays):
        want = comm.size * (np.arange(array.size) % 1000 + i) + comm.size * (comm.size - 1) // 2
        np.testing.assert_array_equal(array, want)


def test_large_and_small_arrays():
    run_ranks(_large_ones_go_alone, 3)


def _overlapping() -> None:
    comm = fc.init()
    x = np.arange(1.0, 101.0)
    same = np.ones(4, np.float32)
    with comm.group():
        comm.allreduce(x[:50])
        comm.allreduce(x[25:75], "avg")
        comm.allreduce(same)
        comm.allreduce(same)
        comm.allreduce(x[40:60])
    n = comm.size
    want = np.arange(1.0, 101.0)
    want[:50] *= n
    want[40:60] *= n
    np.testing.assert_array_equal(x, want)
    assert (same == n * n).all()
    source = np.full(6, 2.0)
    twice = comm.allreduce([source, source], out=[np.empty(6), np.empty(6)])
    assert all((result == 2 * n).all() for result in twice) and (source == 2).all()


def test_arrays_that_overlap_are_reduced_one_after_the_other():
    run_ranks(_overlapping, 3)


def _views_of_one_array() -> None:
    comm = fc.init()
    flat = np.arange(60, dtype=np.float32) + comm.rank
    parts = [flat[i : i + 6].reshape(2, 3) for i in range(0, 60, 6)]
    comm.profiler.clear()
    comm.allreduce(parts)
    n = comm.size
    np.testing.assert_array_equal(flat, n * np.arange(60) + n * (n - 1) // 2)
    assert len(comm.profiler.records()) == 1


def test_views_beside_each_other_are_fused():
    run_ranks(_views_of_one_array, 2)


def _mixed_group() -> None:
    comm = fc.init()
    a, b, c = np.full(3, 1.0 + comm.rank), np.full(4, float(comm.rank)), np.full(5, 2.0)
    n, total = comm.size, comm.size * (comm.size + 1) / 2
    with comm.group():
        comm.allreduce(a)
        comm.broadcast(a[:1], root=0)
        comm.allreduce([b, c], "max")
        comm.allreduce(a, "max")
        comm.allreduce(c, algorithm="ring")
    assert (a == total).all() and (b == n - 1).all() and (c == 2 * n).all()
    with pytest.raises(fc.ArgumentError, match="no meaning inside"), comm.group():
        comm.allreduce([a, b], async_op=True)
    with pytest.raises(ZeroDivisionError), comm.group():
        comm.allreduce([a, b])
        comm.allreduce(a)
        _ = 1 / 0
    assert (a == total).all() and (b == n - 1).all(), "a group that raises makes no call"
    comm.allreduce(b)
    assert (b == n * (n - 1)).all()


def test_a_group_keeps_the_order_of_other_calls():
    run_ranks(_mixed_group, 3)


def _kinds_by_turns() -> None:
    comm = fc.init()
    kinds = (np.float32, np.float32, np.int64, np.float32)
    ops = ("sum", "max", np.maximum, fc.scaled_sum(2.0), "sum")
    arrays = [np.arange(1 + i % 9) + i + 10 * comm.rank for i in range(120)]
    arrays = [a.astype(kinds[i % 4]) for i, a in enumerate(arrays)]
    chosen = [ops[i % 5] if kinds[i % 4] is np.float32 else "sum" for i in range(120)]
    for _ in range(2):
        with comm.group():
            for i, (array, op) in enumerate(zip(arrays, chosen, strict=True)):
                assert (comm.allreduce(array, op) if i % 2 else comm.allreduce(x=array, op=op)) is array
        for i, (array, op) in enumerate(zip(arrays, chosen, strict=True)):
            whole = [np.arange(1 + i % 9) + i + 10 * rank for rank in range(comm.size)]
            want = max(w.tolist() for w in whole) if op in ("max", np.maximum) else sum(whole)
            factor = 1 if isinstance(op, (str, np.ufunc)) else 2
            np.testing.assert_array_equal(array, np.multiply(want, factor), err_msg=f"{i}, {op}")
            array[...] = whole[comm.rank]


def test_kinds_and_operations_by_turns():
    run_ranks(_kinds_by_turns, 3)


def _shortcut() -> None:
    comm = fc.init()
    n, method = comm.size, comm.allreduce
    a, b, c = (np.full(4, float(i + comm.rank)) for i in range(3))
    with comm.group():
        inside = comm.allreduce
        inside(a)
        method(b)
    assert comm.allreduce == method, "a group leaves the method as it was"
    inside(c)  # after its group it is the plain method
    for i, array in enumerate((a, b, c)):
        np.testing.assert_array_equal(array, np.full(4, n * i + n * (n - 1) / 2))
    swapped = np.zeros(4, ">f8")
    with pytest.raises(fc.ArrayError, match="foreign byte order"), comm.group():
        comm.allreduce(a)
        comm.allreduce(swapped)
    assert comm.allreduce == method
    with comm.group():
        comm.allreduce(a, "max")
        assert inside(b, "max") is b, "one of an earlier group adds to the open one"
        read_only = np.ones(4)
        read_only.flags.writeable = False
        with pytest.raises(fc.ArrayError, match="read-only"):
            comm.allreduce(read_only, "max")
    assert (a == n * (n - 1) / 2).all()
    x, y, z, result = np.ones(4), np.full(4, 2.0), np.full(4, 3.0), np.empty(4)
    with comm.group():
        comm.allreduce(x)
        assert comm.allreduce(y, out=result) is result
        comm.allreduce(z)
    assert [array[0] for array in (x, y, z, result)] == [n, 2, 3 * n, 2 * n]


def test_the_way_arrays_are_added_quickly():
    run_ranks(_shortcut, 2)


def _steady(rounds: int) -> None:
    comm = fc.init()
    before = None
    for i in range(rounds):
        arrays = [np.full(n, i % 3 + comm.rank, np.float32) for n in (3, 500, 20_000)]  # new ones each time
        comm.allreduce(arrays)
        with comm.group():
            for array in arrays:
                comm.allreduce(array, "max")
        assert all((a == sum(range(comm.size)) + comm.size * (i % 3)).all() for a in arrays)
        figures = fc.memory_stats()["shared"]
        before = before or (figures.allocations, figures.taken)
        assert (figures.allocations, figures.taken) == before
    for n in range(100):
        comm.allreduce([np.ones(n + 1, np.float32), np.ones(3, np.float32)])
    assert fc.memory_stats()["shared"].taken == before[1]
    comm.close()
    assert fc.memory_stats()["shared"].reserved_nbytes == 0


def test_nothing_is_allocated_when_shapes_come_back():
    run_ranks(_steady, 2, 50)


def test_messages_keep_the_order_and_the_limits():
    shapes = tuple((n,) for n in (10, 20, 30, 200, 5, 5, 90, 90))
    limits = Limits(array_nbytes=100, message_nbytes=100)
    assert cut_into_messages(shapes, 1, limits) == [[0, 1, 2, 4, 5], [3], [6], [7]]
    assert cut_into_messages((), 1, limits) == []
    for itemsize in (1, 3, 50, 101):
        cuts = cut_into_messages(shapes, itemsize, limits)
        assert sorted(i for numbers in cuts for i in numbers) == [*range(len(shapes))]
        for numbers in cuts:
            nbytes = [shapes[i][0] * itemsize for i in numbers]
            assert numbers == sorted(numbers) and (len(numbers) == 1 or sum(nbytes) <= 100)


def test_a_packing_puts_arrays_end_to_end():
    packer = HostPacker(lambda count, dtype: np.empty(count, dtype), Limits(1 << 10, 1 << 12))
    arrays = [np.arange(6.0).reshape(2, 3), np.array(7.0), np.arange(8.0, 10.0)]
    packing = packer.packing(tuple(a.shape for a in arrays), np.dtype(float))
    packing.pack(arrays)
    np.testing.assert_array_equal(packing.flat, np.arange(10.0)[[0, 1, 2, 3, 4, 5, 7, 8, 9]])
    packing.flat *= 2
    packing.unpack(arrays)
    np.testing.assert_array_equal(arrays[0], 2 * np.arange(6.0).reshape(2, 3))
    assert arrays[1] == 14.0
    own = packer.packing(((4,),), np.dtype(np.float32), own=True)
    assert not np.shares_memory(own.flat, packing.flat) and own.flat.dtype == np.float32
    own.close()
    assert own.flat.size == 0


def _many_under_way() -> None:
    """More fused lists than are kept, all of them started before the first is waited for."""
    comm = fc.init()
    lists = [[np.full(100 + k, comm.rank + k, np.float32), np.full(3, k)] for k in range(60)]
    works = [comm.allreduce(arrays, async_op=True) for arrays in lists]
    for k, (work, arrays) in enumerate(zip(works, lists, strict=True)):
        work.wait()
        assert (arrays[0] == 2 * k + 1).all() and (arrays[1] == 2 * k).all()


def _many_kinds() -> None:
    """More kinds of fused arrays in one group than are kept."""
    comm = fc.init()
    pairs = [[np.full(n, 1 + comm.rank, np.float32) for n in (10 + k, 3)] for k in range(40)]
    with comm.group():
        for k, pair in enumerate(pairs):
            for array in pair:
                comm.allreduce(array, fc.scaled_sum(float(k)))
    for k, pair in enumerate(pairs):
        assert all((array == 3 * k).all() for array in pair)


@pytest.mark.parametrize("job", [_many_under_way, _many_kinds])
def test_a_message_that_calls_wait_for_is_kept(job):
    run_ranks(job, 2)


def _lists_that_come_again() -> None:
    """The same arrays several times, in lists and groups; then with other dtypes, shapes and sizes."""
    comm = fc.init()
    arrays, sums = arrays_and_sums(comm)
    arrays.append(np.zeros(200_000, np.float32))  # too large to be fused
    sums.append(arrays[-1].copy())

    def fill() -> None:
        for array, value in zip(arrays, [*arrays_and_sums(comm)[0], 0.0], strict=True):
            array[...] = value

    def group() -> None:
        with comm.group():
            for array in arrays:
                comm.allreduce(array)

    for call in (lambda: comm.allreduce(arrays), group, lambda: comm.allreduce(tuple(arrays), "sum")):
        for _ in range(4):
            fill()
            call()
            check(arrays, sums)
    lists = comm.fusion_of(comm._host).lists
    assert lists._kept

    def totals(*some: np.ndarray) -> list[np.ndarray]:
        return [sum(comm.allgather_object(array.copy())) for array in some]

    few = [np.full(6, comm.rank + 1.0, np.float32), np.full(4, 2.0, np.float32), np.arange(3.0)]
    for change in range(6):
        a, b, _ = few
        if change == 2:
            a.dtype = np.int32
            a[:] = comm.rank
        elif change == 3:
            a.shape = (3, 2)
        elif change == 4:
            b.dtype = np.float64
            b[:] = comm.rank
        wanted = totals(*few)
        comm.allreduce(few)
        check(few, wanted)
    same = [np.ones((4, 5)), np.ones(3)]
    for _ in range(3):
        comm.allreduce(same)
    if comm.rank == 0:
        same[0].shape = (20,)  # the others pass another array of that shape
    else:
        same[0] = np.full(20, float(comm.size**3))
    comm.allreduce(same)
    shape = (1, 3) if comm.rank else (3,)
    comm.allreduce([np.ones(shape), *same])
    assert same[0].max() == comm.size**5
    again = [np.ones(5, np.float32), np.ones(5, np.float32)]
    for op, value in (("sum", comm.size), ("sum", comm.size), ("max", 1), ("sum", comm.size), ("prod", 1)):
        for array in again:
            array[...] = 1
        comm.allreduce(again, op)
        assert all((array == value).all() for array in again)


@pytest.mark.parametrize("size", [1, 2])
def test_lists_that_come_again(size):
    run_ranks(_lists_that_come_again, size)
