"""Looking algorithms up, and a user's own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flagcx.algorithms import Algorithm, build, catalogue, entries, entry, register, unregister
from flagcx.algorithms.direct import direct_broadcast, direct_reduce, one_shot_allreduce
from flagcx.algorithms.tree import tree_broadcast
from flagcx.errors import ArgumentError, RankError, ScheduleError
from flagcx.schedule.compose import recv_reduce, schedule_of, send, then
from flagcx.schedule.model import Program, Step


def star(size):
    return then(direct_reduce(size), direct_broadcast(size))


@pytest.fixture
def own():
    """Removes what a test registers as "own" for any collective."""
    yield "own"
    for known in catalogue():
        if known.algorithm == "own":
            unregister("own", known.collective)


def lacking(size, wrong=lambda size: True):
    """An allreduce whose last rank forgets to add and to copy."""
    right = one_shot_allreduce(size)

    def make(rank):
        program = right.program(rank)
        if rank == size - 1 and wrong(size):
            return Program(rank, tuple(Step(step.transfers) for step in program.steps))
        return program

    return replace(right, make=make)


def test_algorithm_is_its_name():
    assert Algorithm.RING == "ring" and str(Algorithm.RING) == f"{Algorithm.RING}" == "ring"
    assert Algorithm.DBT is Algorithm.DOUBLE_BINARY_TREE is Algorithm("double_binary_tree")
    assert all(isinstance(found.algorithm, Algorithm) for found in catalogue())
    served = {found.algorithm for found in catalogue()}
    assert set(Algorithm) - served == {Algorithm.NATIVE}


def test_build_takes_a_member_or_its_name_and_keeps_the_schedule():
    assert build("allreduce", Algorithm.RING, 4) is build("allreduce", "ring", 4)
    assert build("allreduce", Algorithm.DBT, 4).algorithm == "double_binary_tree"
    assert build("allreduce", "hierarchical", 4, groups=[[0, 1], [2, 3]]) is build(
        "allreduce", "hierarchical", 4, groups=((0, 1), (2, 3))
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("allreduce", "rign", 4),
            "'rign' does not serve allreduce; expected one of ring, chain, tree, ",
        ),
        (
            ("scatter", "ring", 4, 0),
            "'ring' does not serve scatter; expected one of binomial, direct",
        ),
        (
            ("all_reduce", "ring", 4),
            "'all_reduce' is not known; expected one of allreduce, reduce",
        ),
        (("allreduce", Algorithm.NATIVE, 4), r"'native' does not serve allreduce \(it is the library's own"),
        (("broadcast", "tree", 4), "'tree' of broadcast needs a root from 0 to 3, got root=None"),
        (("allreduce", "ring", 4, 0), "'ring' of allreduce has no root, got root=0"),
        (
            ("allreduce", "bruck", 4, None, 2),
            "'bruck' of allreduce is not pipelined, got pieces=2",
        ),
        (("allreduce", "ring", 4, None, 1, ((0, 1), (2, 3))), "'ring' of allreduce does not take groups"),
        (("allreduce", "ring", 0), "'ring' of allreduce cannot serve 0 ranks: expected 1 or more"),
        (("allreduce", "ring", 4, None, 0), "the message would have 0 chunks; expected pieces >= 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        build(*arguments)


@pytest.mark.parametrize(
    "found", [e for e in catalogue() if e.rooted], ids=lambda e: f"{e.collective}-{e.algorithm}"
)
def test_a_root_out_of_range_is_refused(found):
    for root in (-1, 4):
        with pytest.raises(RankError, match=f"root={root} is not a rank; expected 0 to 3"):
            build(found.collective, found.algorithm, 4, root)


def test_a_user_registers_an_algorithm_in_a_line(own):
    register(own, "allreduce", star)
    schedule = build("allreduce", own, 6)
    assert (schedule.algorithm, schedule.size) == (own, 6)
    assert entries("allreduce")[-1] is entry("allreduce", own)
    assert (entry("allreduce", own).steps(6, 1), entry("allreduce", own).sent(6, 1)) == (2, 5)
    unregister(own, "allreduce")
    with pytest.raises(ArgumentError, match="algorithm='own' does not serve allreduce"):
        build("allreduce", own, 6)


def test_a_rooted_and_pipelined_algorithm_of_a_user(own):
    register(own, "broadcast", lambda size, root, pieces=1: tree_broadcast(size, root, pieces))
    assert entry("broadcast", own).pipelined
    assert build("broadcast", own, 5, root=3, pieces=4).chunks == 4


def test_a_new_algorithm_of_the_same_name_does_not_get_old_schedules(own):
    register(own, "allreduce", star)
    old = build("allreduce", own, 4)
    unregister(own, "allreduce")
    register(own, "allreduce", one_shot_allreduce)
    assert len(build("allreduce", own, 4).program(0).steps) < len(old.program(0).steps)


def test_a_wrong_algorithm_is_refused_when_registered(own):
    with pytest.raises(ScheduleError, match=r"rank 1, .*OUTPUT.* nothing was ever written to it"):
        register(own, "allreduce", lacking, sizes=(2, 3))
    with pytest.raises(ArgumentError, match="'own' does not serve"):
        entry("allreduce", own)


def test_a_wrong_algorithm_is_refused_at_the_first_size_at_which_it_is_wrong(own):
    register(own, "allreduce", lambda size: lacking(size, wrong=lambda n: n == 12))
    build("allreduce", own, 11)
    with pytest.raises(ScheduleError, match="rank 11"):
        build("allreduce", own, 12)


def test_blocks_of_one_size_are_not_taken_for_blocks_of_any(own):
    def function(size):
        return entry("alltoall", "bruck").function(size)

    register(own, "alltoall", function)
    unregister(own, "alltoall")
    with pytest.raises(ScheduleError):
        register(own, "alltoall", function, uneven=True)


def test_an_algorithm_for_some_sizes_only(own):
    def even_only(size):
        if size % 2:
            raise ArgumentError(f"even numbers of ranks only, got {size}")
        return star(size)

    with pytest.raises(
        ArgumentError, match="'own' of allreduce cannot serve 3 ranks: even numbers of ranks only"
    ):
        register(own, "allreduce", even_only, sizes=(2, 3))
    register(own, "allreduce", even_only)
    assert entry("allreduce", own).allows(8) and not entry("allreduce", own).allows(9)
    with pytest.raises(
        ArgumentError, match="'own' of allreduce cannot serve 9 ranks: even numbers of ranks only"
    ):
        build("allreduce", own, 9)


def test_names_in_use_and_strange_schedules_are_refused(own):
    with pytest.raises(ArgumentError, match="an algorithm 'ring' already, of the library's own; give"):
        register("ring", "allreduce", star)
    with pytest.raises(ArgumentError, match=r"'own' made a schedule for .*'allreduce', 1, None.*'reduce', 1"):
        register(own, "reduce", lambda size, root: star(size))
    with pytest.raises(ArgumentError, match="collective='sum' is not known"):
        register(own, "sum", star)
    with pytest.raises(ArgumentError, match="'ring' of allreduce comes with flagcx and cannot be removed"):
        unregister("ring", "allreduce")


@pytest.mark.parametrize("sizes", [(), "ab", (0, 2), 3, (2.5,)])
def test_sizes_that_are_no_numbers_of_ranks_are_refused(own, sizes):
    with pytest.raises(ArgumentError, match="expected numbers of ranks, at least one, each from 1 up"):
        register(own, "allreduce", star, sizes=sizes)


@pytest.mark.parametrize("name", [None, "native", "auto", "", "ring|mine", "ring 3/4", "2d", "größe", "a,b"])
def test_names_that_mean_something_else_are_refused(name):
    with pytest.raises(ArgumentError, match=f"name={re.escape(repr(name))} cannot be an algorithm's"):
        register(name, "allreduce", star)


def test_a_cell_that_is_run_again_replaces_its_algorithm(own):
    cell = "def mine(size):\n    return {}(size)"
    for function in ("star", "one_shot_allreduce"):
        names = {"star": star, "one_shot_allreduce": one_shot_allreduce, "__name__": "__main__"}
        exec(cell.format(function), names)
        register(own, "allreduce", names["mine"])
    assert build("allreduce", own, 4).program(0) == one_shot_allreduce(4).program(0)
    with pytest.raises(ArgumentError, match=r"'own' already, that __main__\.mine makes; give"):
        register(own, "allreduce", star)


def test_an_algorithm_is_verified_at_the_first_size_that_it_serves(own):
    def from_twelve(size, right=False):
        if size < 12:
            raise ArgumentError(f"size={size}; expected 12 or more")
        return star(size) if right else lacking(size)

    with pytest.raises(ScheduleError, match="'own' of allreduce, 12 ranks: rank 11"):
        register(own, "allreduce", from_twelve)
    register(own, "allreduce", lambda size: from_twelve(size, right=True))
    unregister(own, "allreduce")
    with pytest.raises(ArgumentError, match="serves no number of ranks from 1 to 64; for 8 it says: size=8"):
        register(own, "allreduce", lambda size: from_twelve(min(size, 8)))


def _rounds(rounds, first=0):
    """Two ranks exchange their message in round ``first`` of a pattern that says it has ``rounds``."""
    return schedule_of(
        "allreduce",
        "two",
        2,
        1,
        rounds,
        lambda rank: [send(first, 1 - rank, 0), recv_reduce(first, 1 - rank, 0)],
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda size: _rounds(0), "rank 0 sends to rank 1 in round 0, but the schedule has rounds=0"),
        (lambda size: _rounds(1, -1), "rank 0 sends to rank 1 in round -1, but the schedule has rounds=1"),
        (lambda size: {}["step"], "'own' of allreduce, 2 ranks: it raised KeyError: 'step'"),
        (lambda size: replace(star(2), make=lambda rank: 1 // 0), "2 ranks: it raised ZeroDivisionError"),
        (
            lambda size: schedule_of("allreduce", "far", 2, 1, 1, lambda rank: [send(0, 1 - rank, 1)]),
            "rank 0 sends to rank 1 chunks 1 to 2 in round 0, but the message has chunks=1",
        ),
    ],
)
def test_mistakes_in_a_function_are_said_to_be_there(own, function, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        register(own, "allreduce", function, sizes=(2,))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda size: 3, "the function of algorithm 'own' returned 3 for size=1; it must return a Schedule"),
        (lambda size: None, "returned None for size=1"),
        (lambda: star(2), r"cannot be called as build\(size\) \(too many positional arguments\)"),
        (3, r"build=3 cannot be called as build\(size\)"),
    ],
)
def test_what_makes_no_schedule_is_refused(own, function, message):
    with pytest.raises(ArgumentError, match=message):
        register(own, "allreduce", function)
    assert own not in {str(found.algorithm) for found in entries("allreduce")}


def test_an_algorithm_of_a_rooted_collective_takes_a_root(own):
    with pytest.raises(ArgumentError, match=r"cannot be called as build\(size, root=...\) .*'root'"):
        register(own, "broadcast", lambda size: direct_broadcast(size))


def test_no_schedule_for_a_number_of_ranks_met_later(own):
    register(own, "allreduce", lambda size: star(size) if size < 10 else None)
    with pytest.raises(ArgumentError, match="returned None for size=10"):
        build("allreduce", own, 10)
