"""Checks what ``flagcx tune`` promises: the fastest candidate is chosen; and how good the rule is without.

    python bench/tune_check.py                                  # 2 and 4 ranks, five collectives
    python bench/tune_check.py --ranks 2 --collectives allreduce --json bench/results/tune.jsonl

For each collective the machine is tuned in one start of the ranks. A fresh start then measures all candidates
again, among them the one that the table chooses and the one that the rule chooses, in turns, round by round.
A choice counts as good if its median is within 10% (tuned) or 25% (by rule) of the best candidate's, or if
the two cannot be told apart: their quartiles overlap, which is marked with "~".

Sizes are whole messages: all blocks together, where a collective has blocks. 2 MiB is not among the sizes
that are tuned, so there the table's interpolation is checked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles

from report import format_table, list_of, write_json_lines

import flagcx as fc
from flagcx.algorithms.candidate import Candidate
from flagcx.arguments import format_nbytes
from flagcx.cli.sizes import parse_nbytes
from flagcx.cli.tune import Task
from flagcx.cli.tune import measure as tune_machine
from flagcx.selection.candidates import Request
from flagcx.selection.rules import HostRules
from flagcx.selection.selector import Selector, TuningInfo
from flagcx.selection.table import Table
from flagcx.selection.tuning import HostBench, TimeBudget, counted

SIZES = tuple(parse_nbytes(s) for s in ("256", "1K", "4K", "16K", "64K", "256K", "2M", "16M", "64M", "256M"))
COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall")
LARGE = 16 << 20
TUNED_WITHIN, RULE_WITHIN = 1.10, 1.25
TUNED_GOAL, RULE_GOAL = 9, 8


@dataclass(frozen=True)
class Check:
    """One size: the best candidate, and the two choices.

    Attributes:
        collective, ranks, nbytes: What was measured.
        best, tuned, rule: Which candidate.
        best_us, tuned_us, rule_us: Its median time.
        tuned_tie, rule_tie: Whether it cannot be told from the best.
        times_us: The median time of every candidate that was measured in full.
    """

    collective: str
    ranks: int
    nbytes: int
    best: str
    best_us: float
    tuned: str
    tuned_us: float
    tuned_tie: bool
    rule: str
    rule_us: float
    rule_tie: bool
    times_us: dict[str, float] = field(default_factory=dict)

    @property
    def tuned_good(self) -> bool:
        """Whether the table's choice is as good as promised."""
        return self.tuned_us <= TUNED_WITHIN * self.best_us or self.tuned_tie

    @property
    def rule_good(self) -> bool:
        """Whether the rule's choice is."""
        return self.rule_us <= RULE_WITHIN * self.best_us or self.rule_tie


def check(collective: str, text: str, sizes: Sequence[int], rounds: int) -> list[Check]:
    """What every rank of the second start does: measures all candidates again."""
    comm = fc.init(tuning=False)
    transport = comm._host.transport
    bench = HostBench(transport)
    selector = Selector(HostRules(transport), TuningInfo(Table.from_json(text)))
    checks = []
    for total, nbytes in zip(sizes, counted(collective, sizes, comm.size), strict=True):
        request = Request(collective, nbytes, comm.size)
        rule, tuned = selector.rules.choose(request), selector.choose(request)
        choices = {_name(c): c for c in (tuned, rule)}
        every = (c.at(nbytes) for c in bench.candidates(collective, nbytes))
        choices |= {_name(c): c for c in every}
        pace = TimeBudget(rounds=rounds if total < LARGE else (rounds + 1) // 2, near=1.35)
        picked = [list(choices).index(_name(c)) for c in (tuned, rule)]
        measurement = bench.measurement(collective, nbytes)
        times = measurement.time_all(list(choices.values()), pace, always=picked)
        checks.append(_judge(collective, comm.size, total, list(choices), times, picked))
    return checks


def _name(choice: Candidate) -> str:
    pieces = f"/{choice.pieces}" if choice.pieces > 1 else ""
    return f"{choice.label}{pieces}" + (f"/{choice.protocol}" if choice.protocol else "")


def _judge(
    collective: str, ranks: int, nbytes: int, names: list[str], times: list[list[float]], picked: list[int]
) -> Check:
    medians = [median(t) * 1e6 for t in times]
    full = [i for i, t in enumerate(times) if len(t) >= max(map(len, times)) // 2 + 1]
    best = min(full, key=medians.__getitem__)

    def tie(i: int) -> bool:
        return _quartiles(times[i])[0] <= _quartiles(times[best])[1]

    tuned, rule = ((names[i], medians[i], tie(i)) for i in picked)
    every = {names[i]: round(medians[i], 3) for i in full}
    return Check(collective, ranks, nbytes, names[best], medians[best], *tuned, *rule, every)


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = quantiles(times, n=4, method="inclusive")
    return low, high


def format_checks(checks: Sequence[Check]) -> str:
    """The table of one collective."""
    header = ["size", "best", "us", "tuned", "us", "/ best", "", "rule", "us", "/ best", ""]
    rows = []
    for c in checks:
        row = [format_nbytes(c.nbytes), c.best, f"{c.best_us:.1f}"]
        for name, time_us, tie, good in (
            (c.tuned, c.tuned_us, c.tuned_tie, c.tuned_good),
            (c.rule, c.rule_us, c.rule_tie, c.rule_good),
        ):
            mark = ("ok" if good else "MISSED") + ("~" if tie else "")
            row += [name, f"{time_us:.1f}", f"{time_us / c.best_us:.2f}", mark]
        rows.append(row)
    return format_table(header, rows)


def main(given: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a promise is not kept."""
    options = _parse(given)
    broken = 0
    for ranks in options.ranks:
        for collective in options.collectives:
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as directory:
                path = Path(options.tables or directory, f"{collective}-{ranks}.json").absolute()
                fc.launch(_tune_quietly, ranks, ((collective,), path))
                tuned_s = time.monotonic() - start
                arguments = (collective, path.read_text(), options.sizes, options.rounds)
                checks = fc.launch(check, ranks, arguments)[0]
            tuned, rule = sum(c.tuned_good for c in checks), sum(c.rule_good for c in checks)
            strict = sum(c.tuned_us <= TUNED_WITHIN * c.best_us for c in checks)
            strict_rule = sum(c.rule_us <= RULE_WITHIN * c.best_us for c in checks)
            kept = tuned >= TUNED_GOAL * len(checks) // 10 and rule >= RULE_GOAL * len(checks) // 10
            broken += not kept
            print(f"\n{collective}, {ranks} ranks\n{format_checks(checks)}")
            print(
                f"tuned within 10% at {tuned} of {len(checks)} ({strict} by medians alone), by rule within "
                f"25% at {rule} of {len(checks)} ({strict_rule} by medians alone); tuning took "
                f"{tuned_s:.0f} s, all {time.monotonic() - start:.0f} s",
                flush=True,
            )
            if options.json:
                write_json_lines(options.json, (asdict(c) for c in checks))
    return int(bool(broken))


def _tune_quietly(collectives: tuple[str, ...], path: Path) -> None:
    tune_machine(Task(collectives, output=path), lambda *progress: None)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=list_of(int), default=[2, 4])
    parser.add_argument("--collectives", type=list_of(str), default=list(COLLECTIVES))
    parser.add_argument("--sizes", type=list_of(parse_nbytes), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=11, help="for each size; default 11")
    parser.add_argument("--tables", type=Path, metavar="FOLDER", help="keep the tables of tuning there")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append the results there, one a line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
