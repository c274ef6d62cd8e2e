"""Modelled time: closed forms where nothing is shared, an event by event oracle, contention, and scale."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import log2

import numpy as np
import pytest

from flagcx.algorithms import build, catalogue
from flagcx.algorithms.candidate import Candidate
from flagcx.cost import model
from flagcx.cost.network import over, uniform
from flagcx.cost.simulate import Costs, lay
from flagcx.errors import ArgumentError, ScheduleError, TopologyError
from flagcx.schedule import traffic as rounds_module
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.derived_traffic import staggered
from flagcx.schedule.messages import match_messages
from flagcx.schedule.model import Buffer, Program, Recv, RecvReduce, Reduce, Schedule, Send, Step, span_of
from flagcx.schedule.traffic import rounds_of
from flagcx.topology import cluster, preset
from flagcx.topology.routes import Routes
from tests.ranges import exhaustive
from tests.speed import within

A, B = 1.25, 12.5
"""Latency in us, bandwidth in GB/s."""
NBYTES = 1_234_567
EXACT = pytest.approx


def close(value):
    return EXACT(value, rel=1e-9)


def time_of(schedule, costs=None, nbytes=NBYTES, **network):
    return lay(schedule, uniform(schedule.size, A, B, **network)).time(nbytes, costs).time_us


def names(entry):
    return f"{entry.collective}-{entry.algorithm}"


# -- closed forms


@pytest.mark.parametrize("size", range(1, 18))
def test_ring(size):
    step = A + NBYTES / (size * B * 1000)
    assert time_of(build("allreduce", "ring", size)) == close(2 * (size - 1) * step)
    adding = Costs(reduce_gb_per_s=5.0)
    more = (size - 1) * NBYTES / (size * 5.0 * 1000)
    assert time_of(build("allreduce", "ring", size), adding) == close(2 * (size - 1) * step + more)
    block = A + NBYTES / (B * 1000)
    assert time_of(build("allgather", "ring", size)) == close((size - 1) * block)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_recursive_doubling_and_halving(size):
    rounds = log2(size)
    whole = NBYTES / (B * 1000)
    assert time_of(build("allreduce", "recursive_doubling", size)) == close(rounds * (A + whole))
    halved = 2 * rounds * A + 2 * (size - 1) / size * whole
    assert time_of(build("allreduce", "halving_doubling", size)) == close(halved)


@pytest.mark.parametrize("pieces", [1, 2, 7, 16])
@pytest.mark.parametrize("size", [2, 3, 5, 8, 15, 16, 17])
def test_pipelined_chains_and_trees(size, pieces):
    piece = A + NBYTES / (pieces * B * 1000)
    height = size.bit_length() - 1
    for algorithm, deep in (("chain", size - 1), ("tree", height)):
        one_way = (deep + pieces - 1) * piece
        for collective in ("broadcast", "reduce"):
            schedule = build(collective, algorithm, size, root=0, pieces=pieces)
            assert time_of(schedule) == close(one_way)
        both = build("allreduce", algorithm, size, pieces=pieces)
        assert time_of(both) == close((2 * deep + pieces - 1) * piece)


@pytest.mark.parametrize("size", [3, 8, 13])
def test_every_cost_is_counted_where_it_arises(size):
    costs = Costs(call_us=5.0, step_us=2.0, message_us=0.5, reduce_us=3.0)
    one_shot = 5.0 + A + NBYTES / (B * 1000) + 2.0 + 0.5 * (size - 2) + 3.0
    assert time_of(build("allreduce", "one_shot", size), costs) == close(one_shot)
    copying = Costs(copy_us=1.0, copy_gb_per_s=4.0)
    assert time_of(build("allgather", "direct", size), copying) == close(
        A + NBYTES / (B * 1000) + 1.0 + NBYTES / 4000
    )


def test_shared_ports_add_up():
    whole = NBYTES / (B * 1000)
    assert time_of(build("allreduce", "one_shot", 8), ports=True) == close(A + 7 * whole)
    assert time_of(build("allreduce", "ring", 8), ports=True) == close(14 * (A + whole / 8))


# -- an oracle that goes step by step


def oracle_us(schedule: Schedule, nbytes: float, costs: Costs) -> float:
    """The time of an aligned schedule where nothing is shared, from its own messages."""
    found = match_messages(schedule)
    blocks = schedule.size if COLLECTIVES[schedule.collective].blocks else 1
    chunk = nbytes * blocks / schedule.chunks
    begun = {(rank, 0): costs.call_us for rank in range(schedule.size)}
    pair: dict = {}
    for m in found.messages:
        key = (m.source, m.send_step, m.target)
        pair[key] = pair.get(key, 0) + len(m.src)
    ended: dict = {}
    for step in range(max((len(p.steps) for p in found.programs), default=0)):
        for rank, program in enumerate(found.programs):
            met = [(m.source, m.target) for m in map(found.messages.__getitem__, found.sent[rank][step])]
            met += [(m.source, m.target) for m in map(found.messages.__getitem__, found.received[rank][step])]
            end = begun[rank, step]
            for source, target in met:
                start = max(begun[source, step], begun[target, step])
                end = max(end, start + A + pair[source, step, target] * chunk / (B * 1000))
            peers = {target for source, target in met if source == rank}
            end += (costs.step_us if met else 0) + costs.message_us * max(len(peers) - 1, 0)
            ended[rank, step] = end + local_us(program.steps[step], chunk, costs)
        begun.update({(rank, step + 1): ended[rank, step] for rank in range(schedule.size)})
    return max(begun.values())


def local_us(step: Step, chunk: float, costs: Costs) -> float:
    reduced = sum(len(t.dst) for t in step.transfers if isinstance(t, RecvReduce))
    reduced += sum(len(w.dst) for w in step.local if isinstance(w, Reduce))
    copied = sum(len(w.dst) for w in step.local if not isinstance(w, Reduce) and w.src != w.dst)
    spent = costs.reduce_us + reduced * chunk / (costs.reduce_gb_per_s * 1000) if reduced else 0.0
    return spent + (costs.copy_us + copied * chunk / (costs.copy_gb_per_s * 1000) if copied else 0.0)


ALL = Costs(2.0, 1.5, 0.25, 0.75, 20.0, 0.5, 40.0)


@pytest.mark.parametrize("entry", catalogue(), ids=names)
def test_all_algorithms_take_what_the_oracle_says(entry):
    for size in (1, 2, 3, 5, 8, 9):
        root = size - 1 if entry.rooted else None
        for pieces in (1, 3) if entry.pipelined else (1,):
            schedule = entry.make(size, root, pieces)
            assert time_of(schedule, ALL) == close(oracle_us(schedule, NBYTES, ALL))


def test_the_moments_are_those_of_the_time():
    laid = lay(build("allreduce", "double_binary_tree", 9, pieces=3), uniform(9, A, B))
    moments = list(laid.moments(NBYTES, ALL))
    whole = laid.time(NBYTES, ALL)
    assert max(max(m.end_us.max(initial=0), m.done_us.max(initial=0)) for m in moments) <= whole.time_us
    assert sum(m.nbytes.sum() for m in moments) == close(whole.sent_nbytes.sum())
    assert all((m.end_us - m.begin_us >= A).all() for m in moments)


# -- a rank waits for its own partners alone


def made_of(size: int, chunks: int, sends: list[dict[int, tuple[int, int]]]) -> Schedule:
    """A schedule of bare messages: for each step, rank -> (peer, chunks) that it sends."""

    def make(rank: int) -> Program:
        steps = []
        for step in sends:
            transfers: list = []
            for source, (target, count) in step.items():
                if source == rank:
                    transfers.append(Send(span_of(Buffer.INPUT, 0, count), target))
                if target == rank:
                    transfers.append(Recv(span_of(Buffer.SCRATCH, 0, count), source))
            steps.append(Step(tuple(transfers)))
        return Program(rank, tuple(steps))

    return Schedule("broadcast", "bare", size, chunks, make, 0, aligned=True)


def test_independent_pairs_overlap():
    steps = [{0: (1, 10), 2: (3, 1)}, {2: (3, 1)}, {3: (0, 1)}]
    timing = lay(made_of(4, 10, steps), uniform(4, 1.0, 1.0)).time(10_000)
    assert timing.finish_us.tolist() == pytest.approx([13.0, 11.0, 4.0, 13.0])
    assert timing.steps == 3


# -- networks


@pytest.mark.parametrize("name", ["dgx-1v", "8xa100-pcie", "dgx-h100", "4xpcie"])
@pytest.mark.parametrize("hosts", [1, 3])
def test_ways_are_those_of_the_routes(name, hosts):
    machine = cluster(preset(name), hosts, hosts_per_leaf=2)
    network, routes = over(machine), Routes(machine)
    source, target = np.array(list(permutations(range(len(machine.gpus)), 2))).T
    flows = network.find(source, target)
    for m, (a, b) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        part = slice(flows.first[m], flows.first[m + 1])
        got = sorted(zip((network.links.name(i) for i in flows.link[part]), flows.share[part], strict=True))
        assert got == [(edge, pytest.approx(share)) for edge, share in sorted(routes.route(a, b))]


def test_a_shared_link_divides_its_bandwidth():
    machine = preset("4xpcie")
    both = made_of(4, 1, [{0: (1, 1), 2: (1, 1)}])
    apart = made_of(4, 1, [{0: (1, 1), 2: (3, 1)}])
    into_one = lay(both, over(machine)).time(24_000_000)
    alone = lay(apart, over(machine)).time(24_000_000)
    assert into_one.time_us - alone.time_us == pytest.approx(1000.0)
    assert into_one.link_nbytes.max() == 48_000_000 and alone.link_nbytes.max() == 24_000_000


def test_gpus_order_ranks():
    machine = preset("dgx-1v")
    schedule = build("allreduce", "ring", 8)
    by_rank, planned = over(machine), over(machine, (0, 3, 2, 1, 5, 6, 7, 4))
    assert lay(schedule, planned).time(1 << 26).time_us < 0.2 * lay(schedule, by_rank).time(1 << 26).time_us


# -- repeated steps and alike ranks


def counting(schedule: Schedule) -> tuple[Schedule, list[int]]:
    """The schedule and a list to which each program that is made adds its rank."""
    made: list[int] = []

    def make(rank: int) -> Program:
        made.append(rank)
        return schedule.make(rank)

    return replace(schedule, make=make), made


@pytest.mark.parametrize("entry", [e for e in catalogue() if not e.rooted], ids=names)
def test_ranks_that_are_alike_are_recognised(entry, monkeypatch):
    for size in (8, 12, 16):
        schedule, made = counting(entry.make(size))
        every = rounds_of(schedule)
        with monkeypatch.context() as patch:
            patch.setattr(rounds_module, "MOST_CHUNKS", 0)
            few = rounds_of(schedule)
        assert len(set(made)) == size
        network = uniform(size, A, B)
        assert lay(few, network).time(NBYTES, ALL).time_us == close(
            lay(every, network).time(NBYTES, ALL).time_us
        )
        assert (few.sent_chunks() == every.sent_chunks()).all()


def test_one_rank_that_is_not_alike_is_noticed(monkeypatch):
    """A ring of which two neighbours exchange one more message at the end."""
    monkeypatch.setattr(rounds_module, "MOST_CHUNKS", 0)
    size = 12
    ring = {rank: ((rank + 1) % size, 1) for rank in range(size)}
    whole, made = counting(made_of(size, 1, [ring, ring]))
    rounds_of(whole)
    assert len(set(made)) < size
    for odd in (0, size - 1):
        other, made = counting(made_of(size, 1, [ring, ring, {odd: ((odd + 5) % size, 1)}]))
        mutant = rounds_of(other)
        assert len(set(made)) == size
        assert mutant.sent_chunks()[odd] == 3 and mutant.sent_chunks().sum() == 2 * size + 1


def test_a_message_without_its_match_is_refused():
    good = build("allreduce", "ring", 4)

    def make(rank):
        program = good.make(rank)
        if rank != 2:
            return program
        steps = tuple(
            replace(s, transfers=s.transfers[1:]) if i == 3 else s for i, s in enumerate(program.steps)
        )
        return Program(rank, steps)

    with pytest.raises(ScheduleError, match="ring, step 3: its sends and receives do not match"):
        rounds_of(replace(good, make=make))


@pytest.mark.parametrize("algorithm", ["chain", "tree", "double_binary_tree"])
@pytest.mark.parametrize("size", [2, 3, 6, 9])
def test_pieces_that_follow_each_other(algorithm, size):
    one = rounds_of(build("allreduce", algorithm, size))
    schedule = build("allreduce", algorithm, size, pieces=5)
    quick, every = staggered(one, schedule), rounds_of(schedule)
    assert quick is not None and quick.steps == every.steps
    network = uniform(size, A, B)
    assert lay(quick, network).time(NBYTES, ALL).time_us == close(
        lay(every, network).time(NBYTES, ALL).time_us
    )


def test_pieces_that_go_their_own_way_are_noticed():
    one = rounds_of(build("allreduce", "ring", 5))
    assert staggered(one, build("allreduce", "ring", 5, pieces=3)) is None
    assert staggered(one, build("allreduce", "ring", 6, pieces=2)) is None


def test_leaping_over_repeated_steps_changes_nothing():
    machine = cluster(preset("dgx-1v"), 3)
    laid = lay(build("allreduce", "ring", 24), over(machine))
    for nbytes in (0, 1000, 1 << 26):
        last = list(laid.moments(nbytes, ALL))[-1]
        assert laid.time(nbytes, ALL).time_us == close(last.end_us.max() + ALL.step_us)


SIZE, GROUPS = 16_384, tuple(tuple(range(first, first + 8)) for first in range(0, 16_384, 8))
WHOLE = (64 << 20) / (B * 1000)
LARGE = {  # a candidate, and the least and the most time of its all-reduce of 64 MiB over 16,384 ranks
    "hierarchical": (Candidate("hierarchical", groups=GROUPS), 24 * A + 2 * WHOLE * (1 / 8 + 2047 / SIZE), 1),
    "ring": (Candidate("ring"), 2 * (SIZE - 1) * (A + WHOLE / SIZE), 1),
    "double_binary_tree": (Candidate("double_binary_tree", 16), (2 * 14 + 15) * (A + WHOLE / 32), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hierarchical", *exhaustive(["ring", "double_binary_tree"])])
def test_16384_ranks_in_under_ten_seconds(name):
    """As ``Model`` times them: of the ring by way of few ranks, of the tree by way of one piece."""
    candidate, least, most = LARGE[name]
    with within(10):
        timing = lay(model.rounds("allreduce", candidate, SIZE), uniform(SIZE, A, B)).time(64 << 20)
    if most == 1:
        assert timing.time_us == close(least)
    else:
        assert timing.steps == 2 * 14 + 15 and least < timing.time_us < most * least


# -- what is refused


def test_refusals():
    ring = build("allreduce", "ring", 4)
    with pytest.raises(ArgumentError, match="a schedule for 4 ranks on a network of 5"):
        lay(ring, uniform(5, A, B))
    with pytest.raises(ArgumentError, match="nbytes=-1; expected 0 or more"):
        lay(ring, uniform(4, A, B)).time(-1)
    with pytest.raises(ArgumentError, match=r"step_us=-1; expected a number from 0"):
        Costs(step_us=-1)
    with pytest.raises(ArgumentError, match=r"reduce_gb_per_s=0; expected a number above 0"):
        Costs(reduce_gb_per_s=0)
    with pytest.raises(ArgumentError, match="no negative latency and a bandwidth above 0"):
        uniform(4, A, 0)
    with pytest.raises(TopologyError, match="expected one GPU for each rank"):
        over(preset("dgx-1v"), (0, 0))


def test_traffic_along_an_order_is_that_of_the_ordered_schedule():
    """A renamed traffic is what the renamed programs do, for rings, chains and their pieces."""
    order = (0, 3, 1, 6, 2, 5, 4)
    for candidate, collective, root in (
        (Candidate("ring", order=order), "allreduce", None),
        (Candidate("chain", 3, order=order), "allreduce", None),
        (Candidate("chain", order=order), "broadcast", 5),
    ):
        quick = model.rounds(collective, candidate, 7, root)
        made = rounds_of(candidate.build(collective, 7, root))
        assert quick.steps == made.steps and quick.sent_chunks().tolist() == made.sent_chunks().tolist()
        assert [quick.sides(rank) for rank in range(7)] == [made.sides(rank) for rank in range(7)]
        network = uniform(7, 1.0, 10.0)
        assert lay(quick, network).time(7000).time_us == pytest.approx(lay(made, network).time(7000).time_us)


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter"])
def test_rings_of_many_ranks_are_taken_from_those_of_few(collective, monkeypatch):
    def few_only(schedule):
        assert schedule.size < 16, "the programs of many ranks are made"
        return rounds_of(schedule)

    monkeypatch.setattr(model, "_MANY", 16)
    monkeypatch.setattr(model, "rounds_of", few_only)
    for pieces in (1, 2):
        ring = Candidate("ring", pieces)
        made, quick = rounds_of(ring.build(collective, 23)), model.rounds(collective, ring, 23)
        assert quick.runs == made.runs and quick.chunks == made.chunks
        for one, other in zip(quick.kinds, made.kinds, strict=True):
            for name in ("source", "target", "chunks", "worker", "reduced", "copied", "touched"):
                assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


def test_what_does_not_grow_evenly_is_made_in_full():
    from flagcx.schedule.derived_traffic import grown

    for entry in catalogue():
        if not entry.rooted and entry.algorithm != "ring" and entry.allows(17):
            few = [rounds_of(entry.make(ranks)) for ranks in (12, 13, 14)]
            assert grown(few, entry.make(17)) is None, entry.algorithm


def test_ranks_that_stand_alike_in_a_tree_are_made_once():
    whole, made = counting(build("allreduce", "double_binary_tree", 64))
    assert len(rounds_of(whole).kinds) > 5 and len(set(made)) == 64, (
        "only a pattern's transfers can be compared"
    )
    pattern = build("allreduce", "double_binary_tree", 512)
    assert len(rounds_module._classes(pattern)) < 64


@pytest.mark.parametrize(
    "machine",
    [
        cluster(preset("dgx-h100"), 5, hosts_per_leaf=2),
        cluster(preset("dgx-1v"), 3),
        cluster(preset("dgx-a100"), 4, 1),
        preset("gb200-nvl72"),
    ],
    ids=lambda machine: machine.name,
)
def test_the_links_of_messages_are_those_of_their_routes(machine):
    """Within hosts, over one leaf, over the spine, and through NVSwitches that several hosts share."""
    gpus = [gpu.index for gpu in machine.gpus]
    network, routes, size = over(machine, gpus), Routes(machine), len(gpus)
    source = np.repeat(np.arange(0, size, 3), 7)
    target = (source + np.tile([1, 5, 8, 9, 16, 17, size // 2], len(source) // 7)) % size
    flows = network.find(source, target)
    for number, (a, b) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        part = slice(flows.first[number], flows.first[number + 1])
        links = [network.links.name(link) for link in flows.link[part]]
        route = routes.route(gpus[a], gpus[b])
        assert dict(zip(links, flows.share[part].tolist(), strict=True)) == pytest.approx(dict(route))
