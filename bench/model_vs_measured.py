"""The models of all-reduce on GPUs against what was measured: NCCL's own, and schedules over NCCL.

    python bench/model_vs_measured.py [--part all|tables|collectives|replays] [--tables FILE] [--json] [--fit]
                                      [--out PATH]

NCCL's own, against published tables (``bench/nccl_published.py``) and graph replays on H200: for each
machine, the constants of ``flagcx.cost.nccl_law`` are fitted on all others, its own times are predicted from
its topology alone, and its interval from what the others were off by. The fit minimises the mean absolute
error of log time, drawn towards ``PRIOR`` where no other machine has links of a kind. It uses no clock and no
chance.
``--fit`` prints the constants fitted on all machines, and the intervals.

NCCL's other collectives, against published tables: by the constants as they are, which were fitted to none of
these tables.

Schedules, against graph replays on H200 (``bench/results/gpu_replays_*_h200.jsonl``): what the model predicts
of each, with the constants as they are: those were chosen by an earlier run, and the file is of a later day.
NCCL's own stands beside them, by its constants as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from nccl_published import COLLECTIVES, PATH, Points, read
from report import write_json_lines

from flagcx.algorithms.candidate import Candidate
from flagcx.arguments import format_nbytes
from flagcx.cost.model import model_of
from flagcx.cost.nccl import nccl_algorithms
from flagcx.cost.nccl_law import FITTED, SPREAD, Stack, kind_of, launched, predict_us, stack
from flagcx.selection.device_rules import pieces_on_device
from flagcx.topology import preset

#: What is known before any fit: NCCL's constants for the latencies of LL (us), a usual round trip of TCP, and
#: plans nearly taken at their word.
PRIOR: Mapping[str, float] = MappingProxyType(
    {
        "base": 9.0,
        "replayed": 4.0,
        "launch": 4.6,
        "threads": 6.0,
        "latency_nvlink": 0.6,
        "latency_xgmi": 0.3,
        "latency_pcie": 1.0,
        "latency_host": 1.5,
        "latency_network": 5.0,
        "latency_efa": 15.0,
        "latency_efa_1": 40.0,
        "latency_tcp": 30.0,
        "slow_ll128": 2.5,
        "slow_simple": 5.0,
        "share_ll": 0.4,
        "share_ll128": 0.85,
        "efficiency_nvlink": 0.95,
        "efficiency_xgmi": 0.95,
        "efficiency_pcie": 0.95,
        "efficiency_host": 0.7,
        "efficiency_network": 0.95,
        "efficiency_efa": 0.95,
        "efficiency_efa_1": 0.95,
        "efficiency_tcp": 0.9,
        "efficiency_tcpxo": 0.9,
        "efficiency_socket": 0.95,
        "efficiency_host_old": 0.5,
        "efficiency_nvls": 0.83,
        "efficiency_nvls_100": 0.7,
        "pipeline": 1.0,
    }
)

RESULTS = Path(__file__).resolve().parent / "results"
SCHEDULES = ("ring", "tree", "double_binary_tree", "one_shot", "two_shot")
MIB = 1 << 20
#: The parts of what the predictions of unseen machines were off by, between which an interval is taken. They
#: are wider than 0.1 to 0.9, as those of yet other machines are: so it covers 80% of these.
QUANTILES = (0.07, 0.93)


def tables(path: Path = PATH) -> dict[str, list[Points]]:
    """Each machine's points: published ones, and graph replays on H200."""
    found = read(path)
    rows = [
        row
        for row in replay_rows([RESULTS / "gpu_replays_4_h200.jsonl"])
        if row["library"] == "NCCL" and row["dtype"] == "float32"
    ]
    machine, own = preset("dgx-h200"), []
    for ranks in sorted({row["ranks"] for row in rows}):
        mine = sorted((row["nbytes"], row["replay_us"]) for row in rows if row["ranks"] == ranks)
        sizes, times = np.array(mine, float).T
        own.append(Points(nccl_algorithms(machine, range(ranks), nvls=False), sizes, times, replayed=True))
    return {**found, "H200 x 2-4, replays": own}


# -- fitting


class Fit:
    """All points of all machines as arrays, so that one look at all of them is cheap.

    Args:
        points: Each machine's points, by its name.
    """

    def __init__(self, points: Mapping[str, Sequence[Points]]) -> None:
        parts = [(name, part) for name, own in points.items() for part in own]
        room = max(len(part.algorithms) for _, part in parts)
        stacks = [stack(part.algorithms, room) for _, part in parts]
        counts = [len(part.nbytes) for _, part in parts]
        self.stack = Stack(
            *(
                np.repeat(np.stack([getattr(one, name) for one in stacks]), counts, axis=0)
                for name in Stack.__slots__
            )
        )
        self.nbytes = np.concatenate([part.nbytes for _, part in parts])
        self.time_us = np.concatenate([part.time_us for _, part in parts])
        self.driven = np.repeat([part.driven for _, part in parts], counts)
        self.threads = np.repeat([part.threads for _, part in parts], counts)
        self.replayed = np.repeat([part.replayed for _, part in parts], counts)
        self.machine = np.repeat([name for name, _ in parts], counts)
        sound = np.repeat([not part.doubtful for _, part in parts], counts)
        self.kind = np.repeat([kind_of(part.algorithms) for _, part in parts], counts)
        share = {name: 1 / np.sum(sound & (self.machine == name)) for name in set(self.machine[sound])}
        self.weight = np.array(
            [share[name] if ok else 0.0 for name, ok in zip(self.machine, sound, strict=True)]
        )

    def log_errors(self, constants: Mapping[str, float]) -> np.ndarray:
        """log(predicted / measured) of each point."""
        times = self.stack.time_us(self.nbytes[:, None], constants, self.replayed[:, None]).min(axis=-1)
        plain = launched(times, constants, self.driven, self.threads)
        return np.log(np.where(self.replayed, times, plain) / self.time_us)

    def constants(self, without: Sequence[str] = (), pull: float = 0.02) -> dict[str, float]:
        """Constants of least mean absolute log error, each machine counting alike, drawn towards the prior.

        Pattern search, one constant after the other in factors that shrink: deterministic, and content with
        the kinks that a least over several ways has.

        Args:
            without: The machines that are left out.
            pull: How much a factor of e away from the prior counts, beside the mean error.
        """
        names, start = list(PRIOR), np.log(list(PRIOR.values()))
        weight = np.where(np.isin(self.machine, without), 0.0, self.weight)
        weight = weight / weight.sum()

        def loss(logs: np.ndarray) -> float:
            errors = np.abs(self.log_errors(dict(zip(names, np.exp(logs), strict=True))))
            return float(weight @ errors + pull * np.mean(np.abs(logs - start)))

        best, value, stride = start.copy(), loss(start), 0.4
        while stride > 0.01:
            improved = False
            for place in range(len(names)):
                for change in (stride, -stride):
                    tried = best.copy()
                    tried[place] += change
                    if (found := loss(tried)) < value - 1e-9:
                        best, value, improved = tried, found, True
            stride *= 1.0 if improved else 0.5
        return {name: float(f"{number:.3g}") for name, number in zip(names, np.exp(best), strict=True)}


def others(path: Path = COLLECTIVES) -> list[dict]:
    """What each table of another collective than the all-reduce is off by, by the constants as they are."""
    fit = Fit(read(path))
    allowed = np.array([SPREAD[key] for key in zip(fit.kind, fit.nbytes >= MIB, strict=True)])
    return _rows(fit, fit.log_errors(FITTED), lambda name: allowed)


def unseen(fit: Fit, parts: int | None = None) -> np.ndarray:
    """log(predicted / measured) of each point, by constants fitted on other machines.

    Args:
        fit: The points.
        parts: How many parts the machines are in, each of which is left out once; a machine each by default.
    """
    names, errors = list(dict.fromkeys(fit.machine.tolist())), np.zeros(len(fit.nbytes))
    parts = parts or len(names)
    for part in range(parts):
        left_out = names[part::parts]
        own = np.isin(fit.machine, left_out)
        errors[own] = fit.log_errors(fit.constants(without=left_out))[own]
    return errors


def spreads(fit: Fit, errors: np.ndarray, without: str = "") -> dict[tuple[str, bool], tuple[float, float]]:
    """Measured over predicted of an interval, by kind of machine and whether a message has a MiB or more.

    Args:
        fit: The points.
        errors: What unseen machines are off by, as ``unseen`` says.
        without: A machine that is left out; each other counts alike.
    """
    found = {}
    sound = (fit.weight > 0) & (fit.machine != without)
    for kind in dict.fromkeys(fit.kind.tolist()):
        for large in (False, True):
            here = sound & (fit.kind == kind) & ((fit.nbytes >= MIB) == large)
            if not here.any():
                found[kind, large] = (0.0, np.inf)  # no other machine is of the kind
                continue
            counts = {name: np.sum(fit.machine[here] == name) for name in set(fit.machine[here])}
            weight = np.array([1 / counts[name] for name in fit.machine[here]])
            order = np.argsort(-errors[here])
            ranks = (np.cumsum(weight[order]) - weight[order] / 2) / weight.sum()
            low, high = np.exp(np.interp(QUANTILES, ranks, -errors[here][order]))
            found[kind, large] = (float(f"{low:.3g}"), float(f"{high:.3g}"))
    return found


def by_machine(fit: Fit, errors: np.ndarray) -> list[dict]:
    """For each machine what it is off by, and how much of it lies in the interval that the others give."""

    def allowed(name: str) -> np.ndarray:
        known = spreads(fit, errors, without=name)
        return np.array([known[key] for key in zip(fit.kind, fit.nbytes >= MIB, strict=True)])

    return _rows(fit, errors, allowed)


def _rows(fit: Fit, errors: np.ndarray, allowed: Callable[[str], np.ndarray]) -> list[dict]:
    """One row a machine; ``allowed`` gives the interval of each point."""
    table = []
    for name in dict.fromkeys(fit.machine.tolist()):
        mine, bounds = fit.machine == name, allowed(name)
        inside = (np.exp(-errors) >= bounds[:, 0]) & (np.exp(-errors) <= bounds[:, 1])
        row: dict = {"machine": name, "doubtful": not fit.weight[mine].all()}
        for word, chosen in (("large", mine & (fit.nbytes >= MIB)), ("small", mine & (fit.nbytes < MIB))):
            if chosen.any():
                row[word] = float(np.median(np.abs(np.expm1(errors[chosen]))))
                row[f"{word}_points"] = int(chosen.sum())
                row[f"{word}_bias"] = float(np.exp(np.median(errors[chosen])))
                row[f"{word}_worst"] = float(np.exp(np.abs(errors[chosen]).max()))
                row[f"{word}_covered"] = float(inside[chosen].mean())
                row[f"{word}_errors"] = np.abs(np.expm1(errors[chosen])).tolist()
        table.append(row)
    return table


def summary(table: Sequence[dict]) -> dict[str, float]:
    """Medians over machines and over all their points, the worst factor, and how much intervals cover."""
    found = {}
    for word in ("large", "small"):
        rows = [row for row in table if word in row and not row["doubtful"]]
        found[f"{word}_median_of_machines"] = float(np.median([row[word] for row in rows]))
        errors = np.concatenate([row[f"{word}_errors"] for row in rows])
        found[f"{word}_median_of_points"] = float(np.median(errors))
        found[f"{word}_within_a_factor_of_1.5"] = float(
            np.mean([row[f"{word}_worst"] <= 1.5 for row in rows])
        )
        found[f"{word}_worst_factor"] = max(row[f"{word}_worst"] for row in rows)
        weights = [row[f"{word}_points"] for row in rows]
        found[f"{word}_covered"] = float(
            np.average([row[f"{word}_covered"] for row in rows], weights=weights)
        )
    return found


# -- graph replays on several GPUs


def replay_rows(paths: Sequence[Path]) -> list[dict]:
    """The rows of ``bench/gpu_replays.py`` that have a time, of ranks with a GPU each."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [row for row in rows if "replay_us" in row and row["ranks"] <= row["run"]["gpus"]]


def against_replays(rows: Sequence[dict]) -> list[dict]:
    """Predicted over measured, for NCCL's own and for each schedule of sends and receives.

    All ranks are behind NVSwitches, as on a DGX H200. Rows that a kernel in the peers' memory carried, as
    they say themselves, are left out; in files from before they did, all named algorithms were schedules.
    """
    machine = preset("dgx-h200")
    models = {ranks: model_of(machine, ranks) for ranks in {row["ranks"] for row in rows}}
    table = []
    for row in rows:
        ranks, nbytes = row["ranks"], row["nbytes"]
        name = row["library"].removeprefix("flagcx ").removesuffix(" over NCCL")
        if row.get("protocol"):
            continue
        if name in SCHEDULES:
            pieces = pieces_on_device("allreduce", name, nbytes)
            predicted = models[ranks].timing("allreduce", Candidate(name, pieces), nbytes).time_us
        elif name == "NCCL":
            found = nccl_algorithms(machine, range(ranks), nvls=False)
            predicted = float(predict_us(found, np.array([nbytes], float), FITTED, replayed=True)[0])
        else:
            continue
        table.append(
            {
                "name": name, "ranks": ranks, "dtype": row["dtype"], "nbytes": nbytes,
                "measured_us": row["replay_us"], "predicted_us": round(predicted, 2),
                "ratio": predicted / row["replay_us"],
            }
        )  # fmt: skip
    return table


def replay_summary(table: Sequence[dict]) -> dict[str, float]:
    """The median error from 1 MiB up and below, and how much of them is within a quarter."""
    found = {}
    for word, chosen in (
        ("large", [abs(row["ratio"] - 1) for row in table if row["nbytes"] >= MIB]),
        ("small", [abs(row["ratio"] - 1) for row in table if row["nbytes"] < MIB]),
    ):
        if chosen:
            found[f"replays_{word}_median"] = float(np.median(chosen))
            found[f"replays_{word}_within_25_percent"] = float(np.mean(np.array(chosen) < 0.25))
            found[f"replays_{word}_worst"] = float(max(chosen))
    return found


def replay_lines(table: Sequence[dict]) -> Iterator[str]:
    """One line for each number of ranks, dtype and name: the ratios by size."""
    sizes = sorted({row["nbytes"] for row in table})
    yield f"{'predicted / measured':34} " + " ".join(f"{format_nbytes(size):>8}" for size in sizes)
    for key in dict.fromkeys((row["ranks"], row["dtype"], row["name"]) for row in table):
        own = {
            row["nbytes"]: row["ratio"] for row in table if (row["ranks"], row["dtype"], row["name"]) == key
        }
        cells = (f"{own[size]:8.2f}" if size in own else " " * 8 for size in sizes)
        yield f"{key[0]} ranks, {key[1]:8} {key[2]:18} {' '.join(cells)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="all", choices=["all", "tables", "collectives", "replays"])
    parser.add_argument("--tables", type=Path, metavar="FILE", default=PATH, help="as nccl_published.jsonl")
    parser.add_argument(
        "--replays", type=Path, nargs="*", default=sorted(RESULTS.glob("gpu_replays_*_h200.jsonl"))
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="append the results there, one machine a line"
    )
    parser.add_argument("--fit", action="store_true", help="fit on all machines and print the constants")
    given = parser.parse_args(arguments)
    table: list[dict] = []
    if given.fit or given.part in ("all", "tables"):
        try:
            fit = Fit(tables(given.tables))
        except FileNotFoundError as error:
            print(f"no tables at {error.filename}; name a file like {PATH} with --tables", file=sys.stderr)
            return 1
        errors = unseen(fit)
        if given.fit:
            names = {
                f"{kind} {'>=' if large else '<'} 1 MiB": v
                for (kind, large), v in spreads(fit, errors).items()
            }
            print(json.dumps({"constants": fit.constants(), "intervals": names}, indent=1))
            return 0
        table = by_machine(fit, errors)
    other = others() if given.part in ("all", "collectives") else []
    replayed = against_replays(replay_rows(given.replays)) if given.part in ("all", "replays") else []
    found = {
        **(summary(table) if table else {}),
        **({f"collectives_{key}": value for key, value in summary(other).items()} if other else {}),
        **replay_summary(replayed),
    }
    if given.out:
        plain = ({k: v for k, v in row.items() if not k.endswith("_errors")} for row in [*table, *other])
        write_json_lines(given.out, [*plain, *replayed, found])
    if given.json:
        print(json.dumps({"machines": table, "collectives": other, "replays": replayed, "summary": found}))
        return 0
    print("\n".join([*(table_lines(table) if table else ()), *(table_lines(other) if other else ())]))
    print("\n".join([*(replay_lines(replayed) if replayed else ())]))
    for name, value in found.items():
        print(f"{name}: {value:.2f}" if name.endswith("worst_factor") else f"{name}: {value:.1%}")
    return 0


def table_lines(table: Sequence[dict]) -> Iterator[str]:
    """The errors of each machine."""
    yield "median |predicted / measured - 1| of each machine, by constants fitted on all the others (those of"
    yield "other collectives as they are); the worst factor; and how much lies in the interval (p10-p90)"
    columns = f"{'bias':>6} {'worst':>6} {'covered':>7} {'points':>6}"
    yield f"{'machine':36} {'>= 1 MiB':>9} {columns} {'< 1 MiB':>9} {columns}"
    for row in table:
        cells = [
            f"{row[w]:9.0%} {row[f'{w}_bias']:6.2f} {row[f'{w}_worst']:6.2f} {row[f'{w}_covered']:7.0%} "
            f"{row[f'{w}_points']:6d}"
            if w in row
            else " " * 38
            for w in ("large", "small")
        ]
        yield f"{row['machine']:36} {' '.join(cells)}{'  (doubtful)' if row['doubtful'] else ''}"
    yield ""


if __name__ == "__main__":
    raise SystemExit(main())
