"""then, beside and relabel: each whole is verified, executed, and made one program at a time."""

from __future__ import annotations

import doctest
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from flagcx.algorithms import build
from flagcx.errors import ArgumentError, ScheduleError
from flagcx.schedule import compose
from flagcx.schedule.compose import beside, relabel, then
from flagcx.schedule.lower import levels
from flagcx.schedule.model import Buffer, Copy, Program, Schedule, Send, Step
from flagcx.schedule.traffic import rounds_of
from flagcx.schedule.verify import verify
from tests.oracle import outcome
from tests.schedule.samples import (
    all_samples,
    binomial_broadcast,
    binomial_reduce,
    one_shot,
    pairwise_alltoall,
    ring_allgather,
    ring_allreduce,
    ring_reduce_scatter,
    star_gather,
    star_scatter,
    two_shot,
)

SIZES = [1, 2, 3, 4, 5, 7, 8]


def right(schedule: Schedule, uneven: bool = False) -> Schedule:
    """Verifies and executes."""
    verify(schedule, uneven=uneven)
    assert outcome(schedule, trials=2, uneven=uneven) is None, schedule
    return schedule


def shuffled(n: int) -> list[int]:
    order = list(range(n))
    random.Random(n).shuffle(order)
    return order


def counting(schedule: Schedule) -> tuple[Schedule, list[int]]:
    """The schedule and a list to which each program that is made adds its rank."""
    asked: list[int] = []

    def make(rank: int) -> Program:
        asked.append(rank)
        return schedule.make(rank)

    return replace(schedule, make=make), asked


def then_pairs(n: int) -> list[tuple[str, Schedule]]:
    last, middle = n - 1, n // 2
    return [
        ("allreduce", then(ring_reduce_scatter(n), ring_allgather(n))),
        ("allreduce", then(ring_reduce_scatter(n, 2), ring_allgather(n, 3))),
        ("allreduce", then(binomial_reduce(n, middle), binomial_broadcast(n, middle))),
        ("allgather", then(star_gather(n, last), binomial_broadcast(n, last))),
        ("broadcast", then(star_scatter(n, middle, 2), ring_allgather(n, 3))),
        ("reduce", then(ring_reduce_scatter(n, 2), star_gather(n, last))),
        ("reduce_scatter", then(binomial_reduce(n, middle), star_scatter(n, middle))),
    ]


@pytest.mark.parametrize("n", SIZES)
def test_then(n):
    for collective, schedule in then_pairs(n):
        assert right(schedule).collective == collective
        right(schedule, uneven=collective in ("allgather", "reduce_scatter"))


def test_then_needs_no_copy_between_its_parts():
    schedule = then(ring_reduce_scatter(4), ring_allgather(4))
    copies = [w for step in schedule.program(1).steps for w in step.local if isinstance(w, Copy)]
    assert len(copies) == 1
    assert (copies[0].src.buffer, copies[0].dst.buffer) == (Buffer.INPUT, Buffer.OUTPUT)
    assert rounds_of(schedule).sent_chunks().tolist() == [6] * 4


def test_then_takes_root_name_and_alignment_from_its_parts():
    schedule = then(ring_reduce_scatter(4, 2), star_gather(4, 3, 3))
    assert (schedule.root, schedule.algorithm, schedule.chunks, schedule.aligned) == (
        3,
        "ring+star",
        24,
        True,
    )
    assert not then(star_gather(4), binomial_broadcast(4)).aligned
    assert then(ring_reduce_scatter(4), ring_allgather(4), algorithm="mine").algorithm == "mine"
    assert then(ring_reduce_scatter(4), ring_allgather(4)).algorithm == "ring"


def test_then_refuses_what_does_not_fit():
    with pytest.raises(ArgumentError, match=r"the same number of ranks, got \[3, 4\]"):
        then(ring_reduce_scatter(3), ring_allgather(4))
    with pytest.raises(
        ArgumentError,
        match="is no collective: it begins with one block on each rank and ends with one block on each rank",
    ):
        then(ring_allgather(3), ring_reduce_scatter(3))
    with pytest.raises(
        ArgumentError, match="is no broadcast: it begins with all of the message on every rank"
    ):
        then(ring_reduce_scatter(3), ring_allgather(3), collective="broadcast")
    with pytest.raises(ArgumentError, match="at least one part"):
        then()
    with pytest.raises(ArgumentError, match=r"alltoall cannot be a part of then\(\)"):
        then(pairwise_alltoall(3), pairwise_alltoall(3), collective="alltoall")
    with pytest.raises(
        ArgumentError,
        match="the allgather begins with one block on each rank, but the reduce before it leaves all of the "
        "message on rank 0",
    ):
        then(binomial_reduce(3), ring_allgather(3))
    with pytest.raises(
        ArgumentError, match=r"broadcast begins with all of the message on rank 1, .* the message on rank 0"
    ):
        then(binomial_reduce(3, 0), binomial_broadcast(3, 1))


def pattern_pairs(n: int) -> list[Schedule]:
    last, middle = n - 1, n // 2
    return [
        then(build("reduce_scatter", "ring", n, None, 2), build("allgather", "ring", n, None, 3)),
        then(build("reduce", "tree", n, middle, 2), build("broadcast", "chain", n, middle, 3)),
        then(build("gather", "binomial", n, last), build("broadcast", "tree", n, last, 3)),
        then(build("scatter", "binomial", n, middle), build("allgather", "ring", n, None, 3)),
        then(build("reduce_scatter", "bruck", n), build("gather", "direct", n, last)),
        then(build("reduce", "tree", n, middle, 2), build("scatter", "direct", n, middle)),
        then(build("reduce", "chain", n, 0), build("broadcast", "direct", n, 0), collective="barrier"),
    ]


@pytest.mark.parametrize("n", SIZES)
def test_then_of_patterns(n):
    """One pattern is made of all, with the steps of both and no step between them."""
    for schedule, (collective, _) in zip(
        pattern_pairs(n), [*then_pairs(n)[1:], ("barrier", None)], strict=True
    ):
        assert right(schedule, uneven=collective in ("allgather", "reduce_scatter")).collective == collective
        assert schedule.aligned
        assert len(schedule.program(0).steps) == 1 + schedule.make.rounds


@pytest.mark.parametrize("n", SIZES)
def test_then_of_a_pattern_and_other_schedules(n):
    right(then(build("reduce_scatter", "ring", n), ring_allgather(n, 2)))
    right(then(build("reduce", "direct", n, n - 1), build("broadcast", "tree", n, n - 1, 2)))


@pytest.mark.parametrize("n", SIZES)
def test_relabel(n):
    order = shuffled(n)
    for schedule in all_samples(n):
        changed = right(relabel(schedule, order), uneven=True)
        assert changed.root == (None if schedule.root is None else order[schedule.root])
        assert changed.aligned == schedule.aligned


def test_relabel_moves_the_links():
    programs = relabel(ring_allreduce(4), [2, 0, 3, 1]).programs()
    transfers = [(p.rank, t) for p in programs for step in p.steps for t in step.transfers]
    assert {(rank, t.peer) for rank, t in transfers if isinstance(t, Send)} == {
        (2, 0),
        (0, 3),
        (3, 1),
        (1, 2),
    }


def test_relabel_by_the_same_order_changes_nothing():
    for schedule in all_samples(5):
        same = relabel(schedule, range(5))
        unchanged = [p.steps for p in schedule.programs()]
        assert [p.steps for p in same.programs()] == unchanged


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3]])
def test_relabel_refuses_what_is_no_permutation(order):
    with pytest.raises(ArgumentError, match="each rank from 0 to 2 once, got order="):
        relabel(one_shot(3), order)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("share", [0.5, 0.3, Fraction(3, 4)])
def test_beside(n, share):
    order = shuffled(n)
    for schedule in all_samples(n):
        other = schedule if schedule.root is not None else relabel(schedule, order)
        assert right(beside(schedule, other, share), uneven=True).aligned


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_beside_of_different_algorithms(n):
    for a, b in [
        (ring_allreduce(n), one_shot(n)),
        (two_shot(n), ring_allreduce(n)),
        (one_shot(n), two_shot(n)),
    ]:
        right(beside(a, b, 0.25))
    tree = then(binomial_reduce(n), binomial_broadcast(n))
    right(beside(ring_allreduce(n), tree, 0.75))
    mirrored = relabel(tree, range(n)[::-1])
    right(beside(tree, mirrored))


@pytest.mark.parametrize("n", [3, 4, 8])
def test_trees_merged_step_by_step_would_hang_and_beside_does_not(n):
    tree = then(binomial_reduce(n), binomial_broadcast(n))
    mirrored = relabel(tree, range(n)[::-1])
    careless = beside(replace(tree, aligned=True), replace(mirrored, aligned=True))
    with pytest.raises(ScheduleError):
        verify(replace(careless, aligned=False))
    assert outcome(careless, trials=1) is not None
    right(beside(tree, mirrored))


@pytest.mark.parametrize(
    ("share", "part"), [(0.5, Fraction(1, 2)), (0.75, Fraction(3, 4)), (0.1, Fraction(1, 10))]
)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_beside_gives_each_its_share(n, share, part):
    schedule = beside(ring_allreduce(n), one_shot(n), share)
    of_ring = Fraction(2 * (n - 1), n) * part
    of_one_shot = (n - 1) * (1 - part)
    sent = rounds_of(schedule).sent_chunks()
    assert Fraction(int(sent[1]), schedule.chunks) == of_ring + of_one_shot


def test_beside_rounds_to_the_nearest_share():
    assert beside(one_shot(2), one_shot(2), 1 / 3).chunks == 3
    assert beside(one_shot(2), one_shot(2), 0.001).chunks == 64
    assert beside(one_shot(2), one_shot(2), Fraction(1, 1000)).chunks == 1000


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5])
def test_beside_refuses_shares_out_of_range(share):
    with pytest.raises(ArgumentError, match="share above 0 and below 1, got"):
        beside(one_shot(2), ring_allreduce(2), share)


def test_beside_refuses_different_collectives_and_roots():
    with pytest.raises(
        ArgumentError, match=r"same collective, size and root.*'broadcast', 3, 0.*'broadcast', 3, 1"
    ):
        beside(binomial_broadcast(3), binomial_broadcast(3, 1))
    with pytest.raises(ArgumentError, match="same collective"):
        beside(one_shot(3), ring_allgather(3))


def test_composition_of_compositions():
    n = 6
    halves = then(ring_reduce_scatter(n), beside(ring_allgather(n), relabel(ring_allgather(n), shuffled(n))))
    tree = then(binomial_reduce(n, 2), binomial_broadcast(n, 2))
    right(relabel(beside(halves, tree, 0.6), shuffled(n)))


@pytest.mark.parametrize("seed", range(12))
def test_random_compositions(seed):
    rng = random.Random(seed)
    n = rng.randrange(2, 7)

    def any_of(depth: int) -> Schedule:
        kind = rng.choice(("leaf", "beside", "relabel", "then", "levels")) if depth else "leaf"
        if kind == "beside":
            return beside(any_of(depth - 1), any_of(depth - 1), Fraction(rng.randrange(1, 5), 5))
        if kind == "relabel":
            return relabel(any_of(depth - 1), rng.sample(range(n), n))
        if kind == "then":
            root = rng.randrange(n)
            first, second = rng.choice(
                [
                    (ring_reduce_scatter(n, rng.randrange(1, 3)), ring_allgather(n, rng.randrange(1, 3))),
                    (binomial_reduce(n, root), binomial_broadcast(n, root)),
                ]
            )
            return then(first, second)
        if kind == "levels":
            return levels(replace(any_of(depth - 1), aligned=False))
        return rng.choice((ring_allreduce, one_shot, two_shot))(n)

    right(any_of(3))


def test_one_program_of_many_ranks_asks_for_few_others():
    n = 10_000
    ring, asked = counting(Schedule("allreduce", "idle", n, n, lambda r: Program(r, (Step(),)), aligned=True))
    relabel(ring, range(n)[::-1]).program(3)
    assert asked == [n - 4]
    asked.clear()
    beside(ring, ring).program(7)
    assert asked == [7, 7]
    asked.clear()
    gather, asked = counting(ring_allgather(n))
    then(ring_reduce_scatter(n), gather).program(9_999)
    assert asked == [9_999]


def test_the_example_of_the_documentation_runs():
    assert doctest.testmod(compose).attempted >= 8
    assert doctest.testmod(compose).failed == 0
