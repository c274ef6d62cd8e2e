"""The fit of the laws of peer memory: what it reads from results, and that it finds the laws again."""

from __future__ import annotations

import json
from dataclasses import replace

import peer_fit
import pytest

from flagcx.cost.peer_memory import COSTS, LatencyBandwidth

RUN = {"gpus": 4, "command": "bench/gpu_replays.py"}
REPLAY = {"ranks": 4, "nbytes": 4096, "dtype": "float32", "wrong": 0, "run": RUN}
PACKETS = {"algorithm": "one_shot", "protocol": "peer_packets"}
CHUNKS = {"algorithm": "two_shot", "protocol": "peer_memory"}
SENDS = {"algorithm": "two_shot", "protocol": ""}
ROWS = [
    {"ranks": 2, "gpus": 1, "nbytes": 64, "way": "packets", "dtype": "float32", "time_us": 3.0, "run": {}},
    {"ranks": 2, "gpus": 1, "nbytes": 64, "way": "packets", "dtype": "float32", "time_us": 5.0, "run": {}},
    {"ranks": 2, "gpus": 1, "nbytes": 64, "way": "in_place", "dtype": "float32", "time_us": 2.0, "run": {}},
    {"ranks": 4, "gpus": 2, "nbytes": 64, "way": "two_shot", "dtype": "float32", "time_us": 9.0, "run": {}},
    {**REPLAY, "library": "flagcx native", "replay_us": 9.0, "algorithm": "native", "protocol": ""},
    {**REPLAY, "library": "flagcx two_shot", "replay_us": 7.0, **CHUNKS},
    {**REPLAY, "library": "flagcx two_shot over NCCL", "replay_us": 15.0, **SENDS},
    {**REPLAY, "library": "flagcx comm.empty", "replay_us": 1.0, **PACKETS},
    {**REPLAY, "library": "flagcx", "replay_us": 3.5},
    {**REPLAY, "library": "flagcx", "replay_us": 3.7, **PACKETS},
    {**REPLAY, "library": "NCCL", "replay_us": 9.1},
    {"part": "topology", "printed": ""},
]  # fmt: skip


def test_what_is_read_from_results(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = {(s.way, s.size, s.one_gpu): s.time_us for s in peer_fit.samples([path])}
    assert found == {
        (("one_shot", "peer_packets"), 2, True): 4.0,
        (("native", ""), 4, False): 9.0,
        (("two_shot", "peer_memory"), 4, False): 7.0,
        (("one_shot", "peer_packets"), 4, False): 3.7,
    }


def _machine(costs):
    """The times of a machine that does exactly what some laws say."""
    ways = [("one_shot", "peer_packets"), ("two_shot", "peer_memory"), ("native", "")]
    bare = [
        peer_fit.Sample(way, size, False, 1 << power, "float32", 1.0)
        for way in ways
        for size in (2, 4, 8)
        for power in range(12, 28, 3)
    ]
    return [replace(sample, time_us=peer_fit.predicted_us(sample, costs)) for sample in bare]


def test_a_machine_that_does_what_the_laws_say():
    found = _machine(COSTS)
    assert peer_fit.errors(found) == [0.0] * len(found)
    assert peer_fit.fit(found) == COSTS
    assert all(taken == best for taken, best in peer_fit.regrets(found))
    assert "worst   0% of 6" in peer_fit.report(found)


def test_another_machine_s_laws_are_found():
    other = replace(
        COSTS[False], packets=LatencyBandwidth(4.0, 0.3, 0.7, crowd=0.6, fill_us=1.0, ramp_nbytes=1e4)
    )
    found = _machine({**COSTS, False: other})
    assert max(abs(e) for e in peer_fit.errors(found)) > 0.3
    fitted = peer_fit.fit(found)
    assert max(abs(e) for e in peer_fit.errors(found, fitted)) < 0.06
    assert fitted[False].packets.speed == pytest.approx(0.7, rel=0.1)
    assert fitted[True] == COSTS[True] and fitted[False].chunks == COSTS[False].chunks


def test_what_a_wrong_choice_costs():
    found = [
        peer_fit.Sample(("one_shot", "peer_packets"), 2, False, 4096, "float32", 6.0),
        peer_fit.Sample(("native", ""), 2, False, 4096, "float32", 4.0),
    ]
    assert peer_fit.report(found).splitlines()[-1].endswith("6.00 us, 1.500 x native ")


def test_the_command_prints_laws_and_errors(capsys):
    assert peer_fit.main([]) == 0
    printed = capsys.readouterr().out
    assert "TOGETHER\n    packets=LatencyBandwidth(" in printed and "median error" in printed
