"""Everything on several GPUs: parts that fail cost no other, rows are kept as they come, and the targets."""

from __future__ import annotations

import json
import sys

import pytest
import several_gpus as bench
import targets

MIB, GIB = 1 << 20, 1 << 30


def row(library, ranks, nbytes, us, gpus=4, wrong=0, dtype="float32", **more):
    facts = {"library": library, "ranks": ranks, "nbytes": nbytes, "dtype": dtype, "replay_us": us}
    return {**facts, "wrong": wrong, "run": {"gpus": gpus}, **more}


def held(*rows):
    return {one.what: one.passed for one in targets.judge_gpus(rows)}


# -- targets


def test_two_gpus_have_times_that_a_choice_may_take():
    assert held(row("flagcx", 2, 4096, 4.8)) == {"chosen, two GPUs": True}
    assert held(row("flagcx", 2, 4096, 4.81)) == {"chosen, two GPUs": False}
    assert not held(row("flagcx", 2, 4096, 4.0, dtype="bfloat16"))
    assert not held(row("flagcx", 2, 5000, 4.0))


def test_four_gpus_have_a_part_of_the_best_peers_time():
    peers = [row("NCCL", 4, 4 * MIB, 40.0), row("torch symmetric two-shot", 4, 4 * MIB, 30.0)]
    assert held(row("flagcx", 4, 4 * MIB, 21.0), *peers) == {"chosen, 0.7 of torch symmetric two-shot": True}
    assert held(row("flagcx", 4, 4 * MIB, 21.1), *peers) == {"chosen, 0.7 of torch symmetric two-shot": False}
    large = [row("NCCL", 4, 8 * MIB, 100.0), row("flagcx", 4, 8 * MIB, 90.0)]
    assert held(*large) == {"chosen, 0.9 of NCCL": True}


def test_the_choice_is_at_most_a_twentieth_behind_the_best_candidate():
    own = [row("flagcx ring", 2, 999, 20.0), row("flagcx native", 2, 999, 10.0)]
    assert held(row("flagcx", 2, 999, 10.5), *own) == {"chosen, beside flagcx native": True}
    assert held(row("flagcx", 2, 999, 10.51), *own) == {"chosen, beside flagcx native": False}
    reached = row("flagcx comm.empty", 2, 999, 1.0)
    assert held(row("flagcx", 2, 999, 10.5), reached, *own) == {"chosen, beside flagcx native": True}


def test_schedules_reach_85_percent_of_nccls_bandwidth_at_1_gib():
    nccl = row("NCCL", 4, GIB, 85.0)
    ring = "flagcx ring, 85% of NCCL's bandwidth"
    assert held(nccl, row("flagcx ring", 4, GIB, 100.0)) == {ring: True}
    assert held(nccl, row("flagcx ring", 4, GIB, 100.1)) == {ring: False}
    by_kernel = row("flagcx two_shot", 4, GIB, 50.0, protocol="peer_memory")
    assert held(nccl, row("flagcx ring", 4, GIB, 100.1), by_kernel) == {ring: False}
    two_shot = row("flagcx two_shot", 4, GIB, 90.0, protocol="")
    assert held(nccl, row("flagcx ring", 4, GIB, 100.1), two_shot) == {
        "flagcx two_shot over NCCL, 85% of NCCL's bandwidth": True
    }


def test_wrong_sums_of_ours_fail_and_shared_gpus_are_not_judged():
    assert held(row("flagcx", 2, 4096, 1.0, wrong=3)) == {"flagcx: sums are wrong": False}
    assert not held(row("NCCL", 2, 4096, 1.0, wrong=3))
    assert not held(row("flagcx", 4, 4096, 1.0, gpus=1), row("NCCL", 4, 4096, 9.0, gpus=1))
    assert not held({"library": "flagcx", "nbytes": 4096, "dtype": "float32", "error": "refused"})


# -- parts


@pytest.mark.parametrize(("counts", "gpus", "shared"), [([2, 4], 4, False), ([2, 4], 1, True)])
def test_ranks_share_only_where_gpus_are_too_few(counts, gpus, shared):
    found = {part.name: part for part in bench.parts(counts, gpus)}
    assert {"tune-2", "tune-4", "before", "after", "overlap", "int8", "article", "tests"} <= found.keys()
    for name in ("article", "overlap", "int8", "tune-4"):
        assert ("--share-gpu" in found[name].command) == shared
    assert ("article-20GB" in found) != shared
    for name in ("collectives", "host", "host-torch"):
        assert ("--own-gpu" in found[name].command) != shared
    assert found["before"].command[:3] == ("bench/gpu_replays.py", "--ranks", "2,4")
    assert "bfloat16" in found["bfloat16"].command and "1K,4K" in found["bfloat16"].command[6]


def test_rows_are_kept_as_they_come_and_a_part_out_of_time_is_told(tmp_path):
    out = tmp_path / "out.jsonl"
    writes = (
        "import sys, time; open(sys.argv[1], 'a').write('{\"us\": 1}\\n{\"us\"'); print('begun', flush=True)"
    )
    slow = bench.Part("slow", ("-c", f"{writes}; time.sleep(60)", "{out}"), 1.5)
    ended = bench.run_part(slow, out, {}, 100.0)
    assert ended["exit_code"] is None and ended["printed"] == "begun\n" and ended["seconds"] < 30
    quick = bench.Part("quick", ("-c", writes + "; raise SystemExit(3)", "{out}"), 60.0)
    assert bench.run_part(quick, out, {}, 100.0)["exit_code"] == 3
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["part"], r.get("us")) for r in rows] == [
        ("slow", 1), ("slow", None), ("quick", 1), ("quick", None),
    ]  # fmt: skip


def test_verdicts_are_printed_and_kept(tmp_path):
    out = tmp_path / "out.jsonl"
    rows = [
        {"part": "before", **row("flagcx", 2, 4096, 5.0)},
        {"part": "after", **row("flagcx", 2, 4096, 3.0)},
        {"part": "topology", "exit_code": 0},
    ]
    out.write_text("".join(json.dumps(one) + "\n" for one in rows))
    text = bench.verdicts(out).splitlines()
    assert text[0].startswith("FAIL  before, 2 ranks, float32, 4096 bytes: chosen, two GPUs: 5.00 us")
    assert text[1].startswith("pass  after") and text[2] == "1 of 2 targets reached"
    kept = [json.loads(line) for line in out.read_text().splitlines()][3:]
    assert [(one["of"], one["passed"]) for one in kept] == [("before", False), ("after", True)]


def test_the_command_runs_the_parts_that_are_named(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.jsonl"
    made = [
        bench.Part("one", ("-c", "import os; print(os.environ['XDG_CACHE_HOME'] != '')"), 30.0),
        bench.Part("two", ("-c", "raise SystemExit('left out')"), 30.0),
    ]
    monkeypatch.setattr(bench, "count_gpus", lambda: 2)
    monkeypatch.setattr(bench, "parts", lambda counts, gpus: made if (counts, gpus) == ([2], 2) else [])
    monkeypatch.setattr(sys, "argv", ["several_gpus.py", "--out", str(out), "--parts", "one"])
    bench.main()
    printed = capsys.readouterr().out
    assert "== one: exit code 0" in printed and "True" in printed and "left out" not in printed
    assert "0 of 0 targets reached" in printed
    monkeypatch.setattr(sys, "argv", ["several_gpus.py", "--out", str(out), "--parts", "three"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "no part 'three'; there are one, two" in capsys.readouterr().err
