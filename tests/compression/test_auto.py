"""The decision of "auto": a pure function of the link; and the plan that follows it."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from flagcx.compression import Auto, Cast, Feedback, LinkProfile, Quantized, RandomK, TopK, catalogue, link
from flagcx.compression.auto import AutoReduce, coded_us, decide, dense_us
from flagcx.compression.link import measure_speed
from flagcx.compression.slot import Slot
from flagcx.compression.sparse_reduce import SparseReduce
from flagcx.compression.two_step import TwoStep
from flagcx.dtypes import OPS, scaled_sum
from flagcx.errors import ArgumentError
from tests.compression.peers import on_ranks

SLOW = LinkProfile(ranks=4, bandwidth_gb_per_s=0.0125, latency_us=100, known=True)
FAST = LinkProfile(ranks=4, bandwidth_gb_per_s=20, latency_us=10, busy=1.0)
SUM = OPS["sum"]
INT8 = {"int8": Quantized("int8")}


def test_a_slow_link_pays_for_coding_and_a_fast_one_does_not():
    slow, fast = (decide(1 << 24, link, INT8, {"int8": 1.0}) for link in (SLOW, FAST))
    assert (slow.chosen, fast.chosen) == ("int8", "dense")
    assert "int8, since the link has 0.0125 GB/s: int8 2045 ms, dense 8053 ms" in slow.reason
    assert "no codec, since the link was measured at 20 GB/s, and coding takes longer" in fast.reason
    assert str(fast) == fast.reason
    assert slow.predicted_us["dense"] == dense_us(64 << 20, SLOW)


def test_nothing_lossy_unless_it_is_allowed():
    decision = decide(1 << 24, SLOW, {}, {})
    assert '<td style="text-align:left"><b>dense</b></td>' in decision._repr_html_()
    assert decision.chosen == "dense"
    assert "no lossy codec, since none is allowed (Auto(lossy=...))" in decision.reason
    assert Auto().lossless and Auto().allowed == () and not Auto(lossy=True).lossless


def test_the_slower_the_codec_the_later_it_pays():
    crossing = [
        next(
            b
            for b in np.geomspace(10, 0.01, 50)
            if decide(1 << 22, LinkProfile(2, b, 20), INT8, {"int8": s}).chosen != "dense"
        )
        for s in (0.25, 1.0, 4.0)
    ]
    assert crossing == sorted(crossing) and crossing[0] < crossing[2]


def test_coding_and_sending_overlap_unless_the_core_sends():
    apart = LinkProfile(2, 0.1, 0)
    together = LinkProfile(2, 0.1, 0, busy=1.0)
    sending, coding = 250.0, 200.0
    assert coded_us(100_000, apart, 0.25, 0.5) == pytest.approx(max(sending, coding))
    assert coded_us(100_000, together, 0.25, 0.5) == pytest.approx(sending + coding)


def test_sparse_arrays_pay_on_slow_links_below_some_density():
    assert 0.1 < decide(1 << 24, SLOW, {}, {}).sparse_below < 0.5
    assert decide(1 << 24, LinkProfile(2, 20, 10, busy=1.0), {}, {}).sparse_below == 0
    assert decide(100, SLOW, {}, {}).sparse_below == 0


def test_alone_there_is_nothing_to_send():
    decision = decide(1000, LinkProfile(1, 1, 1), INT8, {"int8": 1.0})
    assert decision.chosen == "dense" and decision.reason.endswith("there is nothing to send")


@pytest.mark.parametrize("link", [SLOW, FAST])
@pytest.mark.parametrize("density", [0.01, 1.0])
def test_the_plan_does_what_was_decided(link, density, caplog):
    count = 1 << 16

    def rank(peers):
        random = np.random.default_rng(peers.rank)
        x = np.where(random.random(count) < density, random.standard_normal(count), 0).astype(np.float32)
        slot = Slot(Auto(lossy=("int8",)), residual=False)

        def make(codec):
            if codec.name == "sparse":
                return SparseReduce(peers, codec, count, SUM, slot)
            return TwoStep(peers, codec, count, SUM, slot)

        plan = AutoReduce(peers, slot.codec, count, SUM, slot, INT8, lambda: link, lambda codec: 1.0, make)
        slot.begin(x)
        out = np.empty_like(x)
        plan.run(x, out)
        slot.end(out, plan.waits, plan.spoilt)
        return x, out, peers.dense_calls

    with caplog.at_level(logging.INFO, "flagcx.compression"):
        done = on_ranks(4, rank)
    exact = np.sum([x for x, *_ in done], axis=0)
    _, out, dense_calls = done[0]
    lossless = link is FAST or density < 1
    assert np.linalg.norm(out - exact) <= (1e-6 if lossless else 0.02) * np.linalg.norm(exact)
    assert np.array_equal(out, exact) or not lossless or np.allclose(out, exact, atol=1e-5)
    assert dense_calls == (link is FAST)
    assert sum("compression='auto'" in r.getMessage() for r in caplog.records) == 1


def test_a_dense_choice_empties_the_residual():
    def rank(peers):
        slot = Feedback(Auto(lossy=("int8",)))["x"]
        x = np.arange(8, dtype=np.float32)
        common = peers, slot.codec, 8, scaled_sum(0.5), slot
        plan = AutoReduce(*common, INT8, lambda: FAST, lambda codec: 1.0, None)
        slot.begin(x)
        slot.residuals.before[...] = 1
        out = np.empty_like(x)
        plan.run(x, out)
        slot.end(out, plan.waits, plan.spoilt)
        return out, slot.residual

    for out, residual in on_ranks(2, rank):
        assert out.tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and not residual.any()


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("ranks", [2, 7])
@pytest.mark.parametrize("name", catalogue())
def test_speeds_are_measured_with_all_that_a_rank_does(name, ranks, feedback, monkeypatch):
    """With feedback, and with the stripes of as many ranks: half as fast as coding alone, or less."""
    made, real = [], link.reduce_of

    def reduce_of(peers, codec, count, factor, slot):
        made.append((peers.size, slot))
        return real(peers, codec, count, factor, slot)

    monkeypatch.setattr(link, "reduce_of", reduce_of)
    link._measured.cache_clear()
    codec = catalogue()[name].codec
    assert 0.001 < measure_speed(codec, ranks=ranks, feedback=feedback) < 1000
    ((size, slot),) = made
    assert size == ranks and slot.step > 3
    assert (slot.residual is not None) == (feedback and not codec.lossless)
    assert slot.residual is None or np.isfinite(slot.residual).all()


def test_all_ranks_send_what_a_decision_says():
    """Top-k of 1% on 16 ranks sends 1% once, and at most 4% of the sum: 5%, not 3%."""
    many = LinkProfile(ranks=16, bandwidth_gb_per_s=0.0125, latency_us=100, known=True)
    codecs = {"topk": TopK(0.01), "int8": Quantized("int8")}
    decision = decide(1 << 24, many, codecs, {"topk": 1.0, "int8": 1.0})
    dense = 2 * 15 * (64 << 20) // 16
    assert decision.sent_nbytes["dense"] == dense
    assert decision.sent_nbytes["topk"] == pytest.approx(0.05 * dense)
    assert decision.reason.endswith("; a rank sends 6 MiB, 5.0% of the dense 120 MiB")
    assert decision.predicted_us["topk"] == pytest.approx(0.05 * dense / 0.0125 / 1e3, rel=0.01)


def test_of_equally_fast_codecs_the_one_that_sends_least():
    """Where coding takes all the time: bf16 would come first by name."""
    decision = decide(
        1 << 24, SLOW, {"bf16": Cast("bf16"), "int8": INT8["int8"]}, {"bf16": 0.01, "int8": 0.01}
    )
    assert decision.predicted_us["bf16"] == decision.predicted_us["int8"] < decision.predicted_us["dense"]
    assert decision.chosen == "int8"


def test_random_k_is_never_chosen():
    codecs, speeds = {"randomk": RandomK(), **INT8}, {"randomk": 10.0, "int8": 1.0}
    decision = decide(1 << 24, SLOW, codecs, speeds)
    assert decision.chosen == "int8" and "randomk" not in decision.predicted_us
    assert "randomk is left out, since trainings diverge with it at the step size" in decision.reason
    assert decide(1 << 24, SLOW, {"randomk": RandomK()}, speeds).chosen == "dense"


def test_codecs_code_float32_whatever_the_array_has():
    """So arrays of float16 gain nothing from 16 bits."""
    decision = decide(1 << 24, SLOW, {"fp16": Cast("fp16")}, {"fp16": 100.0}, itemsize=2)
    assert decision.chosen == "dense"
    assert decision.sent_nbytes["fp16"] == decision.sent_nbytes["dense"]


def test_a_setting_that_is_wrong():
    with pytest.raises(ArgumentError, match=r"lossy='int8' must be True, False, or a list of codecs such as"):
        Auto(lossy="int8")
    with pytest.raises(ArgumentError, match="has two codecs of one name; give one of them"):
        Auto(lossy=("int8", Quantized("int8", block=32)))


@pytest.mark.parametrize("wrong", ["int9", 3, "auto", None])
def test_what_is_no_codec_is_refused_when_it_is_made(wrong):
    with pytest.raises(ArgumentError, match=r"has .*, which is no codec; expected names out of fp16, bf16, "):
        Auto(lossy=("int8", wrong))


def test_every_codec_may_be_allowed():
    names = tuple(catalogue())
    assert Auto(lossy=names).allowed == names
    codecs = tuple(entry.codec for entry in catalogue().values())
    assert Auto(lossy=codecs).allowed == codecs


def test_sizes_are_told_as_everywhere():
    slow = LinkProfile(ranks=2, bandwidth_gb_per_s=0.0125, latency_us=100)
    assert decide(6, slow, {}, {}).reason.startswith("24 B over 2 ranks: ")
    assert decide(1000, slow, {}, {}).reason.startswith("3.906 KiB over 2 ranks: ")
