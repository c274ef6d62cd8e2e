"""One step with infinity or NaN is seen on all ranks, and the steps after it are as good as before."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import flagcx as fc
from flagcx.compression import Cast, Feedback, PowerSGD, Quantized, RandomK, TopK
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
NAMES_OF_FIXED_RATE = ("fp16", "bf16", "int8", "int4", "fp8", "fp8_e5m2")
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


def train(peers, codec, options, how=None):
    """The results of some steps and what the slot keeps; ``how`` the one after step 2 is spoilt, if it is."""
    slot = Feedback(codec, **options)["x"]
    plan, results = make(peers, codec, COUNT, 0.5, slot), []

    def call(x) -> np.ndarray:
        out = np.zeros_like(x)
        slot.begin(x)
        plan.run(x, out)
        slot.end(out, plan.waits, plan.spoilt)
        return out

    for step in range(STEPS):
        if how is not None and step == SPOILT:
            before = slot.state_dict()
            x = gradient(peers.rank, 99, COUNT)
            if peers.rank == 1:
                spoil(x, how)
            assert not np.isfinite(call(x)).all(), "a training must see it"
            after = slot.state_dict()
            assert before.keys() == after.keys()
            if codec.name in NAMES_OF_FIXED_RATE and not (options["residual"] or options["momentum"]):
                after["step"] -= 1  # of which nothing depends there
            for name, value in before.items():
                np.testing.assert_array_equal(after[name], value, f"{name} after a step with {how}")
        results.append(call(gradient(peers.rank, step, COUNT)))
        assert np.isfinite(results[-1]).all()
    return results, slot.state_dict()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(k for k in o if o[k]) or "plain")
def test_a_spoilt_step_leaves_all_as_if_it_had_not_been(codec, options):
    """On all ranks, also where a gradient is finite and its code is not."""
    want = on_ranks(3, lambda peers: train(peers, codec, options))
    hows = ["nan", "-inf", "opposite", "all"] if options["residual"] and not options["clip"] else ["nan"]
    if codec.name == "fp16" and not options["clip"]:
        hows.append("1e6")
    for how in hows:
        done = on_ranks(3, lambda peers, how=how: train(peers, codec, options, how))
        for (results, state), (expected, unspoilt) in zip(done, want, strict=True):
            for own, first in zip(results, expected, strict=True):
                np.testing.assert_array_equal(own, first)
            for name, value in unspoilt.items():
                if name != "step":
                    np.testing.assert_array_equal(state[name], value)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.name != "fp16"], ids=str)
@pytest.mark.parametrize("large", [1e12, 1e20, 1e30])
def test_large_gradients_are_told_or_pass(codec, large):
    """What is left of a finite one is sent in later steps, until nothing of it is left."""

    def rank(peers):
        slot = Feedback(codec)["x"]
        plan = make(peers, codec, COUNT, 1.0, slot)
        for step in range(40 if codec.name != "randomk" else 200):
            x = gradient(peers.rank, step, COUNT)
            if step == 2 and peers.rank == 0:
                x[17] = large
            slot.begin(x)
            plan.run(x, x)
            slot.end(x, plan.waits, plan.spoilt)
            assert np.isfinite(x).all()
        return x, slot.residual

    for last, residual in on_ranks(2, rank):
        assert np.abs(last).max() < 1e4 and np.abs(residual).max() < 1e4


def test_an_array_out_of_range_is_told_on_all_ranks_and_leaves_nothing():
    """The sum overflows on the owner of a stripe, in the factors, or in the momentum of one rank alone."""
    assert run_ranks(_huge, 2) == [[], []]


def _huge() -> list[str]:
    comm, faults = fc.init(), []
    for codec, momentum in itertools.product(("bf16", "fp8", "int8", "int4", "topk", "powersgd"), (0.0, 0.9)):
        slot, states = Feedback(codec, momentum=momentum)["w"], []
        for step in range(4):
            x = np.random.default_rng([comm.rank, step]).standard_normal((40, 50)).astype(np.float32)
            if step == 2:
                x[...] = 3e38
            comm.allreduce(x, compression=slot)
            states.append(slot.state_dict())
            if np.isfinite(x).all() != (step != 2):
                faults.append(f"{codec}, momentum {momentum}: step {step} gave {x[0, 0]}")
        if not all(np.array_equal(states[1][name], states[2][name]) for name in states[1]):
            faults.append(f"{codec}, momentum {momentum}: left something behind")
    return faults


@pytest.mark.parametrize(
    "codec", [Quantized("int8", 32), Quantized("fp8_e5m2", 32), Cast("bf16"), Cast("fp16")]
)
def test_what_is_seen_in_codes_is_so_in_numbers(codec):
    """Near the largest number a code may decode to infinity: there only decoding shows it."""
    for large in (1.0, 65504.0, 65530.0, 3.38e38, 3.4028235e38, np.inf, np.nan):
        x = np.ones(100, np.float32)
        x[70] = large
        (wire,) = codec.encode(x).parts
        with np.errstate(over="ignore"):
            finite = bool(np.isfinite(codec.decode(codec.encode(x))).all())
        seen = codec.is_spoilt(wire, 100)
        assert seen == (not finite) or (seen is None and 3e38 < large < np.inf)


def test_a_call_that_fails_leaves_all_as_it_was():
    slot = Feedback(PowerSGD(1), momentum=0.5)["x"]

    def rank(peers):
        plan, x = make(peers, PowerSGD(1), COUNT, 1.0, slot), gradient(0, 0, COUNT)
        slot.begin(x)
        plan.run(x, x)
        slot.end(x)
        before = slot.state_dict()
        slot.begin(x)
        slot.total(x, peers.scratch, 1)
        assert slot.busy()
        slot.undo()
        after = slot.state_dict()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        slot.undo()  # once
        assert slot.step == 1

    on_ranks(1, rank)


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
            slot.end(x, plan.waits, plan.spoilt)
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


def _several(undo: bool) -> list[str]:
    """Of two arrays one is spoilt, or the training leaves a step for reasons of its own."""
    comm, faults = fc.init(), []
    for codec in ("int8", "topk", "powersgd"):
        feedback = Feedback(codec, momentum=0.5)
        for step in range(3):
            x, y = (np.random.default_rng([comm.rank, step, i]).standard_normal((30, 40)) for i in (0, 1))
            if step == 2 and comm.rank == 0 and not undo:
                x[0, 0] = np.inf
            before = feedback.state_dict()
            for key, array in (("x", x), ("y", y)):
                comm.allreduce(array, compression=feedback[key])
            if undo and step == 2:
                feedback.undo()
            feedback.end_step()
            if step == 1:
                feedback.undo()
                after = feedback.state_dict()
                if not all(np.array_equal(before[name], after[name]) for name in before):
                    faults.append(f"{codec}: undo() left something behind")
        after = feedback.state_dict()
        if before.keys() != after.keys() or not all(np.array_equal(before[n], after[n]) for n in before):
            faults.append(f"{codec}: left something behind")
    return faults


@pytest.mark.parametrize("undo", [False, True])
def test_one_spoilt_array_takes_the_step_back_in_all(undo):
    assert run_ranks(_several, 2, undo) == [[], []]
