"""Compressed all-reduces on ranks that are threads: results, bytes sent, and what feedback keeps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from flagcx.compression import Cast, Feedback, PowerSGD, Quantized, RandomK, Sparse, TopK
from flagcx.compression.carried import Regions
from flagcx.compression.powersgd import PowerReduce, find_matrices, orthogonalise
from flagcx.compression.slot import Slot
from flagcx.compression.sparse_reduce import RandomKReduce, SparseReduce, TopKReduce
from flagcx.compression.sparse_sum import sum_sparse
from flagcx.compression.two_step import TwoStep, cut_in_pieces
from flagcx.dtypes import OPS, scaled_sum
from flagcx.errors import ArgumentError
from tests.compression.peers import on_ranks

SIZES = (1, 2, 3, 4, 7)
SUM = OPS["sum"]


def gradient(rank: int, step: int, count: int) -> np.ndarray:
    """Different on every rank, in every step and place."""
    return np.random.default_rng([rank, step, count]).standard_normal(count, np.float32)


def make(peers, codec, count, factor, slot):
    op = SUM if factor == 1 else scaled_sum(factor)
    if isinstance(codec, PowerSGD):
        rows = next(m for m in range(math.isqrt(count), 0, -1) if count % m == 0)
        return PowerReduce(peers, replace(codec, shapes=((rows, count // rows),)), count, op, slot)
    plans = {TopK: TopKReduce, RandomK: RandomKReduce, Sparse: SparseReduce}
    return plans.get(type(codec), TwoStep)(peers, codec, count, op, slot)


def train(peers, codec, count, steps, factor=1.0, in_place=False, **options):
    """The results of some steps, and the slot."""
    slot = Feedback(codec, **options)["x"]
    plan = make(peers, codec, count, factor, slot)
    results = []
    for step in range(steps):
        x = gradient(peers.rank, step, count)
        out = x if in_place else np.full_like(x, np.nan)
        slot.begin(x)
        plan.run(x, out)
        slot.end(out, plan.waits, plan.spoilt)
        if not in_place:
            np.testing.assert_array_equal(x, gradient(peers.rank, step, count))
        results.append(out.copy())
    return results, slot


CODECS = [Cast("bf16"), Quantized("int8"), Quantized("int4"), TopK(0.05), RandomK(0.1), PowerSGD(2)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("count", [1, 50, 10_007])
def test_with_feedback_nothing_is_lost_only_late(size, codec, count):
    """All results and what the ranks keep add up to all gradients."""
    done = on_ranks(size, lambda peers: train(peers, codec, count, 4))
    sums = [np.sum(results, axis=0, dtype=np.float64) for results, _ in done]
    for other, _ in done[1:]:
        for a, b in zip(done[0][0], other, strict=True):
            np.testing.assert_array_equal(a, b)  # all ranks have the same bits
    kept = np.sum([slot.residual for _, slot in done], axis=0, dtype=np.float64)
    given = np.sum([gradient(q, s, count) for q in range(size) for s in range(4)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(sums[0] + kept, given, atol=1e-4 * size)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_in_place_and_by_a_factor(codec):
    apart = on_ranks(3, lambda p: train(p, codec, 5000, 2, factor=1 / 3)[0])[0]
    over = on_ranks(3, lambda p: train(p, codec, 5000, 2, factor=1 / 3, in_place=True)[0])[0]
    whole = on_ranks(3, lambda p: train(p, codec, 5000, 2)[0])[0]
    for a, b, c in zip(apart, over, whole, strict=True):
        np.testing.assert_array_equal(a, b)
        bound = 0.2 if codec.name == "int4" else 0.02
        assert np.linalg.norm(3 * a - c) <= bound * np.linalg.norm(c)


@pytest.mark.parametrize("size", SIZES)
def test_quantised_sum_is_near_and_needs_a_quarter_of_the_bytes(size):
    count = 70_000

    def rank(peers):
        slot = Slot(Quantized("int8"), residual=False)
        x = gradient(peers.rank, 0, count)
        slot.begin(x)
        TwoStep(peers, Quantized("int8"), count, SUM, slot).run(x, x)
        return x, peers.sent_nbytes

    done = on_ranks(size, rank)
    exact = np.sum([gradient(q, 0, count) for q in range(size)], axis=0)
    assert np.linalg.norm(done[0][0] - exact) <= 0.02 * np.linalg.norm(exact)
    dense = 2 * (size - 1) / size * 4 * count
    assert all(nbytes <= 0.27 * dense for _, nbytes in done)


@pytest.mark.parametrize(
    ("count", "size"), [(1, 2), (5, 7), (1024 * 6, 2), (100_000, 3), (99_999, 4), (31, 1)]
)
def test_pieces_cover_the_message(count, size):
    pieces = cut_in_pieces(count, size, 30_000)
    covered = [i for piece in pieces for q in range(size) for i in range(count)[piece.stripe(q)]]
    assert covered == list(range(count))
    assert all(piece.width <= pieces[0].width for piece in pieces)


def test_several_pieces_give_what_one_gives(monkeypatch):
    codec, count = Quantized("int8", 32), 3 * 4096
    whole = on_ranks(2, lambda p: train(p, codec, count, 2)[0])[0]
    monkeypatch.setattr("flagcx.compression.two_step.PIECE_NBYTES", 8192)
    pieces = on_ranks(2, lambda p: train(p, codec, count, 2)[0])[0]
    assert not np.array_equal(whole[1], gradient(0, 1, count))
    for a, b in zip(whole, pieces, strict=True):
        assert 0 < np.linalg.norm(a - b) < 0.02 * np.linalg.norm(a)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("keep", [2.0, 4.0])
def test_topk_traffic_does_not_grow_with_the_ranks(size, keep):
    count, density, codec = 400_000, 0.01, TopK(0.01, keep)

    def rank(peers):
        _, slot = train(peers, codec, count, 1)
        before = peers.sent_nbytes
        plan = TopKReduce(peers, codec, count, SUM, slot)
        for step in range(1, 4):
            x = gradient(peers.rank, step, count)
            slot.begin(x)
            plan.run(x, x)
            slot.end(x, plan.waits, plan.spoilt)
        return (peers.sent_nbytes - before) / 3

    most = max(on_ranks(size, rank))
    k = 1.25 * density * count
    assert most <= 1.1 * (2 + 2 * keep) * k * (size - 1) / size * 4


def test_regions_follow_where_the_elements_are():
    """All elements in a corner of the array: owners share the work all the same."""
    count, k = 1 << 20, 4000

    def rank(peers):
        indices = np.sort(np.random.default_rng(peers.rank).choice(50_000, k, replace=False)).astype(np.int32)
        values = (indices + peers.rank).astype(np.float32)
        regions = Regions()
        total = sum_sparse(peers, indices, values, count, regions)
        return indices, values, total, regions.bounds, peers.sent_nbytes

    done = on_ranks(4, rank)
    want = np.zeros(count, np.float32)
    for indices, values, *_ in done:
        want[indices] += values
    total = done[0][2]
    np.testing.assert_array_equal(total.indices, np.flatnonzero(want))
    np.testing.assert_array_equal(total.values, want[total.indices])
    assert done[0][3][1:4].max() < 50_000
    assert max(sent for *_, sent in done) < 2 * min(sent for *_, sent in done)


@pytest.mark.parametrize("share", [0.4, 0.3, 0.004, 0.0002])
def test_many_or_few_elements_of_a_region_add_up_alike(share):
    count = 400_000  # with gaps that are too wide for 16 bits, where there are few

    def rank(peers):
        chosen = np.random.default_rng(peers.rank).random(count) < share
        x = np.where(chosen, gradient(peers.rank, 0, count), np.float32(0))
        slot = Slot(Sparse())
        slot.begin(x)
        out = np.empty_like(x)
        SparseReduce(peers, Sparse(), count, SUM, slot).run(x, out)
        return x, out, peers.dense_calls

    done = on_ranks(3, rank)
    want = done[0][0] + done[1][0] + done[2][0]
    for _, out, dense in done:
        np.testing.assert_array_equal(out, want)
        assert dense == (share == 0.4)


@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("density", [0.00005, 0.002, 0.01, 0.05])
def test_a_sparse_array_sends_what_its_ratio_says(size, density):
    count = 300_000

    def rank(peers):
        chosen = np.random.default_rng(peers.rank).random(count) < density
        x = np.where(chosen, gradient(peers.rank, 0, count), np.float32(0))
        slot = Slot(Sparse())
        for _ in range(2):  # the first agrees on regions
            before = peers.sent_nbytes
            slot.begin(x)
            SparseReduce(peers, Sparse(), count, SUM, slot).run(x, np.empty_like(x))
        return peers.sent_nbytes - before

    sent, dense = np.mean(on_ranks(size, rank)), 2 * (size - 1) / size * 4 * count
    assert sent / dense == pytest.approx(
        Sparse().ratio(count, size, density), rel=0.06 if density > 1e-4 else 0.3
    )


def test_one_full_rank_makes_all_go_dense():
    def rank(peers):
        x = gradient(peers.rank, 0, 5000) if peers.rank == 1 else np.zeros(5000, np.float32)
        slot = Slot(Sparse())
        slot.begin(x)
        out = np.empty_like(x)
        SparseReduce(peers, Sparse(), 5000, scaled_sum(0.5), slot).run(x, out)
        return out, peers.dense_calls

    for out, dense in on_ranks(3, rank):
        np.testing.assert_array_equal(out, gradient(1, 0, 5000) * np.float32(0.5))
        assert dense == 1


def test_momentum_correction_gathers_velocity_and_masks_what_was_sent():
    slot = Feedback(TopK(0.5), momentum=0.9)["g"]
    x = np.float32([1, 10, 2, 20])
    slot.begin(x)

    def rank(peers):
        plan, out = TopKReduce(peers, TopK(0.5), 4, SUM, slot), np.empty_like(x)
        plan.run(x, out)
        slot.end(out, plan.waits, plan.spoilt)
        return out

    # Alone a rank goes dense, and keeps its momentum; else look at the slot's own arithmetic.
    assert on_ranks(1, rank)[0].tolist() == [1, 10, 2, 20]
    assert slot.velocity.tolist() == [1, 10, 2, 20] and not slot.residual.any()
    slot.velocities.before[:] = [1, 0, 2, 0]
    assert slot.source(x, None, 1).tolist() == [pytest.approx(1.9), 10, pytest.approx(3.8), 20]
    slot.residual[:] = 5
    slot.sent(np.array([1, 3]))
    assert slot.residual.tolist() == [5, 0, 5, 0] and slot.velocity[1] == slot.velocity[3] == 0


@pytest.mark.parametrize("codec", [TopK(0.1), TopK(0.01), TopK(0.9), RandomK(0.1)])
def test_all_of_a_gradient_arrives_with_momentum_as_without_compression(codec):
    """After the last gradient, momentum 0.8 moves parameters by five times the sum of all gradients."""
    count, steps, size = 4000, 40, 3
    kind = TopKReduce if isinstance(codec, TopK) else RandomKReduce

    def rank(peers):
        slot = Feedback(codec, momentum=0.8)["g"]
        total, given, out = np.zeros(count), np.zeros(count), np.empty(count, np.float32)
        plan = kind(peers, codec, count, SUM, slot)
        for step in range(steps):
            x = gradient(peers.rank, step, count)
            given += x
            slot.begin(x)
            plan.run(x, out)
            slot.end(out, plan.waits, plan.spoilt)
            total += out
        kept = slot.residual + slot.velocity.astype(float) * 4
        return total, given, kept

    done = on_ranks(size, rank)
    given, kept = (np.sum([one[i] for one in done], axis=0) for i in (1, 2))
    np.testing.assert_allclose(done[0][0] + kept, 5 * given, atol=0.02)
    assert np.abs(kept).mean() > 0.01


def test_clipping_is_by_the_norm_and_the_root_of_the_ranks():
    from flagcx.compression.codec import Scratch

    slot = Feedback("int8", clip=2.0)["g"]
    x = np.float32([3, 4])
    slot.begin(x)
    np.testing.assert_allclose(slot.source(x, Scratch(), 4), x / 5, rtol=1e-6)
    assert x.tolist() == [3, 4]


def test_a_slot_remembers_one_array():
    feedback = Feedback("int8")
    assert feedback["a"] is feedback["a"] is not feedback["b"]
    feedback["a"].begin(np.zeros(10, np.float32))
    feedback["a"].end(np.zeros(10, np.float32))
    with pytest.raises(
        ArgumentError, match=r"slot 'a' .* remembers an array of 10 elements, and got one of 11"
    ):
        feedback["a"].begin(np.zeros(11, np.float32))
    feedback.reset()
    feedback["a"].begin(np.zeros(11, np.float32))
    with pytest.raises(
        ArgumentError, match="shapes of slot 'c' have 12 elements together, but its array has 13"
    ):
        feedback.slot("c", [(3, 4)]).begin(np.zeros(13, np.float32))
    with pytest.raises(ArgumentError, match="momentum=1 must be a number from 0 to below 1"):
        Feedback("int8", momentum=1)


def test_powersgd_finds_the_shapes_in_an_array():
    layout = find_matrices(128 * 64 + 64 + 2 * 3, [(128, 64), (64,), (2, 3)], 4)
    assert layout.matrices == ((0, 128, 64),)
    assert layout.vectors == (slice(8192, 8256), slice(8256, 8262))
    assert layout.sent == 4 * (128 + 64) + 64 + 6


def test_powersgd_comes_nearer_with_each_step():
    """The warm start is power iteration: the same matrix is met better and better."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.standard_normal((60, 60)))
    matrix = (left * 0.7 ** np.arange(60)) @ left.T
    x = matrix.astype(np.float32).reshape(-1)

    def rank(peers):
        codec = PowerSGD(3, shapes=((60, 60),))
        slot = Feedback(codec, residual=False)["m"]
        plan, errors = PowerReduce(peers, codec, x.size, scaled_sum(0.5), slot), []
        for _ in range(8):
            out = np.empty_like(x)
            slot.begin(x)
            plan.run(x, out)
            slot.end(out, plan.waits, plan.spoilt)
            errors.append(float(np.linalg.norm(out - x)))
        return errors

    errors = on_ranks(2, rank)[0]
    best = float(np.sqrt((0.7 ** (2 * np.arange(3, 60))).sum()))
    assert errors[-1] <= 1.02 * best < 0.8 * errors[0]


def test_a_zero_gradient_does_not_end_powersgd():
    def rank(peers):
        codec = PowerSGD(2, shapes=((20, 20),))
        slot = Feedback(codec, residual=False)["m"]
        plan = PowerReduce(peers, codec, 400, SUM, slot)
        rows = np.arange(20, dtype=np.float32)
        for x in (np.zeros(400, np.float32), np.outer(rows, rows + 1).reshape(-1).astype(np.float32)):
            out = np.empty_like(x)
            slot.begin(x)
            plan.run(x, out)
            slot.end(out, plan.waits, plan.spoilt)
        return x, out

    for x, out in on_ranks(2, rank):
        np.testing.assert_allclose(out, 2 * x, rtol=1e-4, atol=1e-2)


def test_rows_become_orthogonal_and_dependent_ones_zero():
    rows = np.random.default_rng(1).standard_normal((4, 50)).astype(np.float32)
    rows[2] = 2 * rows[0] - rows[1]
    orthogonalise(rows)
    np.testing.assert_allclose(rows @ rows.T, np.diag([1, 1, 0, 1]), atol=1e-6)


@pytest.mark.parametrize("codec", [Quantized("int8", 32), Quantized("fp8", 32), Cast("fp16")], ids=str)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_step_with_infinity_or_nan_leaves_nothing_behind(codec, bad):
    def rank(peers):
        slot, results = Feedback(codec)["x"], []
        plan = make(peers, codec, 200, 0.5, slot)
        for step in range(4):
            x = gradient(peers.rank, step, 200)
            if step == 1 and peers.rank == 1:
                x[150] = bad
            slot.begin(x)
            plan.run(x, x)
            slot.end(x, plan.waits, plan.spoilt)
            results.append(x)
        return results, slot.residual

    for results, residual in on_ranks(2, rank):
        assert not np.isfinite(results[1][150]), "a training must see it"
        assert all(np.isfinite(results[i]).all() for i in (0, 2, 3)) and np.isfinite(residual).all()


def test_a_sum_times_zero_leaves_nothing_behind():
    codec = Quantized("int8", 32)
    results = on_ranks(2, lambda p: train(p, codec, 100, 3, factor=0.0))
    for sums, slot in results:
        assert not np.any(sums) and np.isfinite(slot.residual).all()


def test_the_first_call_of_a_slot_is_not_for_a_graph(monkeypatch):
    x = np.ones(10, np.float32)
    monkeypatch.setattr("flagcx.compression.slot.on_device", lambda array: True)
    monkeypatch.setattr("flagcx.compression.slot.captures", lambda array: True)
    slot = Feedback("int8")["layer"]
    with pytest.raises(ArgumentError, match=r"the slot 'layer' .* is new: .*make one call before"):
        slot.begin(x)
    Slot(Quantized("int8"), residual=False).begin(x)  # which remembers no array
    monkeypatch.setattr("flagcx.compression.slot.captures", lambda array: False)
    slot.begin(x)
    monkeypatch.setattr("flagcx.compression.slot.captures", lambda array: True)
    slot.begin(x)
    assert slot.step == 2
