"""One step with infinity or NaN is seen on all ranks, and the steps after it are as good as before."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import flagcx as fc
from flagcx.compression import Cast, Feedback, PowerSGD, Quantized, RandomK, TopK
from flagcx.compression.powersgd import PowerReduce
from flagcx.dtypes import OPS
from tests.compression.peers import on_ranks
from tests.compression.test_plans import gradient, make
from tests.ranks import run_ranks

COUNT, STEPS, SPOILT = 600, 6, 2
CODECS = [
    Cast("fp16"),
    Cast("bf16"),
    Quantized("int8", 32),
    Quantized("int4", 32),
    Quantized("fp8", 32),
    Quantized("fp8_e5m2", 32),
    TopK(0.05),
    TopK(0.02, warmup_steps=5),
    TopK(0.02, keep=0),
    RandomK(0.05),
    PowerSGD(2),
    PowerSGD(1, warmup_steps=4),
]
OPTIONS = [
    {"residual": residual, "momentum": momentum, "clip": clip}
    for residual, momentum, clip in itertools.product((True, False), (0.0, 0.9), (None, 3.0))
]


def spoil(x: np.ndarray, how: str) -> None:
    """Puts what is no number into a gradient."""
    if how == "all":
        x[...] = np.nan
    elif how == "opposite":
        x[[17, 401]] = np.inf, -np.inf
    else:
        x[401] = float(how)


def steps_with_a_spoilt_one(peers, codec, options, how):
    """For each step whether its result is finite; and what the slot keeps at the end."""
    slot = Feedback(codec, **options)["x"]
    plan, finite, results = make(peers, codec, COUNT, 0.5, slot), [], []
    for step in range(STEPS):
        x = gradient(peers.rank, step, COUNT)
        if step == SPOILT and peers.rank == 1:
            spoil(x, how)
        out = np.zeros_like(x)
        slot.begin(x)
        plan.run(x, out)
        finite.append(bool(np.isfinite(out).all()))
        results.append(out)
        kept = [slot.residual, slot.velocity, *slot.memory.get("factors", [])]
        assert all(np.isfinite(k).all() for k in kept if k is not None), f"step {step} left something behind"
    return finite, results


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(k for k in o if o[k]) or "plain")
def test_a_spoilt_step_is_seen_once_on_all_ranks(codec, options):
    for how in ("nan", "inf", "-inf", "opposite", "all"):
        done = on_ranks(3, lambda peers, how=how: steps_with_a_spoilt_one(peers, codec, options, how))
        for finite, results in done:
            assert finite == [step != SPOILT for step in range(STEPS)], (how, finite)
            for own, first in zip(results, done[0][1], strict=True):
                np.testing.assert_array_equal(own, first)


@pytest.mark.parametrize("codec", [TopK(0.05), RandomK(0.05), PowerSGD(2), Quantized("int4", 32)], ids=str)
def test_only_the_rank_with_the_spoilt_gradient_loses_its_residual(codec):
    def rank(peers):
        slot = Feedback(codec)["x"]
        plan = make(peers, codec, COUNT, 1.0, slot)
        for step in range(SPOILT + 1):
            x = gradient(peers.rank, step, COUNT)
            if step == SPOILT and peers.rank == 1:
                spoil(x, "all")
            slot.begin(x)
            plan.run(x, x)
        return slot.residual

    first, second = on_ranks(2, rank)
    assert not second.any()
    if codec.name != "int4":  # which sends everything
        assert np.linalg.norm(first) > 0.8 * np.linalg.norm(gradient(0, SPOILT, COUNT))


def test_powersgd_goes_on_with_the_directions_that_it_had():
    """And one spoilt matrix leaves the others alone."""
    rows = np.arange(1, 41, dtype=np.float32)
    matrix = np.outer(rows, rows[::-1]).reshape(-1)

    def rank(peers):
        codec = PowerSGD(1, shapes=((40, 40), (40, 40)))
        slot = Feedback(codec)["two"]
        plan, errors = PowerReduce(peers, codec, 3200, OPS["avg"], slot), []
        for step in range(5):
            x = np.concatenate([matrix, matrix])
            if step == 3 and peers.rank == 0:
                x[7] = np.nan
            factors = slot.memory.get("factors")
            slot.begin(x)
            plan.run(x, x)
            halves = x.reshape(2, -1)
            errors.append(np.linalg.norm(halves - matrix, axis=1) / np.linalg.norm(matrix))
            if step == 3:
                assert slot.memory["factors"][0] is factors[0] and slot.memory["factors"][1] is not factors[1]
        return errors

    for errors in on_ranks(2, rank):
        assert np.isnan(errors[3][0]) and errors[3][1] < 1e-5
        assert errors[4].max() < 1.1  # with what the other rank kept of the spoilt step
        assert max(e.max() for e in errors[:3]) < 1e-5


@pytest.mark.parametrize("codec", [PowerSGD(2, warmup_steps=3), TopK(1.0)], ids=str)
def test_momentum_gathers_while_everything_is_sent(codec):
    """As an optimizer's own would, step for step."""

    def rank(peers):
        slot, results = Feedback(codec, momentum=0.9)["x"], []
        plan = make(peers, codec, COUNT, 1.0, slot)
        for step in range(3):
            x = gradient(peers.rank, step, COUNT)
            slot.begin(x)
            plan.run(x, x)
            results.append(x)
        return results

    velocity = np.zeros(COUNT, np.float32)
    for step, got in enumerate(on_ranks(2, rank)[0]):
        velocity = np.float32(0.9) * velocity + gradient(0, step, COUNT) + gradient(1, step, COUNT)
        np.testing.assert_allclose(got, velocity, atol=1e-5)


def test_a_gradient_whose_squares_overflow_is_clipped_and_not_lost():
    slot = Feedback("int8", clip=2.0)["x"]
    x = np.float32([3e30, 4e30])
    slot.begin(x)
    from flagcx.compression.codec import Scratch

    np.testing.assert_allclose(slot.source(x, Scratch(), 1), [1.2, 1.6], rtol=1e-6)


def _training(codecs: list[str]) -> list[str]:
    """The whole way: arrays of every dtype, in place and not, with Auto and the lossless codec too."""
    comm, faults = fc.init(), []
    for codec, dtype, momentum in itertools.product(codecs, ("float16", "float32", "float64"), (0.0, 0.9)):
        feedback, spoilt = Feedback(codec, momentum=momentum), []
        for step in range(5):
            x = np.full((30, 40), 1 + comm.rank, dtype)
            if step == 1 and comm.rank == comm.size - 1:
                x[2, 3] = np.nan
            out = np.zeros_like(x) if step % 2 else x
            comm.allreduce(x, "avg", out=out, compression=feedback["w"])
            if not np.isfinite(out).all():
                spoilt.append(step)
        if spoilt != [1]:
            faults.append(f"{codec} of {dtype} with momentum {momentum}: spoilt are {spoilt}")
    return faults


def test_every_codec_of_a_training_heals():
    names = ("fp16", "bf16", "fp8", "int8", "int4", "topk", "randomk", "powersgd", "sparse", "auto")
    assert run_ranks(_training, 2, names) == [[], []]
