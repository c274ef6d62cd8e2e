"""The model of collectives over hosts, beside times by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagcx.algorithms.candidate import Candidate
from flagcx.cost.hosts import HostLinks, predict_over_hosts
from flagcx.selection.candidates import Request
from flagcx.selection.rules import MultiHostRules

LINKS = HostLinks.of(0.125, 50.0)
PAIRS, UNEVEN, SINGLE = ((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((0,), (1,))
MB = 1_000_000


def time_us(collective, algorithm, nbytes, groups, **options):
    order = tuple(rank for group in groups for rank in group)
    candidate = Candidate(algorithm).along(order, groups)
    return predict_over_hosts(collective, candidate, nbytes, groups, LINKS, **options).time_us


def test_laws_follow_what_was_measured():
    links = HostLinks(((1000, 60.0), (2000, 70.0), (100_000, 1050.0)), ((1000, 5.0), (2000, 6.0)))
    assert links.law(links.between, 500) == links.law(links.between, 2000) == (50.0, 0.1)
    assert links.law(links.between, 10_000) == links.law(links.between, 10**9) == (50.0, 0.1)
    assert links.law(links.inside, 10**6) == (4.0, 1.0)


def test_what_a_link_lets_pass_at_once_is_not_its_speed():
    """Up to 250 kB at once, and the rest at 0.1 GB/s."""
    links = HostLinks(((1000, 51.0), (250_000, 300.0), (500_000, 2800.0), (2_000_000, 17_800.0)), ())
    assert links.law(links.between, 100_000) == (50.0, 0.1)
    assert links.law(links.between, 400_000) == links.law(links.between, 10**9) == (0.0, 0.1)


def test_calls_take_what_was_measured_beyond_messages():
    slow = replace(LINKS, step_us=100.0, signal_us=40.0)
    for algorithm, more in (("recursive_doubling", 2 * 100.0), ("hierarchical", 2 * 25.0)):
        candidate = Candidate(algorithm).along((0, 1, 2, 3), PAIRS)
        known, found = (
            predict_over_hosts("allreduce", candidate, 1 << 10, PAIRS, links).time_us
            for links in (LINKS, slow)
        )
        assert found - known == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize(
    ("collective", "groups", "crossings"),
    [
        ("allreduce", PAIRS, 1.0),  # in each direction
        ("allreduce", ((0, 1), (2, 3), (4, 5)), 4 / 3),
        ("broadcast", ((0, 1), (2, 3), (4, 5)), 1.0),
        ("allgather", PAIRS, 0.5),
        ("reduce_scatter", UNEVEN, 0.75),
    ],
)
def test_a_long_message_takes_as_long_as_the_links(collective, groups, crossings):
    """A message of 64 MB, or blocks of as many bytes together, at 8 ms each MB."""
    blocks = sum(map(len, groups)) if collective in ("allgather", "reduce_scatter") else 1
    found = time_us(collective, "hierarchical", 64 * MB // blocks, groups)
    assert 1.0 < found / (crossings * 64 * 8000) < 1.12


def test_a_ring_in_the_order_of_hosts():
    """Of 2(n-1) steps each carries a quarter of the message over each link."""
    assert time_us("allreduce", "ring", 64 * MB, PAIRS) == pytest.approx(6 / 4 * 64 * 8000, rel=0.04)
    assert time_us("allreduce", "ring", 64 * MB, SINGLE) == pytest.approx(64 * 8000, rel=0.04)


def test_a_short_message_takes_latencies():
    assert time_us("allreduce", "recursive_doubling", 8, SINGLE) == pytest.approx(50, rel=0.05)
    assert time_us("allreduce", "ring", 8, SINGLE) == pytest.approx(100, rel=0.05)
    assert time_us("allreduce", "hierarchical", 8, PAIRS) < 90


def test_a_barrier_has_no_bytes():
    assert time_us("barrier", "dissemination", MB, PAIRS) == time_us("barrier", "dissemination", 0, PAIRS)


def test_ranks_without_memory_in_common_go_step_by_step():
    nbytes = 64 * MB
    apart = time_us("allreduce", "hierarchical", nbytes, PAIRS, shared=False)
    assert apart > 1.05 * time_us("allreduce", "hierarchical", nbytes, PAIRS)


@pytest.mark.parametrize(
    ("collective", "nbytes", "groups", "chosen"),
    [
        ("allreduce", 1 << 26, PAIRS, "hierarchical"),
        ("allgather", 1 << 20, PAIRS, "hierarchical"),
        ("broadcast", 1 << 24, UNEVEN, "hierarchical"),
        ("allgather", 1 << 10, UNEVEN, "direct"),  # one latency in place of three steps
    ],
)
def test_the_model_corrects_the_rule(collective, nbytes, groups, chosen):
    request = Request(collective, nbytes, sum(map(len, groups)))
    choice = MultiHostRules(groups, LINKS).choose(request)
    assert choice.algorithm == chosen and choice.piece_nbytes == 0
    if chosen == "direct":
        assert "by the links' measured times" in choice.reason


def test_ranks_choose_alike_whatever_their_machines_are():
    """The model rests on what rank 0 tells alone: it asks nothing of this machine."""
    few = HostLinks.of(1.25, 20.0)
    many = HostLinks(few.between, few.inside, few.copy_gb_per_s, few.add_gb_per_s, cores=2)
    assert predict_over_hosts("allreduce", Candidate("ring"), MB, ((0, 1, 2, 3), (4,)), many).time_us > (
        predict_over_hosts("allreduce", Candidate("ring"), MB, ((0, 1, 2, 3), (4,)), few).time_us
    )
