"""PowerSGD works on the matrices that the caller's arrays are; sums of sparse arrays have dense's bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import flagcx as fc
from flagcx.compression import Auto, Feedback, PowerSGD
from tests.ranks import run_ranks


def low_rank(shape: tuple[int, ...], rank: int, seed: int) -> np.ndarray:
    """A matrix of low rank: that of the first axis by the others."""
    random, columns = np.random.default_rng(seed), int(np.prod(shape[1:]))
    return (random.normal(size=(shape[0], rank)) @ random.normal(size=(rank, columns))).reshape(shape)


def _errors(shape: tuple[int, ...], rank: int, with_slot: bool, dtype: str) -> list[float]:
    """The relative error in each of some steps, of arrays in and out of the order of C."""
    comm, errors = fc.init(), []
    slot = Feedback(PowerSGD(rank))["w"] if with_slot else None
    for order in ("C", "F", "C"):
        exact = sum(low_rank(shape, 1, q) for q in range(comm.size)) / comm.size
        x = np.asarray(low_rank(shape, 1, comm.rank), dtype, order=order)
        assert comm.allreduce(x, "avg", compression=PowerSGD(rank) if slot is None else slot) is x
        errors.append(float(np.linalg.norm(x - exact) / np.linalg.norm(exact)))
    return errors


@pytest.mark.parametrize("with_slot", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((70, 300), "float32"), ((300, 70), "float64"), ((40, 9, 5, 5), "float32")]
)
def test_a_matrix_of_low_rank_comes_back_whole(shape, dtype, with_slot):
    for errors in run_ranks(_errors, 2, shape, 2, with_slot, dtype):
        assert max(errors) < 1e-5


def _wire(shape: tuple[int, ...], codec="powersgd") -> tuple[float, int]:
    """How far a mean is off, and how many numbers travelled."""
    comm = fc.init()
    x = np.random.default_rng(comm.rank).standard_normal(shape, np.float32)
    exact = sum(np.random.default_rng(q).standard_normal(shape, np.float32) for q in range(comm.size))
    comm.profiler.clear()
    comm.allreduce(x, compression=codec)
    sent = [r.operation for r in comm.profiler.records() if r.operation.protocol != "powersgd"]
    return float(abs(x - exact).max()), sum(o.nbytes for o in sent if o.collective == "allreduce") // 4


def test_a_vector_travels_dense_and_a_matrix_as_its_factors():
    assert run_ranks(_wire, 2, (6000,)) == [(0.0, 6000)] * 2
    assert run_ranks(_wire, 2, ()) == [(0.0, 1)] * 2
    for error, numbers in run_ranks(_wire, 2, (60, 100)):
        assert error > 0.1 and numbers == 4 * (60 + 100)
    for error, numbers in run_ranks(_wire, 2, (6000,), PowerSGD(4, shapes=((60, 100),))):
        assert error > 0.1 and numbers == 4 * (60 + 100)


def _other_shapes() -> list[str]:
    comm, said = fc.init(), []
    feedback = Feedback("powersgd")
    comm.allreduce(np.ones((20, 30), np.float32), compression=feedback["w"])
    comm.allreduce(np.ones((30, 20), np.float32), compression=feedback["v"])
    comm.allreduce(np.ones(600, np.float32), compression=feedback.slot("many", [(20, 20), (10, 20)]))
    comm.allreduce(np.ones((2, 300), np.float32), compression=feedback["many"])  # the given shapes count
    automatic = Feedback(Auto(lossy=("powersgd",)))["w"]
    comm.allreduce(np.ones((20, 30), np.float32), compression=automatic)
    for call in (
        lambda: comm.allreduce(np.ones((30, 20), np.float32), compression=feedback["w"]),
        lambda: comm.allreduce(np.ones(600, np.float32), compression=feedback["w"]),
        lambda: comm.allreduce(np.ones((30, 20), np.float32), compression=automatic),
        lambda: feedback.slot("many", [(20, 20), (20, 10)]),
        lambda: feedback.slot("w", [(20, 30)]),
        lambda: comm.allreduce(np.ones(601, np.float32), compression=PowerSGD(shapes=((20, 30),))),
    ):
        with pytest.raises(fc.ArgumentError) as caught:
            call()
        said.append(str(caught.value))
    comm.allreduce(np.ones((20, 30), np.float32), compression=feedback["w"])  # all of them go on
    int8 = Feedback("int8")["w"]
    for shape in ((20, 30), (600,), (30, 20)):  # which minds no shape
        comm.allreduce(np.ones(shape, np.float32), compression=int8)
    return said


def test_a_slot_that_gets_other_shapes_says_so():
    for said in run_ranks(_other_shapes, 2):
        for text, part in zip(
            said,
            (
                "'w' of this Feedback remembers the matrix of an array of shape (20, 30), and got an",
                "remembers the matrix of an array of shape (20, 30), and got an array of shape (600,)",
                "remembers the matrix of an array of shape (20, 30), and got an array of shape (30, 20)",
                "'many' of this Feedback was made for the shapes (20, 20), (10, 20), and is asked for with",
                "'w' of this Feedback was made for no shapes, and is asked for with (20, 30); use",
                "the shapes of a PowerSGD have 600 elements together, but the array has 601",
            ),
            strict=True,
        ):
            assert part in text, text


def _transposed() -> str:
    comm = fc.init(timeout_s=20)
    shape = (20, 30) if comm.rank else (30, 20)
    try:
        comm.allreduce(np.ones(shape, np.float32), compression="powersgd")
    except fc.CommunicationError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_whose_matrices_lie_differently_hear_of_it():
    said = run_ranks(_transposed, 2)
    assert any("MismatchError" in s and "of shape (30, 20)" in s and "of shape (20, 30)" in s for s in said)
    assert "nothing" not in said


def _beside_dense(count: int) -> list[str]:
    """Sums, means and scaled sums of sparse arrays, and "auto", beside plain calls: the same bits."""
    comm, faults = fc.init(throttle="0.05"), []
    random = np.random.default_rng([comm.rank, count])
    for dtype, density in itertools.product(("float32", "float64", "float16"), (0.002, 0.05, 0.9)):
        x = np.where(random.random(count) < density, random.standard_normal(count), 0).astype(dtype)
        for op in ("sum", "avg", fc.scaled_sum(0.3)):
            if dtype == "float16" and op not in ("sum", "avg"):
                continue  # the dense one rounds before it adds up, too
            want = comm.allreduce(x.copy(), op)
            for compression in ("sparse", "auto"):
                got = comm.allreduce(x.copy(), op, compression=compression)
                got, want = got + got.dtype.type(0), want + want.dtype.type(0)  # zeros have no sign
                if got.tobytes() != want.tobytes():
                    faults.append(f"{compression} of {dtype}, density {density}, by {op}")
    return faults


@pytest.mark.parametrize("size", [2, 3])
def test_sparse_sums_have_the_bits_of_dense_ones(size):
    assert run_ranks(_beside_dense, size, 40_000) == [[]] * size


def _sparse_with_momentum() -> None:
    """The lossless codec with momentum sends the momentum."""
    comm = fc.init()
    for codec, dtype in itertools.product(("sparse", "auto"), (np.float32, np.float64)):
        slot, velocity = Feedback(codec, momentum=0.5)["x"], np.zeros(5000, dtype)
        for step in range(4):
            x = np.zeros(5000, dtype)
            x[[step, 100 + comm.rank]] = 8
            velocity *= dtype(0.5)
            velocity[step] += 8
            velocity[100 : 100 + comm.size] += 8 / comm.size
            np.testing.assert_array_equal(comm.allreduce(x, "avg", compression=slot), velocity)


def test_the_lossless_codec_sends_the_momentum():
    run_ranks(_sparse_with_momentum, 2)


def _another_dtype() -> list[str]:
    """Momentum in one dtype, and a call in another, so long that a wrong one would write past its array."""
    comm, said = fc.init(), []
    for codec, first in itertools.product(("sparse", "auto", "int8"), (np.float32, np.float64)):
        second = np.float32 if first is np.float64 else np.float64
        slot, memory = Feedback(codec, momentum=0.5)["x"], np.zeros(120_000, second)
        x = memory[40_000:80_000]
        x[...] = 1
        comm.allreduce(np.ones(40_000, first), compression=slot)
        try:
            comm.allreduce(x, compression=slot)
        except fc.ArgumentError as error:
            said.append(str(error))
            x[...] = 1.5 * comm.size
        np.testing.assert_allclose(memory, np.repeat([0, 1.5 * comm.size, 0], 40_000), rtol=0.02)
        y = comm.allreduce(np.ones(40_000, first), compression=slot)
        np.testing.assert_allclose(y, comm.size * (1.75 if codec == "int8" else 1.5), rtol=0.02)
    return said


def test_momentum_is_kept_in_one_dtype():
    """Lossy codecs work in float32 whatever the array has; the lossless ones in the array's own dtype."""
    for said in run_ranks(_another_dtype, 2):
        assert len(said) == 4
        assert (
            "'x' of this Feedback keeps the momentum of an array of float32, and got one of float64"
            in said[0]
        )
        assert "an array of float64, and got one of float32; use a slot for each array" in said[1]
