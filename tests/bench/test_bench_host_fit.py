"""The fit of the model of shared memory: what it reads from tables, and what it reports."""

from __future__ import annotations

import host_fit

from flagcx.algorithms.candidate import Candidate
from flagcx.cost.shared_memory import HOST_COSTS, predict_on_host
from flagcx.selection.table import Fit, Point, Table

SLOTS, ATTACHED = Candidate("binomial", 1, "slots"), Candidate("tree", 1, "cross_memory")


def _table(factor: float) -> Table:
    """A machine that does exactly what the model says, or ``factor`` times that for one candidate."""

    def time_us(candidate: Candidate, nbytes: int) -> float:
        found = predict_on_host("broadcast", candidate, nbytes, 4, cores=2)
        return found.time_us * (factor if candidate is SLOTS else 1.0)

    points = tuple(Point(n, {c: time_us(c, n) for c in (SLOTS, ATTACHED)}) for n in (1 << 12, 1 << 20))
    return Table(Fit({"cores": 2}, 4, "shared_memory", {}, {}), {"broadcast": points})


def test_a_machine_that_does_what_the_model_says():
    found = host_fit.samples([_table(1.0)])
    assert [sample[:4] for sample in found[:2]] == [("broadcast", 4, 2, 4096)] * 2
    assert "broadcast       4 ranks: median error   0%; choice costs 1.00 x" in host_fit.report(
        found, HOST_COSTS
    )
    assert host_fit.fit(found).step_us == HOST_COSTS.step_us


def test_errors_and_the_price_of_a_wrong_choice_are_told():
    report = host_fit.report(host_fit.samples([_table(100.0)]), HOST_COSTS)
    assert "median error  50%" in report
    cheap = host_fit.report(host_fit.samples([_table(0.01)]), HOST_COSTS)
    assert float(cheap.split(", ")[-1].split(" x")[0]) > 10


def test_what_is_no_table_is_named_in_a_line(capsys, tmp_path):
    (tmp_path / "other.json").write_text("[]")
    for path, why in (
        (tmp_path, "is a folder; name the files in it that flagcx tune -o wrote"),
        (tmp_path / "none.json", "No such file or directory; expected a file that flagcx tune -o wrote"),
        (tmp_path / "other.json", "expected a file that flagcx tune -o wrote"),
    ):
        assert host_fit.main([str(path)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(str(path)) and why in line
