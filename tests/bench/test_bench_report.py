"""Lists, statistics, tables and JSON lines of the benchmarks, and the verdict on the targets."""

import json

import pytest
import report
import targets
from report import Result


def test_lists_are_read_by_commas():
    assert report.list_of(int)("2,4") == [2, 4]
    assert report.list_of(str)("") == []


def test_statistics_are_those_of_the_rounds():
    result = Result.of("x", 2, 1024, [5e-6, 1e-6, 3e-6, 2e-6, 4e-6], wrong=0)
    times = (result.min_us, result.p25_us, result.median_us, result.p75_us)
    assert times == pytest.approx((1, 2, 3, 4))
    assert result.rounds == 5


def test_one_round_is_its_own_quartiles():
    result = Result.of("x", 2, 1024, [2e-6], wrong=0)
    assert (result.p25_us, result.median_us, result.p75_us) == pytest.approx((2, 2, 2))


def test_table_aligns_first_column_left_and_others_right():
    table = report.format_table(["size", "us"], [["1 KiB", "2.1"], ["16 KiB", "10.0"]])
    assert table.splitlines() == ["size      us", "1 KiB    2.1", "16 KiB  10.0"]


def test_json_lines_are_appended_with_date_and_machine(tmp_path):
    path = tmp_path / "results" / "host.jsonl"
    row = report.result_row(Result.of("x", 2, 1024, [2e-6], wrong=0), {"numpy": "2"})
    report.write_json_lines(path, [row])
    report.write_json_lines(path, [row])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    assert {"date", "cpu", "cores", "system", "versions", "median_us", "wrong"} <= set(lines[0])


def result(name, median_us, wrong=0, nbytes=1024, ranks=2):
    return Result(name, ranks, nbytes, 5, median_us, median_us, median_us, median_us, wrong)


def verdict_of(*results, least=2.0):
    wanted = targets.Target("flagcx", "gloo", 2, {1024: least})
    (verdict,) = targets.judge(results, [wanted])
    return verdict


def test_target_is_a_ratio_of_medians():
    assert verdict_of(result("flagcx", 10), result("gloo", 20)).word == "pass"
    assert verdict_of(result("flagcx", 10), result("gloo", 19.9)).word == "FAIL"


def test_wrong_result_of_ours_fails_however_fast():
    assert verdict_of(result("flagcx", 1, wrong=1), result("gloo", 20)).word == "FAIL"


def test_without_a_target_there_is_a_ratio_and_no_verdict():
    verdict = verdict_of(result("flagcx", 10, nbytes=8), result("gloo", 5, nbytes=8))
    assert (verdict.ratio, verdict.word) == (0.5, "")


def test_other_sizes_and_ranks_are_not_compared():
    results = [result("flagcx", 1), result("gloo", 9, nbytes=2048), result("gloo", 9, ranks=4)]
    assert not list(targets.judge(results))


def test_every_target_names_what_is_measured():
    from groups import IMPLEMENTATIONS

    for target in targets.TARGETS:
        assert {target.ours, target.peer} <= set(IMPLEMENTATIONS)
        assert set(target.least) <= set(targets.SIZES)


def test_what_is_no_number_is_null_in_lists_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    report.write_json_lines(path, [{"loss": float("nan"), "losses": (1.0, float("nan")), "codec": "randomk"}])
    row = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (row["loss"], row["losses"], row["codec"]) == (None, [1.0, None], "randomk")
