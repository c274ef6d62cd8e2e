"""Fits the constants of the model of shared memory to tables that ``flagcx tune`` measured on this machine.

    flagcx tune -n 2 -o two.json && flagcx tune -n 4 -o four.json
    python bench/host_fit.py two.json four.json

Minimises the mean absolute error of log time over all candidates and sizes by pattern search: no chance, no
clock. Prints the constants, and for each collective the median error and how much slower than the fastest
candidate the one is that the model takes for the fastest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from flagcx.algorithms.candidate import Candidate
from flagcx.cost.shared_memory import HOST_COSTS, HostCosts, predict_on_host
from flagcx.errors import ArgumentError
from flagcx.selection.table import Table, read_table

Sample = tuple[str, int, int, int, Candidate, float]
"""Collective, ranks, cores, bytes, candidate, measured time in us."""


def read(path: Path) -> Table:
    """A table from its file.

    Raises:
        ArgumentError: It is not one that ``flagcx tune`` wrote.
    """
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder; name the files in it that flagcx tune -o wrote")
    try:
        return read_table(path)
    except (OSError, ArgumentError) as error:
        why = getattr(error, "strerror", None) or error
        raise ArgumentError(f"{path}: {why}; expected a file that flagcx tune -o wrote") from None


def samples(tables: Sequence[Table]) -> list[Sample]:
    """Every measured time of every table."""
    return [
        (collective, table.fit.ranks, int(table.fit.machine["cores"]), point.nbytes, candidate, time_us)
        for table in tables
        for collective, points in table.measured.items()
        for point in points
        for candidate, time_us in point.times_us.items()
    ]


def predictions(found: Sequence[Sample], costs: HostCosts) -> np.ndarray:
    """The model's time of each sample, in us."""
    return np.array(
        [
            predict_on_host(collective, candidate, nbytes, ranks, cores=cores, costs=costs).time_us
            for collective, ranks, cores, nbytes, candidate, _ in found
        ]
    )


def fit(found: Sequence[Sample]) -> HostCosts:
    """The constants of least mean absolute log error."""
    measured = np.log([time_us for *_, time_us in found])

    def loss(logs: dict[str, float]) -> float:
        costs = HostCosts(**{name: float(np.exp(value)) for name, value in logs.items()})
        return float(np.abs(np.log(predictions(found, costs)) - measured).mean())

    best = {name: float(np.log(value)) for name, value in asdict(HOST_COSTS).items()}
    value, stride = loss(best), 0.7
    while stride > 0.1:
        improved = False
        for name in best:
            for change in (stride, -stride):
                tried = {**best, name: best[name] + change}
                if (now := loss(tried)) < value - 1e-6:
                    best, value, improved = tried, now, True
        stride *= 1.0 if improved else 0.5
    return HostCosts(**{name: float(f"{np.exp(number):.3g}") for name, number in best.items()})


def report(found: Sequence[Sample], costs: HostCosts) -> str:
    """For each collective and number of ranks: the error, and the price of the model's choice."""
    predicted = predictions(found, costs)
    lines = []
    for key in sorted({(s[0], s[1]) for s in found}):
        rows = [i for i, s in enumerate(found) if s[:2] == key]
        errors = [abs(predicted[i] / found[i][-1] - 1) for i in rows]
        prices = []
        for nbytes in sorted({found[i][3] for i in rows}):
            here = [i for i in rows if found[i][3] == nbytes]
            chosen = min(here, key=lambda i: predicted[i])
            prices.append(found[chosen][-1] / min(found[i][-1] for i in here))
        lines.append(
            f"{key[0]:15} {key[1]} ranks: median error {np.median(errors):4.0%}; choice costs "
            f"{np.median(prices):.2f} x the best (median), {max(prices):.2f} x at worst"
        )
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    """Fits and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+", help="files that flagcx tune -o wrote")
    parser.add_argument("--every", type=int, default=3, help="fit to every third time, which is quicker")
    options = parser.parse_args(given)
    try:
        found = samples([read(path) for path in options.tables])
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 1
    costs = fit(found[:: options.every])
    print("\n".join(f"{name}={value:g}" for name, value in asdict(costs).items()))
    print(report(found, costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
