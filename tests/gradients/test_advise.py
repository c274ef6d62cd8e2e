"""Advice for a training: what is chosen on which link, and that nothing is lost unless it may be."""

from __future__ import annotations

import io
import json
import re

import pytest

import flagcx as fc
from flagcx.compression import catalogue

MIB = 1 << 20
SLOW = {"ranks": 4, "link_gb_per_s": 0.125}


def option(advice: fc.Advice, name: str):
    """The option of a name."""
    return next(one for one in advice.options if name in (one.compression, one.algorithm))


def test_nothing_lossy_unless_it_is_allowed():
    advice = fc.advise(100 * MIB, step_time=0.1, **SLOW)
    assert advice.chosen.lossless and not advice.chosen.compression
    assert {one.compression for one in advice.options} - {""} == set(catalogue()) - {"sparse"}
    assert re.search(r"loses? something; allow (it|the latter) by lossy=\(", advice.reason)


@pytest.mark.parametrize("step_time", [0.1, 0.3, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("speed", [0.05, 0.125, 0.5, 1.0])
def test_the_fastest_row_is_named_as_what_loses_something(speed, step_time):
    advice = fc.advise(100 * MIB, ranks=4, link_gb_per_s=speed, step_time=step_time)
    first = advice.options[0]
    said = re.search(r"\. (\S+(?: \+ feedback)?) would take (\S+ \S+?),", advice.reason)
    assert (said is None) == (first.step_us >= 0.97 * advice.chosen.step_us)
    assert said is None or said.group(1) == first.name
    assert said is None or f"  {said.group(2)}  " in str(advice).splitlines()[2], "its time is the row's"
    names = re.findall(r"lossy=\('(\w+)',\)", advice.reason)
    assert all(
        fc.advise(
            100 * MIB, ranks=4, link_gb_per_s=speed, step_time=step_time, lossy=names
        ).chosen.compression
        == name
        for name in names
    )


def test_a_gentler_choice_stands_beside_the_fastest():
    advice = fc.advise(500_000_000, ranks=4, link_gb_per_s=1.0, step_time=0.5)
    assert advice.options[0].compression == "randomk"
    assert ". randomk + feedback would take " in advice.reason
    assert ", and bf16, which takes less from the data, " in advice.reason
    assert advice.reason.endswith("but they lose something; allow the latter by lossy=('bf16',).")


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "topk", "powersgd"])
def test_a_codec_that_is_allowed_is_taken_on_a_slow_link(codec):
    plain = fc.advise(100 * MIB, step_time=0.1, **SLOW)
    advice = fc.advise(100 * MIB, step_time=0.1, lossy=(codec,), **SLOW)
    assert advice.chosen.compression == codec
    assert advice.chosen.step_us < 0.8 * plain.chosen.step_us
    assert advice.chosen.feedback == catalogue()[codec].needs_feedback
    assert "without compression it would take" in advice.reason


def test_the_gentlest_of_equally_fast_choices():
    """Behind a long computation bf16 hides wholly, so nothing coarser is needed."""
    advice = fc.advise(100 * MIB, step_time=1.0, lossy=True, **SLOW)
    assert advice.chosen.compression == "bf16"
    assert fc.advise(100 * MIB, step_time=0.3, lossy=True, **SLOW).chosen.compression not in ("", "bf16")


def test_no_compression_through_shared_memory():
    advice = fc.advise(100 * MIB, ranks=2, lossy=True)
    assert advice.chosen.algorithm == "two_shot" and not advice.chosen.compression
    assert "one host, through shared memory" in advice.title


def test_sparse_gradients_go_losslessly_where_that_is_faster():
    assert fc.advise(100 * MIB, step_time=0.1, density=0.01, **SLOW).chosen.compression == "sparse"
    dense = fc.advise(100 * MIB, step_time=0.1, density=0.9, **SLOW)
    assert not dense.chosen.compression and option(dense, "sparse").step_us > dense.chosen.step_us
    steps = [
        option(fc.advise(100 * MIB, density=d, **SLOW), "sparse").communication_us for d in (0.001, 0.01, 0.1)
    ]
    assert steps == sorted(steps)


def test_machines_and_clusters():
    one = fc.advise(4 << 30, "dgx-a100", step_time=0.2)
    assert one.ranks == 8 and "on dgx-a100" in one.title and one.chosen.lossless
    assert any(o.algorithm == "native" for o in one.options)
    pcie = fc.advise(4 << 30, "8xa100-pcie", step_time=0.2)
    assert pcie.chosen.communication_us > 3 * one.chosen.communication_us
    assert fc.advise(4 << 30, "8xa100-pcie", step_time=0.2, lossy=True).chosen.compression
    assert fc.advise(4 << 30, fc.preset("dgx-a100"), ranks=16).ranks == 16
    assert "nothing to send" in fc.advise(4 << 30, "dgx-a100", ranks=1).reason


def test_a_step_is_never_shorter_than_its_computation_or_its_communication():
    for step_time in (0.0, 0.01, 0.3, 5.0):
        advice = fc.advise(100 * MIB, step_time=step_time, density=0.2, **SLOW)
        for one in advice.options:
            assert one.step_us >= max(step_time * 1e6, one.communication_us)
            assert one.step_us <= step_time * 1e6 + one.communication_us + 1000 * one.buckets
        steps = [one.step_us for one in advice.options]
        assert steps == sorted(steps)


def test_by_default_the_computation_takes_as_long_as_the_all_reduce():
    advice = fc.advise(100 * MIB, **SLOW)
    assert advice.compute_us == pytest.approx(1.5 * 100 * MIB / 0.125 / 1e3, rel=0.01)


def test_it_prints_as_a_table_everywhere():
    advice = fc.advise(100 * MIB, step_time=0.1, lossy=("int8",), **SLOW)
    title, head, *rows, reason = str(advice).splitlines()
    assert title == "gradients of 100 MiB, 4 ranks over a link of 0.125 GB/s, 100 ms of computation"
    assert head.split() == ["choice", "buckets", "of", "sent", "communication", "step", "loses"]
    assert len(rows) == len(advice.options) and sum("<- use this" in row for row in rows) == 1
    assert reason == advice.reason
    values = json.loads(advice.to_json())
    assert values["chosen"]["compression"] == "int8" and len(values["options"]) == len(rows)
    assert "<th>communication</th>" in advice._repr_html_()
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=150, file=io.StringIO())
    console.print(advice)
    shown = console.file.getvalue()
    assert "<- use this" in shown and "int8 in buckets of" in shown


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model_bytes": 0}, "model_bytes=0 must be at least 1"),
        ({"model_bytes": "20G"}, "model_bytes='20G' must be at least 1: a number of bytes, such as 20"),
        ({"model_bytes": None}, "model_bytes=None must be at least 1: a number of bytes"),
        ({"model_bytes": float("inf")}, "model_bytes=inf must be at least 1"),
        ({"ranks": 0}, "ranks=0 must be at least 1"),
        ({"ranks": "4"}, "ranks='4' must be at least 1, a whole number, or None"),
        ({"ranks": 2.5}, "ranks=2.5 must be at least 1, a whole number"),
        ({"step_time": "1s"}, "step_time='1s' must be seconds from 0"),
        ({"topology": 5}, "topology=5 must be a Topology, the name of a preset, or None"),
        ({"lossy": 5}, "lossy=5 must be True, False, or a list of names"),
        ({"lossy": ([],)}, "must be True, False, or a list of names"),
        ({"density": 1.5}, "density=1.5 must be from 0 to 1"),
        ({"step_time": -1}, "step_time=-1 must be seconds from 0"),
        ({"link_gb_per_s": 0}, "link_gb_per_s=0 must be above 0"),
        ({"lossy": ("zip",)}, r"lossy=\('zip',\) must be True, False, or a list of names out of bf16"),
        ({"lossy": "int8"}, "lossy='int8' must be True"),
        ({"topology": "dgx-a100", "link_gb_per_s": 1.0}, "exclude each other"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(fc.ArgumentError, match=message):
        fc.advise(**{"model_bytes": MIB, **wrong})


def test_an_unknown_machine():
    with pytest.raises(fc.TopologyError):
        fc.advise(MIB, "dgx-a1000")
