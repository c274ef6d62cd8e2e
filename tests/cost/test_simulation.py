"""``fc.simulate``: agrees with the model that chooses, names machines, refuses what it cannot time."""

from __future__ import annotations

import json
import re

import pytest

import flagcx as fc
from flagcx.algorithms import build
from flagcx.algorithms.candidate import Candidate
from flagcx.cost.model import Model
from flagcx.cost.simulate import Costs
from flagcx.topology import cluster, preset


def test_it_agrees_with_the_model():
    found = fc.simulate(build("allreduce", "ring", 8), "dgx-a100", 1 << 20)
    timing = Model(preset("dgx-a100")).timing("allreduce", Candidate("ring"), 1 << 20)
    assert (found.time_us, found.steps) == (timing.time_us, 14)
    assert found.busbw_gb_per_s == pytest.approx(1.75 * (1 << 20) / found.time_us / 1000)
    assert sum(link.nbytes for link in found.links) == pytest.approx(timing.link_nbytes.sum())
    assert found.links[0].busy == max(link.busy for link in found.links)


def test_more_ranks_than_gpus_make_a_cluster():
    ring = build("allgather", "ring", 16)
    assert (
        fc.simulate(ring, "dgx-a100", 4096).time_us
        == fc.simulate(ring, preset("dgx-a100"), 4096).time_us
        == fc.simulate(ring, cluster(preset("dgx-a100"), 2), 4096).time_us
    )
    assert fc.simulate(ring, "dgx-a100", 4096).nbytes == 16 * 4096


def test_a_message_of_no_bytes_on_the_network_alone_takes_its_latency():
    found = fc.simulate(build("allreduce", "ring", 2), "dgx-a100", 0, Costs())
    assert 0 < found.time_us < 100 and found.algbw_gb_per_s == 0 and found.links == ()


def test_it_shows_itself():
    found = fc.simulate(build("allreduce", "ring", 4), "dgx-a100", 1 << 20)
    assert re.match(r"allreduce of 1 MiB by ring, 4 ranks on dgx-a100: [\d.]+ us in 6 steps\n", str(found))
    assert "busbw" in found._repr_html_() and "<table>" in found._repr_html_()
    assert json.loads(found.to_json())["links"][0]["busy"] == found.links[0].busy


@pytest.mark.parametrize(
    ("schedule", "topology", "nbytes", "error", "message"),
    [
        ("ring", "dgx-a100", 1, fc.ArgumentError, "expected a Schedule, such as"),
        (
            None,
            "dgx-9",
            1,
            fc.TopologyError,
            "'dgx-9' is neither a file nor a preset; presets are 8xa100-pcie",
        ),
        (None, 8, 1, fc.ArgumentError, "topology=8 is a int; expected a Topology, the name of a preset"),
        (None, "dgx-a100", -1, fc.ArgumentError, "nbytes=-1; expected an integer from 0 up"),
        (None, "dgx-a100", 1.5, fc.ArgumentError, "nbytes=1.5; expected an integer"),
    ],
)
def test_what_cannot_be_simulated(schedule, topology, nbytes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fc.simulate(schedule or build("allreduce", "ring", 4), topology, nbytes)
