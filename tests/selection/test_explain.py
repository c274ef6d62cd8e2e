"""The explanation of a choice: its table, its sentence, JSON and HTML."""

from __future__ import annotations

import json

import pytest

from flagcx.arguments import format_nbytes
from flagcx.errors import ArgumentError
from flagcx.selection.explain import explain
from flagcx.topology import cluster, preset


def test_the_table_has_every_candidate_and_the_chosen_one_first():
    found = explain("allreduce", 64 << 20, 8, preset("dgx-a100"))
    text = str(found)
    assert text.startswith("allreduce of 64 MiB, 8 ranks on dgx-a100\n")
    names = {row.algorithm for row in found.rows}
    assert {"ring", "double_binary_tree", "two_shot", "hierarchical", "native"} <= names
    assert found.chosen.predicted_us == min(row.predicted_us for row in found.rows if not row.obstacle)
    assert text.splitlines()[2].endswith("<- chosen") and "measured" not in text
    assert "bandwidth decides" in found.reason and "next comes" in found.reason
    assert "latency decides" in explain("allreduce", 64, 8, preset("dgx-a100")).reason


def test_times_come_with_an_interval_and_say_whose_they_are():
    found = explain("allreduce", 64 << 20, 96, cluster(preset("dgx-h100"), 12))
    native = next(row for row in found.rows if row.name == "native")
    assert found.chosen is native, "NCCL's own stays among the candidates, however many ranks"
    assert native.low_us < native.predicted_us < native.high_us and native.plain_us > native.predicted_us
    spread = f"{native.low_us / native.predicted_us:.2f} to {native.high_us / native.predicted_us:.2f}"
    assert f"Likely (p10 to p90): {spread} times native, 0.90 to 1.15 times the others." in str(found)
    assert f"A plain call of native, with launch: {native.plain_us:.1f} us." in str(found)
    assert all(row.low_us for row in found.rows if row.predicted_us)
    tiny = explain("allreduce", 1024, 8, preset("hgx-b200"))
    own = next(row for row in tiny.rows if row.name == "native")
    assert own.plain_us > own.predicted_us + 3


def test_what_was_measured_goes_before_the_model():
    measured = {"ring": 500.0, "tree": 400.0}
    found = explain("allreduce", 1024, 8, preset("dgx-a100"), measured=measured)
    assert [row.name for row in found.rows[:2]] == ["tree", "ring"]
    assert (
        found.reason == "tree was measured to be the fastest, 400.0 us; next comes ring at 1.25 times that."
    )
    assert "measured us" in str(found) and "1.25 x" in str(found)


def test_json_and_html_say_the_same():
    found = explain("broadcast", 1 << 20, 4, preset("dgx-1v"))
    values = json.loads(found.to_json())
    assert values["chosen"] == values["candidates"][0]["name"] == found.chosen.name
    for row in values["candidates"]:
        assert row["steps"] > 0 and row["sent_nbytes"] > 0
        assert bool(row["predicted_us"]) != bool(row["obstacle"]), row["name"]
        assert row["obstacle"] or row["name"] == "native" or len(row["bottleneck"]["link"]) == 2
    assert all(row.name in found._repr_html_() for row in found.rows)
    assert "-&gt;" in found._repr_html_() and "<script" not in found._repr_html_()


def test_the_peers_memory_where_nvlink_joins_all():
    found = explain("allreduce", 64 << 20, 4, preset("dgx-h200"))
    rows = {row.name: row for row in found.rows}
    chunks = rows["two_shot (peer_memory)"]
    assert found.chosen is chunks and (chunks.steps, chunks.sent_nbytes) == (2, 1.5 * (64 << 20))
    link = chunks.bottleneck
    assert link.kind == "nvlink" and link.nbytes == pytest.approx(
        chunks.sent_nbytes * link.bandwidth_gb_per_s / 370.8
    )
    assert 0.8 < link.busy < 1 and chunks.latency_us < chunks.predicted_us < rows["two_shot"].predicted_us
    assert rows["two_shot (peer_packets)"].obstacle == "too long for packets"
    small = explain("allreduce", 4096, 4, preset("dgx-h200"))
    assert small.chosen.name == "one_shot (peer_packets)" and not any(row.obstacle for row in small.rows)
    measured = {"two_shot (peer_memory)": 300.0, "native": 310.0}
    assert (
        explain("allreduce", 64 << 20, 4, preset("dgx-h200"), measured=measured).chosen.measured_us == 300.0
    )


def test_why_the_peers_memory_is_not_offered():
    rows = {row.name: row for row in explain("gather", 4096, 4, preset("dgx-h200")).rows}
    assert rows["direct (peer_packets)"].obstacle == "no packets carry this"
    over_pcie = explain("allreduce", 4096, 4, preset("4xpcie")).rows
    assert "is known on the machine alone" in next(r for r in over_pcie if r.protocol).obstacle
    two_hosts = explain("allreduce", 4096, 16, cluster(preset("dgx-h200"), 2)).rows
    assert not any(row.protocol for row in two_hosts)


def test_a_rank_alone_and_blocks():
    alone = explain("allreduce", 100, 1, preset("dgx-1v"))
    assert "nothing to send" in alone.reason
    assert (
        explain("alltoall", 2048, 3, preset("dgx-1v")).title == "alltoall of 2 KiB a block, 3 ranks on dgx-1v"
    )


def test_refusals():
    with pytest.raises(ArgumentError, match="size=0 ranks and nbytes=8"):
        explain("allreduce", 8, 0, preset("dgx-1v"))


@pytest.mark.parametrize(
    "nbytes, text", [(0, "0 B"), (1023, "1023 B"), (3 << 30, "3 GiB"), (1536, "1.5 KiB")]
)
def test_bytes_for_people(nbytes, text):
    assert format_nbytes(nbytes) == text


def test_who_waits_for_an_explanation_hears_how_far_it_is():
    told = []
    explain("allreduce", 4096, 8, preset("dgx-a100"), report=lambda *report: told.append(report))
    done, total, names = zip(*told, strict=True)
    assert done == tuple(range(total[0] + 1)) and names[0] == "ring" and names[-1] == "pieces and pairs"
