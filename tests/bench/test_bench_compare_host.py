"""The comparison: takes turns, reports what's missing, fails on missed targets and wrong results."""

import contextlib
import json

import compare_host
import pytest
from compare_host import Samples, TimeBudget
from groups import GroupFailed, Implementation

US = 1e-6


class ScriptedGroup:
    """A group whose answers are made up: ``seconds`` a call, ``wrong`` elements, or a failure."""

    def __init__(self, name, log, seconds=(30 * US, 40 * US), wrong=0, fails_at=None):
        self.name, self.log, self.seconds, self.wrong, self.fails_at = name, log, seconds, wrong, fails_at

    def order(self, do, **arguments):
        self.log.append((self.name, do, arguments))
        if do == self.fails_at:
            raise GroupFailed(f"{self.name}: a rank died: killed")
        if do == "sample":
            return [{"seconds": value} for value in self.seconds]
        return [{"wrong": self.wrong}] * 2


def measured(*scripted, rounds=3):
    """Measures scripted groups at 1 KiB; returns the samples, and the groups that are left."""
    samples, alive = Samples(), list(scripted)
    compare_host._measure_size(alive, "allreduce", 1024, rounds, samples)
    return samples, [group.name for group in alive]


def test_a_round_counts_with_its_slowest_rank():
    samples, _ = measured(ScriptedGroup("flagcx", [], seconds=(10 * US, 25 * US)))
    (result,) = samples.results(2)
    assert (result.median_us, result.rounds) == (pytest.approx(25), 3)


def test_every_group_has_a_turn_in_every_round_after_a_verified_call():
    log = []
    measured(ScriptedGroup("flagcx", log), ScriptedGroup("gloo", log), rounds=4)
    first = next(place for place, (_, do, _) in enumerate(log) if do == "verify")
    turns = [(name, do) for name, do, _ in log[first:-2]]  # the last two let go of the messages
    assert [do for _, do in turns] == ["verify", "sample"] * 8
    names = [name for name, do in turns if do == "sample"]
    assert all({"flagcx", "gloo"} == set(names[i : i + 2]) for i in range(0, 8, 2))


def test_batches_are_long_enough():
    log = []
    measured(ScriptedGroup("flagcx", log, seconds=(10 * US, 15 * US)))
    assert log[-2][1] == "sample"
    assert log[-2][2]["calls"] * 15 * US == pytest.approx(compare_host.SAMPLE_S, rel=0.01)


@pytest.mark.parametrize("fails_at", ["prepare", "verify", "sample"])
def test_group_that_fails_is_left_out_and_the_others_go_on(fails_at):
    samples, alive = measured(ScriptedGroup("mpich", [], fails_at=fails_at), ScriptedGroup("gloo", []))
    assert samples.troubles == {"mpich": "failed: mpich: a rank died: killed"}
    assert alive == ["gloo"]
    assert len(samples.seconds["gloo", 1024]) == 3


def test_wrong_elements_of_all_ranks_and_rounds_add_up():
    samples, _ = measured(ScriptedGroup("flagcx", [], wrong=5))
    (result,) = samples.results(2)
    assert result.wrong == 5 * 2 * 3


def test_implementation_that_does_not_start_is_missing_with_the_reason(monkeypatch):
    absent = Implementation("gloo", None, lambda *_: [["/no/such/program"]])
    monkeypatch.setattr(compare_host, "IMPLEMENTATIONS", {"gloo": absent})
    samples = compare_host.measure(["gloo"], 2, [1024], TimeBudget(1, 1, 1))
    assert "missing: " in samples.troubles["gloo"]
    assert "/no/such/program" in samples.troubles["gloo"]


def test_message_that_does_not_fit_in_memory_is_left_out(monkeypatch):
    monkeypatch.setattr(compare_host, "_fits", lambda nbytes: nbytes < 4096)
    alive = contextlib.nullcontext([ScriptedGroup("gloo", [])])
    monkeypatch.setattr(compare_host, "launched", lambda *_: alive)
    samples = compare_host.measure(["gloo"], 2, [1024, 4096], TimeBudget(1, 1, 1))
    assert samples.troubles == {"4 KiB": "left out: not enough memory is available"}
    assert [size for _, size in samples.seconds] == [1024]


def test_unknown_implementation_is_refused(capsys):
    with pytest.raises(SystemExit):
        compare_host.main(["--implementations", "nccl"])
    assert "no implementation 'nccl': choose from flagcx, flagcx.empty, gloo" in capsys.readouterr().err


def run_main(monkeypatch, flagcx_us, wrong=0, arguments=()):
    """Runs the command line at 1 KiB on made-up times: Open MPI takes 20 us."""

    def measure(names, ranks, sizes, pace, collective):
        samples = Samples()
        for name, time_us in (("flagcx", flagcx_us), ("openmpi", 20)):
            samples.seconds[name, 1024] = [time_us * US]
            samples.startups[name] = [0.5]
            samples.versions[name] = {"numpy": "2"}
        samples.wrong["flagcx", 1024] = wrong
        samples.troubles["gloo"] = "missing: no network"
        return samples

    monkeypatch.setattr(compare_host, "measure", measure)
    return compare_host.main(["--ranks", "2", "--sizes", "1K", *map(str, arguments)])


def test_report_has_ratio_target_and_verdict(monkeypatch, capsys, tmp_path):
    path = tmp_path / "host.jsonl"
    assert run_main(monkeypatch, flagcx_us=10, arguments=["--json", path]) == 0
    output = capsys.readouterr().out
    row = next(line.split() for line in output.splitlines() if line.startswith("1 KiB") and "openmpi" in line)
    assert row[-3:] == ["2.00", "0.8", "pass"]
    assert "gloo: missing: no network" in output
    assert "1 of 1 targets reached, 0 wrong elements" in output
    assert [json.loads(line)["implementation"] for line in path.read_text().splitlines()] == [
        "flagcx",
        "openmpi",
    ]


def test_missed_target_or_wrong_result_is_a_failure(monkeypatch, capsys):
    assert run_main(monkeypatch, flagcx_us=40) == 1
    assert "FAIL" in capsys.readouterr().out
    assert run_main(monkeypatch, flagcx_us=10, wrong=1) == 1


def test_order_of_the_turns_changes():
    log = []
    measured(*(ScriptedGroup(name, log) for name in ("flagcx", "gloo", "openmpi")), rounds=8)
    names = [name for name, do, _ in log if do == "verify"]
    assert len({tuple(names[i : i + 3]) for i in range(0, len(names), 3)}) > 1


@pytest.mark.exhaustive
def test_flagcx_is_measured_with_both_kinds_of_arrays(capsys, tmp_path):
    path = tmp_path / "host.jsonl"
    names = "flagcx,flagcx.empty"
    arguments = ["--implementations", names, "--ranks", "2", "--sizes", "1K,256K", "--quick"]
    assert compare_host.main([*arguments, "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["implementation"], row["nbytes"]) for row in rows] == [
        (name, nbytes) for nbytes in (1 << 10, 1 << 18) for name in names.split(",")
    ]
    assert all(row["wrong"] == 0 and 0 < row["min_us"] <= row["median_us"] for row in rows)
    assert "flagcx: " in capsys.readouterr().out
