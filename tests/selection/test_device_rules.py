"""Choices for arrays on GPUs: what is taken when, why not the others, and that ranks agree."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

import flagcx as fc
from flagcx.algorithms.candidate import Candidate
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store import LocalStore, StoreServer
from flagcx.config import Config
from flagcx.cost.peer_memory import NVLINK, GpuLinks, links_over
from flagcx.selection.candidates import Request
from flagcx.selection.device_rules import Capabilities, DeviceRules, choose_on_device, obstacle_on_device
from flagcx.selection.placement import plan_order
from flagcx.selection.selector import Selector, TuningInfo, agree, fit_on_device
from flagcx.selection.table import Fit, Point, Table, save_table, table_path
from flagcx.topology import preset

FIT = Fit({"gpu": "H"}, 8, "nccl", {}, {})
SCHEDULES, NATIVE = Capabilities(), Capabilities(native=True)
PEERS = Capabilities(
    native=True,
    peers=frozenset(
        Candidate(name, 1, protocol)
        for name in ("one_shot", "two_shot")
        for protocol in ("peer_memory", "peer_packets")
    ),
)


class Transport:
    """Says what the choice asks of a transport."""

    name, no_peers = "nccl", ""

    def __init__(self, bus_ids, hosts=None) -> None:
        self.size = len(bus_ids)
        hosts = hosts or ["a"] * self.size
        self.identities = [
            SimpleNamespace(pci_bus_id=b, host=h, uuid=b) for b, h in zip(bus_ids, hosts, strict=True)
        ]

    def surroundings(self):
        return {"machine": {"gpu": "H200", "gpus": self.size}, "versions": {"nccl": 22809}}


def _bus_ids(machine):
    return [gpu.pci_bus_id for gpu in machine.gpus]


def _selector(possible, predicted=None, table=None, shared=None):
    """A selector where calls have some capabilities, by what rank 0 found or by tables."""
    shared = shared or TuningInfo(table, links=NVLINK, predicted=predicted)
    rules = DeviceRules(Transport([]), shared.links, shared.predicted)
    rules.capabilities = lambda request: replace(possible, links=rules.links)
    return Selector(rules, shared)


def _table(times, nbytes=4096, collective="allreduce"):
    return Table(FIT, {collective: (Point(nbytes, times),)})


@pytest.mark.parametrize(
    ("what", "possible", "algorithm"),
    [
        (("allreduce", 64, 8), NATIVE, "native"),
        (("allreduce", 10_000_001, 8), NATIVE, "native"),
        (("allreduce", 10_000_001, 8), SCHEDULES, "ring"),
        (("allreduce", 10_000_000, 8), SCHEDULES, "double_binary_tree"),
        (("allreduce", 1 << 20, 2), SCHEDULES, "two_shot"),
        (("allreduce", 64, 8), SCHEDULES, "one_shot"),
        (("allreduce", 64, 512), SCHEDULES, "double_binary_tree"),
        (("allreduce", 1 << 30, 8), Capabilities(narrow=True), "two_shot"),
        (("reduce", 1 << 30, 8), SCHEDULES, "direct"),
        (("reduce", 1 << 30, 64), SCHEDULES, "binomial"),
        (("barrier", 0, 8), SCHEDULES, "dissemination"),
    ],
)
def test_the_rule(what, possible, algorithm):
    assert choose_on_device(Request(*what), possible).algorithm == algorithm


def test_nccls_own_goes_before_the_model_and_the_model_before_the_rule():
    predicted = _table({Candidate("two_shot"): 1.0, Candidate("ring"): 2.0}, 1 << 24)
    large = Request("allreduce", 1 << 24, 8)
    assert _selector(NATIVE, predicted).choose(large).algorithm == "native"
    choice = _selector(SCHEDULES, predicted).choose(large)
    assert (choice.algorithm, choice.reason) == ("two_shot", "by the model of this machine: about 1 us")
    assert _selector(SCHEDULES, predicted).choose(Request("reduce", 1 << 24, 8)).algorithm == "direct"


def test_a_protocol_for_the_peers_memory_goes_before_the_model():
    choice = _selector(PEERS, _table({Candidate("tree"): 1.0})).choose(Request("allreduce", 4096, 8))
    assert choice.protocol == "peer_packets"


def test_what_was_measured_goes_before_all():
    table = _table({Candidate("native"): 9.0, Candidate("two_shot", 1, "peer_memory"): 8.0})
    request = Request("allreduce", 4096, 8)
    selector = _selector(PEERS, table=table)
    choice = selector.choose(request)
    assert (choice.algorithm, choice.protocol) == ("two_shot", "peer_memory")
    assert choice is selector.choose(request), "answered from memory"
    assert _selector(NATIVE, table=table).choose(request).reason.startswith("measured on these GPUs")
    assert _selector(SCHEDULES, table=table).choose(request).algorithm == "one_shot"


@pytest.mark.parametrize(
    ("candidate", "possible", "uneven", "message"),
    [
        (Candidate("native"), SCHEDULES, False, "NCCL's own does not do this call"),
        (Candidate("native", 1, "peer_memory"), PEERS, False, "NCCL's own does not do this call"),
        (Candidate("no_such"), NATIVE, False, "does not serve"),
        (
            Candidate("one_shot", 1, "peer_memory"),
            NATIVE,
            False,
            "has no peer_memory for one_shot of this call",
        ),
        (
            Candidate("ring", 1, "peer_memory"),
            PEERS,
            False,
            "carries one_shot, two_shot, direct, dissemination alone",
        ),
        (Candidate("hierarchical"), NATIVE, False, "not used for 6 ranks"),
        (Candidate("bruck"), NATIVE, True, "needs blocks of one size"),
        (
            Candidate("direct", 1, "peer_packets"),
            Capabilities(peers=frozenset({Candidate("direct", 1, "peer_memory")})),
            True,
            "the transport has no peer_packets for direct of this call",
        ),
        (Candidate("two_shot", piece_nbytes=1024), NATIVE, False, "not pipelined"),
        (
            replace(Candidate.parse("ring|ring"), piece_nbytes=1024),
            NATIVE,
            False,
            "not pipelined",
        ),
        (Candidate.parse("ring|telepathy"), NATIVE, False, "does not serve"),
        (Candidate("ring|"), NATIVE, False, "does not serve"),
        (Candidate.parse("hierarchical|ring"), NATIVE, False, "not used for 6 ranks"),
        (Candidate("ring"), Capabilities(narrow=True), False, "would round 8-bit sums at every hop"),
    ],
)
def test_why_a_candidate_is_not_taken(candidate, possible, uneven, message):
    collective = "alltoall" if uneven else "allreduce"
    request = Request(collective, 4096, 6, uneven)
    assert message in obstacle_on_device(candidate, request, possible)
    table = Table(FIT, {collective: (Point(4096, {candidate: 1.0}),)})
    assert not _selector(possible, table=table).ranked(request)


def _agree_on_threads(machines, bus_ids, tables):
    """What each rank has after ``agree``, where each sees another machine and has another file."""
    ranks = len(machines)
    agreed: dict[int, TuningInfo] = {}
    with StoreServer(ranks) as server:
        stores = [RemoteStore(server.address, server.authkey, rank, ranks) for rank in range(ranks)]

        def join(rank: int) -> None:
            environ = {"XDG_CACHE_HOME": str(tables[rank])}
            transport = Transport(bus_ids)
            agreed[rank] = agree(stores[rank], transport, Config(), environ, lambda: machines[rank])

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for store in stores:
            store.close()
    return [agreed[rank] for rank in range(ranks)]


def test_ranks_with_other_files_and_other_machines_choose_as_rank_0_says(tmp_path):
    machine, other = preset("dgx-1v"), preset("dgx-a100")
    bus_ids = _bus_ids(machine)[:3]
    fit = fit_on_device(Transport(bus_ids))
    for rank, fastest in enumerate(["two_shot", "ring", "tree"]):
        times = {Candidate("native"): 5.0, Candidate(fastest): 1.0}
        environ = {"XDG_CACHE_HOME": str(tmp_path / str(rank))}
        save_table(Table(fit, {"allreduce": (Point(4096, times),)}), table_path(fit, environ))
    tables = [tmp_path / str(rank) for rank in range(3)]
    agreed = _agree_on_threads([machine, other, other], bus_ids, tables)
    assert agreed[0] == agreed[1] == agreed[2]
    assert agreed[0].order == plan_order(machine, bus_ids)
    for nbytes, algorithm in ((4096, "two_shot"), (1 << 20, "native")):
        request = Request("allreduce", nbytes, 3)
        chosen = {_selector(NATIVE, shared=each).choose(request) for each in agreed}
        assert [c.algorithm for c in chosen] == [algorithm]
    assert {each.links for each in agreed} == {links_over(machine, [0, 1, 2])}
    assert links_over(machine, [0, 1, 2]) != links_over(other, [0, 1, 2])
    for nbytes in (1 << 10, 1 << 17, 1 << 24, 1 << 30):
        untold = [_selector(PEERS, shared=replace(each, table=None)) for each in agreed]
        made = {selector.choose(Request("allreduce", nbytes, 3)) for selector in untold}
        assert len(made) == 1 and "by the model of peer memory" in made.pop().reason
    request = Request("allreduce", 1 << 26, 3)
    by_model = {_selector(SCHEDULES, shared=each).choose(request) for each in agreed}
    assert len(by_model) == 1
    assert "by the model of this machine" in by_model.pop().reason


def test_the_model_mixes_two_where_one_leaves_links_idle(tmp_path):
    machine = preset("dgx-1v")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    agreed = agree(LocalStore(), Transport(_bus_ids(machine)), Config(), environ, lambda: machine)
    choice = _selector(SCHEDULES, shared=agreed).choose(Request("allreduce", 64 << 20, 8))
    assert choice.label == "ring|ring", "NVLink carries as much the other way"
    switched = preset("dgx-a100")
    agreed = agree(LocalStore(), Transport(_bus_ids(switched)), Config(), environ, lambda: switched)
    choice = _selector(SCHEDULES, shared=agreed).choose(Request("allreduce", 64 << 20, 8))
    assert choice.algorithm == "two_shot", "behind a switch a ring uses its port both ways"


def test_a_table_of_other_gpus_is_not_used(tmp_path):
    machine = preset("dgx-a100")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    here = fit_on_device(Transport(_bus_ids(machine)))
    other = replace(here, versions={**here.versions, "nccl": "9"})
    save_table(Table(other, {}), table_path(here, environ))
    with pytest.warns(RuntimeWarning, match="is ignored: it was measured with versions .*flagcx tune --gpu"):
        agreed = agree(LocalStore(), Transport(_bus_ids(machine)), Config(), environ, lambda: machine)
    assert agreed.table is None


def test_a_file_named_for_numpy_arrays_is_passed_over_in_silence(tmp_path, recwarn):
    path = tmp_path / "host.json"
    save_table(Table(replace(FIT, transport="shared_memory"), {}), path)
    agreed = agree(LocalStore(), Transport(["0"]), Config(tuning_file=str(path)), {}, preset)
    assert agreed.note == f"{path} was measured with shared_memory, this is nccl"
    assert not recwarn.list


def test_a_machine_that_cannot_be_read_has_no_order_and_no_model(tmp_path):
    def broken():
        raise fc.TopologyError("no /sys here")

    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    agreed = agree(LocalStore(), Transport(["0000:0c:00.0"] * 2), Config(), environ, broken)
    assert (agreed.order, agreed.predicted) == (None, None)
    assert agreed.links == GpuLinks(one_gpu=True, sharing=2)
    assert agreed.note == "not measured on this machine; flagcx tune --gpu -n 2 would"


def test_rank_0_knows_nothing_of_other_hosts(tmp_path):
    """GPUs 0 to 3 of one host and 4 to 7 of another have bus ids that one machine of the kind has, too."""
    machine = preset("dgx-1v")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    transport = Transport(_bus_ids(machine), ["a"] * 4 + ["b"] * 4)
    agreed = agree(LocalStore(), transport, Config(), environ, lambda: machine)
    assert (agreed.order, agreed.predicted) == (None, None)


def test_in_deterministic_mode_the_rule_alone_chooses(tmp_path):
    machine = preset("dgx-1v")
    agreed = agree(
        LocalStore(), Transport(_bus_ids(machine)), Config(deterministic=True), {}, lambda: machine
    )
    assert (agreed.table, agreed.predicted) == (None, None)
    assert agreed.order == plan_order(machine, _bus_ids(machine))
    assert agreed.links == NVLINK, "it is what is assumed of any machine"
