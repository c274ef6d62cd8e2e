"""What a communicator says of its calls: the choice, all others, and why some are not possible."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

import flagcx as fc
from flagcx.algorithms.candidate import Candidate
from flagcx.cost.model import Model
from flagcx.selection.candidates import Request
from flagcx.selection.device_rules import Capabilities, DeviceRules
from flagcx.selection.explain import explain_call
from flagcx.selection.rules import HostRules, MultiHostRules, choose_on_host
from flagcx.selection.table import Fit, Point, Table, save_table
from flagcx.topology import preset
from tests.ranks import run_ranks


def _offers(collective, algorithm, nbytes):
    return ("slots", "cross_memory") if nbytes >= 8192 else ("",)


def _on_host(collective, nbytes, choice, measured=None, size=4, cores=2, attached=True):
    offers = _offers if attached else lambda *_: ()
    transport = SimpleNamespace(name="fake", protocols=offers, cross_memory=attached, modelled=True)
    rules = HostRules(transport, "somewhere", cores)
    return explain_call(Request(collective, nbytes, size), choice, rules, measured or {}, "a note")


def _on_device(nbytes, possible, model=None, order=None, size=8):
    rules = DeviceRules(SimpleNamespace(no_peers=""), possible.links)
    rules.capabilities, rules._model = lambda request: possible, model
    request = Request("allreduce", nbytes, size)
    return explain_call(request, rules.choose(request), rules, {}, "a note", (order, None))


def _row(found, name):
    return next(row for row in found.rows if row.name == name)


def test_what_would_run_comes_first_even_where_the_model_prefers_another():
    choice = Candidate("chain", 4, reason="because")
    found = _on_host("allreduce", 1 << 20, choice)
    assert found.chosen.name == "chain in 4 pieces"
    assert found.reason.startswith("chain in 4 pieces: because; the model would take ")
    assert found.note == "a note" and "Times: a note." in str(found)
    times = [row.predicted_us for row in found.rows[1:] if row.predicted_us]
    assert times == sorted(times) and times[0] < found.chosen.predicted_us


def test_each_candidate_has_its_steps_bytes_link_and_time():
    choice = Candidate("two_shot", reason="large")
    found = _on_host("allreduce", 1 << 20, choice)
    ring = _row(found, "ring (slots)")
    assert (ring.steps, ring.sent_nbytes, ring.protocol) == (6, 1.5 * (1 << 20), "slots")
    assert ring.bottleneck.kind in ("cores", "memory") and 0 < ring.bottleneck.busy <= 1
    assert 0 < ring.latency_us < ring.predicted_us
    spacious = _on_host("allreduce", 1 << 20, choice, cores=4)
    assert _row(spacious, "ring (slots)").predicted_us < ring.predicted_us, "more cores copy more"
    attached, slots = (_row(found, f"two_shot ({way})") for way in ("cross_memory", "slots"))
    assert attached.predicted_us < slots.predicted_us, "one copy in place of two"


def test_why_candidates_are_not_possible_on_a_host():
    found = _on_host("allreduce", 65536, Candidate("one_shot"), attached=False)
    assert "in groups" in _row(found, "hierarchical").obstacle
    assert "does not let these processes" in _row(found, "one_shot (cross_memory)").obstacle
    assert found.rows[-1].obstacle and not found.rows[1].obstacle
    assert "cannot: needs ranks in groups" in str(found)


def test_arrays_that_need_no_copy_are_offered_where_they_are_large():
    for nbytes, offered in ((1 << 20, True), (64 << 20, True), ((1 << 20) - 4, False), (4096, False)):
        assert ("comm.empty" in choose_on_host(Request("allreduce", nbytes, 4)).reason) == offered
    assert "comm.empty" not in choose_on_host(Request("broadcast", 64 << 20, 4)).reason


def test_measured_times_stand_beside_the_model_s():
    measured = {Candidate("ring", 1, "slots"): 100.0, Candidate("tree", 1, "slots"): 90.0}
    choice = Candidate("tree", 1, "slots", reason="measured on this machine: about 90 us")
    found = _on_host("allreduce", 65536, choice, measured)
    assert [row.name for row in found.rows[:2]] == ["tree (slots)", "ring (slots)"]
    assert found.rows[0].measured_us == 90.0 and found.rows[0].predicted_us
    assert "1.11 x" in str(found) and "the model would" not in found.reason
    assert _row(found, "ring (slots)").measured_us == 100.0
    line = next(line for line in str(found).splitlines() if line.startswith("bruck (slots)"))
    assert not line.endswith(" x"), "a time by the model says nothing beside a measured one"


def test_a_measured_time_is_that_of_the_pieces_that_differ_here():
    measured = {
        Candidate("ring", 1, "slots", piece_nbytes=1 << 20): 7.0,
        Candidate("ring", 1, "slots"): 8.0,
        Candidate("ring", 1, "slots", piece_nbytes=65536): 9.0,
    }
    found = _on_host("allreduce", 1 << 20, Candidate("two_shot"), measured)
    assert _row(found, "ring (slots)").measured_us == 8.0, "one piece of 1 MiB is the whole"
    assert _row(found, "ring in 16 pieces (slots)").measured_us == 9.0


def test_the_rule_s_pieces_are_a_row_though_no_candidate_has_them():
    found = _on_host("broadcast", 3_000_000, Candidate("chain", 7, reason="rule"))
    assert found.chosen.name == "chain in 7 pieces" and found.chosen.predicted_us


def test_json_html_and_rich_say_the_same():
    found = _on_host("alltoall", 65536, Candidate("direct", reason="one hop"))
    values = json.loads(found.to_json())
    assert values["chosen"] == found.chosen.name and values["note"] == "a note"
    assert [one["name"] for one in values["candidates"]] == [row.name for row in found.rows]
    assert all(row.name in found._repr_html_() for row in found.rows)
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(found)
    text = console.export_text()
    words = [word for row in found.rows for word in row.name.split()]  # long names take two lines
    assert all(word in text for word in words) and "one hop" in text


ORDER = (0, 3, 2, 1, 5, 6, 7, 4)


def test_on_gpus():
    peers = frozenset(Candidate(name, 1, "peer_memory") for name in ("one_shot", "two_shot"))
    possible = Capabilities(native=True, peers=peers)
    found = _on_device(64 << 20, possible, Model(preset("dgx-1v"), range(8)), ORDER)
    assert found.chosen.name == "two_shot (peer_memory)"
    assert "by the model of peer memory about" in found.reason and "would take" not in found.reason
    chosen, native = found.chosen, _row(found, "native")
    assert (chosen.steps, chosen.sent_nbytes) == (2, 1.75 * (64 << 20)) and 0 < chosen.latency_us < 20
    assert chosen.predicted_us < native.predicted_us < _row(found, "one_shot (peer_memory)").predicted_us
    assert _row(found, "ring").steps == 14 and _row(found, "ring").bottleneck.kind == "nvlink"
    assert _row(found, "one_shot (peer_memory)").obstacle == ""
    assert "no peer_packets for one_shot of this call" in _row(found, "one_shot (peer_packets)").obstacle
    mix = _row(found, "ring|ring")
    assert not mix.obstacle and mix.predicted_us < 0.6 * _row(found, "ring").predicted_us
    json.loads(found.to_json())


def test_on_gpus_where_nccl_s_own_does_not_serve_and_the_machine_is_not_known():
    found = _on_device(4096, Capabilities(narrow=True))
    assert found.chosen.name == "one_shot" and found.chosen.predicted_us is None
    assert found.chosen.steps == 1 and found.chosen.sent_nbytes == 7 * 4096
    assert "does not do this call" in _row(found, "native").obstacle
    assert "round 8-bit sums" in _row(found, "ring").obstacle
    assert json.loads(found.to_json())["candidates"][0]["predicted_us"] is None


def test_between_hosts_nothing_is_predicted():
    rules = MultiHostRules(((0, 1), (2, 3)))
    found = explain_call(
        Request("allreduce", 1 << 20, 4), rules.choose(Request("allreduce", 1 << 20, 4)), rules, {}
    )
    assert found.chosen.name == "hierarchical" and found.chosen.steps > 0
    assert all(row.predicted_us is None for row in found.rows)


def test_a_rank_alone():
    found = _on_host("allreduce", 64, Candidate("one_shot", reason="small"), size=1)
    assert found.chosen.name == "one_shot" and found.chosen.predicted_us is None


def _explained(path):
    comm = fc.init(tuning=True, tuning_file=path)
    found = [comm.explain("allreduce", 4096), comm.explain("broadcast", 1 << 20, "int8")]
    messages = []
    for wrong, options in (
        (("sum", 8), {}),
        (("allreduce", -1), {}),
        (("allreduce", 1.5), {}),
        (("allreduce", 8), {"gpu": True}),
    ):
        with pytest.raises(fc.FlagcxError) as caught:
            comm.explain(*wrong, **options)
        messages.append(str(caught.value))
    comm.allreduce(np.ones(1024, np.float32))
    ran = comm.profiler.records()[-1].operation
    return [(f.chosen.name, f.chosen.measured_us, f.to_json()) for f in found], messages, ran.algorithm


def test_a_communicator_explains_what_it_does(tmp_path):
    from flagcx.selection.table import fit_here
    from flagcx.transport.shared_memory import SharedMemoryTransport

    fit = fit_here(2, "shared_memory", SharedMemoryTransport.settings(fc.Config()))
    assert isinstance(fit, Fit)
    path = tmp_path / "table.json"
    save_table(Table(fit, {"allreduce": (Point(4096, {Candidate("bruck"): 7.0}),)}), path)
    (found, messages, ran), (same, *_) = run_ranks(_explained, 2, str(path))
    assert [f[:2] for f in found] == [f[:2] for f in same]
    assert found[0][:2] == ("bruck", 7.0) and ran == "bruck"
    assert json.loads(found[0][2])["note"] == f"measured, {path}"
    assert "collective='sum' is not known; expected one of allreduce" in messages[0]
    assert "nbytes must be an integer from 0 up, got -1" in messages[1] and "got 1.5" in messages[2]
    assert "gpu=True explains calls on arrays on GPUs, and none was made yet" in messages[3]
