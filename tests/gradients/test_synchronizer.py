"""The synchronizer: right averages in the very arrays, whatever the order; errors that name the gradient."""

from __future__ import annotations

import random
import time
import tracemalloc
from unittest import mock

import numpy as np
import pytest

import flagcx as fc
from tests.communicator.jobs import job
from tests.ranks import run_ranks

SHAPES = {
    "w0": (50, 20),
    "b0": (20,),
    "w1": (20, 300),
    "b1": (300,),
    "scale": (),
    "none": (0,),
    "w2": (7, 3, 2),
}
DTYPES = (np.float32, np.float64)


def values(rank: int, step: int, name: str) -> np.ndarray:
    """Whole numbers that differ in every (rank, step, gradient, index); multiples of 12."""
    i = list(SHAPES).index(name)
    count = int(np.prod(SHAPES[name]))
    whole = 12 * ((np.arange(count) * 7 + i * 5 + rank * 3 + step) % 1001)
    return whole.reshape(SHAPES[name]).astype(DTYPES[i % 3 == 0])


def fill(gradients, rank: int, step: int) -> None:
    for name, gradient in gradients.items():
        gradient[...] = values(rank, step, name)


def check(gradients, size: int, step: int, divide: bool = True) -> None:
    for name, gradient in gradients.items():
        total = sum(values(rank, step, name) for rank in range(size))
        np.testing.assert_array_equal(gradient, total / size if divide else total, err_msg=name)


def _steps(bucket_bytes, average: bool) -> list:
    comm = fc.init()
    gradients = {name: values(0, 0, name) for name in SHAPES}
    shuffled = random.Random(comm.rank)
    with fc.GradientSynchronizer(comm, gradients, bucket_bytes, average=average) as sync:
        assert "7 gradients of" in repr(sync) and sync.buckets == []
        for step in range(6):
            fill(gradients, comm.rank, step)
            names = list(SHAPES)
            shuffled.shuffle(names)  # another order on each rank and in each step
            for name in names:
                sync.ready(name)
            sync.wait()
            check(gradients, comm.size, step, average)
        buckets = sync.buckets
    assert "closed" in repr(sync)
    comm.allreduce(np.ones(3))  # the communicator goes on
    return buckets


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_averages_in_any_order_of_readiness(size):
    per_rank = run_ranks(_steps, size, 9000, True)
    assert all(buckets == per_rank[0] for buckets in per_rank)
    assert sorted(name for bucket in per_rank[0] for name in bucket) == sorted(SHAPES)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30, None])
def test_sums_with_buckets_of_any_size(bucket_bytes):
    (buckets, *_) = run_ranks(_steps, 2, bucket_bytes, False)
    assert len(buckets) == (7 if bucket_bytes == 1 else 2)


def _new_arrays() -> None:
    comm = fc.init()
    shapes = [(4, 5), (1000,), (3,)]
    known = [np.zeros(s, np.float32) for s in shapes]
    sync = fc.GradientSynchronizer(comm, known, bucket_bytes=100)
    for step in range(5):
        arrays = [np.empty_like(g) for g in known] if step % 2 else known
        for i in (1, 0, 2):
            arrays[i][...] = comm.rank + step + i
            sync.ready(i, arrays[i] if step % 2 else None)
        sync.wait()
        for i, array in enumerate(arrays):
            assert (array == step + i + (comm.size - 1) / 2).all()
    sync.close()
    sync.close()
    with pytest.raises(fc.CommunicatorError, match="is closed"):
        sync.ready(0)
    with pytest.raises(fc.CommunicatorError, match="is closed"):
        sync.wait()


def test_gradients_in_new_arrays_now_and_then():
    run_ranks(_new_arrays, 2)


def _accumulate() -> None:
    comm = fc.init()
    g = {"a": np.zeros(10), "b": np.zeros(5, np.float32)}
    with fc.GradientSynchronizer(comm, g) as sync:
        for step in range(3):
            for array in g.values():
                array[...] = 0
            comm.profiler.clear()
            with sync.accumulate():
                for _ in range(2):
                    for name, array in g.items():
                        array += comm.rank + step
                        sync.ready(name)
                    sync.wait()
                with pytest.raises(fc.ArgumentError, match="no gradient 'c'"):
                    sync.ready("c")
            assert not comm.profiler.records()
            assert all((array == 2 * (comm.rank + step)).all() for array in g.values())
            for name, array in g.items():
                array += 1
                sync.ready(name)
                message = "1 of 2 gradients are ready"
                if name == "a":
                    with (
                        pytest.raises(fc.ArgumentError, match=message),
                        sync.accumulate(),
                    ):
                        pass
            sync.wait()
            assert all((array == 2 * step + comm.size).all() for array in g.values())  # 2 (size-1)/2 + 1


def test_accumulate_communicates_nothing():
    run_ranks(_accumulate, 2)


def _reduced() -> None:
    comm = fc.init()
    gradients = {name: values(0, 0, name) for name in SHAPES}
    with fc.GradientSynchronizer(comm, gradients, bucket_bytes=9000) as sync:
        for step in range(6):
            fill(gradients, comm.rank, step)
            for name in reversed(SHAPES):
                sync.ready(name)
            told = []
            for name in sync.reduced():
                total = sum(values(rank, step, name) for rank in range(comm.size))
                np.testing.assert_array_equal(gradients[name], total / comm.size, err_msg=name)
                told.append(name)
                if step == 3:
                    break  # the others are waited for
            assert told == [name for bucket in sync.buckets for name in bucket][: len(told)]
            assert len(told) == (1 if step == 3 else len(SHAPES))
            check(gradients, comm.size, step)
        with sync.accumulate():
            sync.ready("w0")
            assert list(sync.reduced()) == []


def test_gradients_are_told_bucket_by_bucket():
    run_ranks(_reduced, 3)


def _early(count: int) -> list[float]:
    """Seconds after which each of four buckets is told, where each takes 0.05 s on its link."""
    comm = fc.init(throttle=f"{4 * count / 0.05 / 1e9}")  # two ranks: each sends half of it twice
    g = [np.ones(count, np.float32) for _ in range(4)]
    with fc.GradientSynchronizer(comm, g, bucket_bytes=1) as sync:
        for _ in range(2):  # the first step forms the buckets
            comm.barrier()
            begin, told = time.monotonic(), []
            for i in range(4):
                sync.ready(i)
            for _ in sync.reduced():
                told.append(time.monotonic() - begin)
    return told


def test_the_first_bucket_is_told_long_before_the_last():
    for told in run_ranks(_early, 2, 1000):
        assert told[3] > 0.18 and told[0] < 0.6 * told[3], told


def _wrong_calls() -> None:
    comm = fc.init()
    g = {"w": np.zeros((4, 5), np.float32), "b": np.zeros(5, np.float32)}
    for wrong, message in (
        (lambda: fc.GradientSynchronizer(comm, {}), "parameters are empty"),
        (lambda: fc.GradientSynchronizer(comm, g, bucket_bytes=0), "bucket_bytes=0 must be at least 1"),
        (lambda: fc.GradientSynchronizer(comm, {"w": 3}), "the gradient 'w' is a builtins.int"),
        (lambda: fc.GradientSynchronizer(comm, g, compression="zip"), "compression='zip' is not known"),
        (lambda: fc.GradientSynchronizer(comm, [np.zeros(4, ">f8")]), "the gradient 0 has the foreign byte"),
    ):
        with pytest.raises(fc.ArgumentError, match=message):
            wrong()
    sync = fc.GradientSynchronizer(comm, g)
    for step in range(3):
        with pytest.raises(fc.ArgumentError, match="no gradient 'v'; expected one of 'w', 'b'"):
            sync.ready("v")
        with pytest.raises(fc.ArrayError, match=r"'w' has shape \(5, 4\) .* made for 'w' of shape \(4, 5\)"):
            sync.ready("w", np.zeros((5, 4), np.float32))
        with pytest.raises(fc.ArrayError, match=r"'b' has shape .* and dtype float64"):
            sync.ready("b", np.zeros(5))
        with pytest.raises(fc.ArrayError, match="'b' is read-only"):
            sync.ready("b", np.broadcast_to(np.float32(1), 1).repeat(5).view(_ReadOnly))
        g["w"][...] = g["b"][...] = comm.rank
        sync.ready("w")
        with pytest.raises(fc.ArgumentError, match="'w' was made ready twice in one step"):
            sync.ready("w")
        sync.ready("b")
        sync.wait()
        assert (g["w"] == (comm.size - 1) / 2).all() and (g["b"] == (comm.size - 1) / 2).all(), step


class _ReadOnly(np.ndarray):
    """An array that is read-only as soon as it is one."""

    def __array_finalize__(self, source) -> None:
        self.flags.writeable = False


def test_wrong_calls_name_the_gradient_and_change_nothing():
    run_ranks(_wrong_calls, 2)


def _strided() -> None:
    comm = fc.init()
    grid = np.zeros((8, 3, 2))
    large = np.zeros((600, 300)).T  # not packed
    for overlap in (True, False):
        sync = fc.GradientSynchronizer(comm, [grid[::2, :, 0].T, np.zeros(5), large], overlap=overlap)
        for step in range(3):
            grid[...] = large[...] = comm.rank + step
            plain = np.full(5, float(comm.rank + step))
            sync.ready(0)
            sync.ready(1, plain)
            sync.ready(2)
            sync.wait()
            mean = (comm.size - 1) / 2 + step
            assert (grid[::2, :, 0] == mean).all() and (plain == mean).all() and (large == mean).all()
            assert (grid[1::2] == comm.rank + step).all() and (grid[..., 1] == comm.rank + step).all()


def test_gradients_with_strides():
    run_ranks(_strided, 2)


def _missing_at_first() -> None:
    comm = fc.init()
    g = [np.full(3, float(comm.rank)) for _ in range(7)]
    sync = fc.GradientSynchronizer(comm, g)
    for i in range(7):
        if comm.rank == 0 or i == 2:
            sync.ready(i)
    with pytest.raises(fc.ArgumentError, match=r"rank 1 waits .* never made 0, 1, 3, 4 and 2 more ready"):
        sync.wait()
    for i in range(7):
        sync.ready(i)
    sync.wait()
    assert all((array == (comm.size - 1) / 2).all() for array in g)


def test_a_gradient_missing_in_the_first_step_is_told_to_all_and_the_step_can_be_made_again():
    run_ranks(_missing_at_first, 3)


def _different(what: str) -> None:
    comm = fc.init()
    shape = (4,) if what == "shape" and comm.rank == 1 else (3,)
    g = {"w": np.zeros(shape), "v": np.zeros(2)}
    if what == "number" and comm.rank == 1:
        g["x"] = np.zeros(1)
    sync = fc.GradientSynchronizer(comm, g)
    for name in g:
        sync.ready(name)
    said = (
        r"'w' of shape \(3,\) .* on rank 0, 'w' of shape \(4,\)"
        if what == "shape"
        else "2 on rank 0, 3 on rank 1"
    )
    with pytest.raises(fc.ArgumentError, match=f"ranks have different gradients: {said}"):
        sync.wait()


@pytest.mark.parametrize("what", ["shape", "number"])
def test_ranks_with_different_gradients_are_told(what):
    run_ranks(_different, 2, what)


MISSING = """
comm = fc.init(timeout_s=20)
g = {name: np.ones(100_000) for name in ("w", "v", "u")}
sync = fc.GradientSynchronizer(comm, g, bucket_bytes=1)
for step in range(3):
    for name in g:
        if not (step == 2 and comm.rank == 1 and name == "v"):
            sync.ready(name)
    if step == 2:
        outcome(sync.wait)
    else:
        sync.wait()
"""


def test_a_gradient_missing_later_ends_the_step_on_all_ranks():
    with job(3, MISSING) as ranks:
        lines = [rank.stdout.readline() for rank in ranks]
    for rank, line in enumerate(lines):
        assert "rank 1 waits for its gradients, but never made 'v' ready in this step" in line, line
        assert line.startswith("ArgumentError" if rank == 1 else "AbortedError")
        assert float(line.split()[2]) < 5


def _same_bits(size: int) -> None:
    """Bucketed while ready, and reduced by plain calls: the same bits in the parameters."""
    comm = fc.init()
    draw = np.random.default_rng(comm.rank)
    shapes = [(64, 64), (64,), (300, 70), (70,)]
    plain = [np.zeros(s, np.float32) for s in shapes]
    bucketed = [np.zeros(s, np.float32) for s in shapes]
    g = [np.zeros(s, np.float32) for s in shapes]
    with fc.GradientSynchronizer(comm, g, bucket_bytes=20_000) as sync:
        for _ in range(10):
            fresh = [draw.standard_normal(s).astype(np.float32) for s in shapes]
            for i, new in enumerate(fresh):
                g[i][...] = new
                sync.ready(i)
            sync.wait()
            for p, q, a, b in zip(plain, bucketed, fresh, g, strict=True):
                p -= np.float32(0.1) * comm.allreduce(a, "avg")
                q -= np.float32(0.1) * b
    for p, q in zip(plain, bucketed, strict=True):
        np.testing.assert_array_equal(p, q)


def test_overlap_changes_no_bit():
    run_ranks(_same_bits, 3, 3)


def _begins(cores: int, overlap: bool | None, throttle: str = "") -> bool:
    """Whether buckets are reduced before anybody waits, with so many cores for two ranks."""
    comm = fc.init(throttle=throttle)
    with mock.patch("os.sched_getaffinity", lambda pid: set(range(cores))):
        return _begins_here(comm, overlap)


def _begins_here(comm: fc.Communicator, overlap: bool | None) -> bool:
    g = [np.zeros(300, np.float32) for _ in range(3)]
    seen = []
    with fc.GradientSynchronizer(comm, g, bucket_bytes=1, overlap=overlap) as sync:
        for step in range(3):
            for i, gradient in enumerate(g):
                gradient[...] = comm.rank + step + i
                sync.ready(i)
            if step:
                time.sleep(0.1)
                seen.append(g[0][0] != comm.rank + step)
            if step == 1:
                for _ in sync.reduced():
                    break  # whoever leaves early has all of them, too
            else:
                sync.wait()
            assert [x[-1] for x in g] == [0.5 + step + i for i in range(3)]
    assert seen[0] == seen[1]
    return seen[0]


@pytest.mark.parametrize(
    ("cores", "overlap", "throttle", "begins"),
    [
        (3, None, "", False),
        (4, None, "", True),
        (2, None, "1", True),  # a link moves the data, not a core
        (2, True, "", True),
        (64, False, "", False),
    ],
)
def test_buckets_wait_where_to_move_them_takes_cores_that_compute(cores, overlap, throttle, begins):
    assert run_ranks(_begins, 2, cores, overlap, throttle) == [begins, begins]


def _compressed(codec: str, steps: int) -> list[float]:
    """A quadratic of which each rank sees another part; with error feedback its minimum is found."""
    comm = fc.init()
    target = np.random.default_rng(7).standard_normal((comm.size, 4096)).astype(np.float32)
    x, g = np.zeros(4096, np.float32), [np.zeros(1000, np.float32), np.zeros(3096, np.float32)]
    errors = []
    with fc.GradientSynchronizer(comm, g, compression=codec) as sync:
        for _ in range(steps):
            whole = x - target[comm.rank]
            g[0][...], g[1][...] = whole[:1000], whole[1000:]
            for i in (1, 0):
                sync.ready(i)
            sync.wait()
            x -= np.float32(0.3) * np.concatenate(g)
            errors.append(float(np.abs(x - target.mean(axis=0)).max()))
        assert len(sync.buckets) == 1 and f", {codec}" in repr(sync)
    digests = comm.allgather_object(x.tobytes())
    assert len(set(digests)) == 1, "ranks drifted apart"
    return errors


@pytest.mark.parametrize(("codec", "left"), [("int8", 0.02), ("int4", 0.05)])
def test_compression_with_feedback_for_each_bucket(codec, left):
    errors, *_ = run_ranks(_compressed, 2, codec, 60)
    assert errors[-1] < left * errors[0]


def _steady(steps: int) -> None:
    comm = fc.init(profile=False)  # records of times, which are numbers of several lengths, take more or less
    g = {name: np.ones(n, np.float32) for name, n in {"a": 300, "b": 20_000, "c": 7, "d": 40_000}.items()}
    with fc.GradientSynchronizer(comm, g, bucket_bytes=100_000) as sync:

        def step() -> None:
            for name in g:
                sync.ready(name)
            sync.wait()

        for _ in range(50):
            step()
        tracemalloc.start()
        step()
        before = fc.memory_stats()["shared"]
        sizes = []
        for i in range(steps):
            step()
            if i % (steps // 10) == steps // 10 - 1:
                sizes.append(tracemalloc.get_traced_memory()[0])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert fc.memory_stats()["shared"] == before, "blocks were taken in the steady state"
        assert max(sizes[1:]) - sizes[0] < 6 * steps, f"memory grows: {sizes}"  # 2 bytes a bucket and step
        assert peak < 300_000, f"something of a bucket's size was allocated: {peak} bytes"
    assert all((a == 1).all() for a in g.values())
    assert fc.memory_stats()["shared"].used_nbytes == 0


@pytest.mark.slow
def test_three_thousand_steps_allocate_nothing():
    run_ranks(_steady, 2, 3_000)


def _other_calls_between() -> None:
    comm = fc.init()
    g = [np.zeros(5000), np.zeros(5000)]
    with fc.GradientSynchronizer(comm, g, bucket_bytes=1) as sync:
        for step in range(5):
            g[0][...] = g[1][...] = comm.rank
            sync.ready(0)
            loss = comm.allreduce(np.full(1, float(step)))
            sync.ready(1)
            sync.wait()
            assert loss[0] == step * comm.size and (g[0] == g[1]).all() and g[0][0] == (comm.size - 1) / 2


def test_other_calls_of_the_communicator_may_come_between():
    run_ranks(_other_calls_between, 3)


def _overlap(buckets: int, piece_s: float) -> tuple[float, float]:
    """Seconds of a step that computes (here: sleeps) and communicates equally long: apart, and overlapped."""
    count = 1000
    comm = fc.init(throttle=f"{4 * count / piece_s / 1e9}")  # two ranks: each sends half of it twice
    g = [np.ones(count, np.float32) for _ in range(buckets)]
    took: dict[bool, list[float]] = {True: [], False: []}
    with fc.GradientSynchronizer(comm, g, bucket_bytes=1) as sync:
        for overlapped in (True, False, True, True, True):  # the first step forms the buckets
            comm.barrier()
            begin = time.monotonic()
            for i in range(buckets):
                time.sleep(piece_s)
                if overlapped:
                    sync.ready(i)
            for i in range(0 if overlapped else buckets):
                sync.ready(i)
            sync.wait()
            took[overlapped].append(time.monotonic() - begin)
    return took[False][0], min(took[True][1:])


@pytest.mark.slow
def test_a_step_overlaps_communication_with_computation():
    for apart_s, overlapped_s in run_ranks(_overlap, 2, 20, 0.02):
        assert apart_s > 0.78, "the link is not as slow as it should be"
        assert overlapped_s < 0.7 * apart_s  # 0.42 s if all goes well
