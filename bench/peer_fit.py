"""Fits the laws of peer memory and of NCCL on GPUs to measured medians, and says what the model then chooses.

    python bench/peer_fit.py                   # by the shipped results
    python bench/peer_fit.py --fit [FILE ...]  # fit anew, to these

Minimises the mean squared error of log time by pattern search, a law at a time: no chance, no clock. Prints
the laws, the error of each way, and what the model's choice costs beside the best way that was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_peer_memory import WAYS

from flagcx.algorithms.candidate import Candidate
from flagcx.cost.peer_memory import COSTS, GpuLinks, PeerCosts, predict_us

RESULTS = Path(__file__).resolve().parent / "results"
LAWS = tuple(field.name for field in fields(PeerCosts))


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured time of an all-reduce.

    Attributes:
        way: Algorithm and protocol.
        size: Number of ranks.
        one_gpu: Whether they shared one GPU.
        nbytes: Bytes of the message.
        dtype: The element type.
        time_us: Median of graph replays.
    """

    way: tuple[str, str]
    size: int
    one_gpu: bool
    nbytes: int
    dtype: str
    time_us: float

    @property
    def candidate(self) -> Candidate:
        """The way as the model takes it."""
        algorithm, protocol = self.way
        return Candidate(algorithm, 1, protocol)

    @property
    def place(self) -> tuple[bool, int, int, str]:
        """What the ways are compared at."""
        return self.one_gpu, self.size, self.nbytes, self.dtype


def samples(paths: Iterable[Path]) -> list[Sample]:
    """The times of all ways for plain arrays in result files; the median where a way was measured twice."""
    found: dict[tuple, list[float]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            way = _way(row)
            if way is None:
                continue
            gpus = row["gpus"] if "gpus" in row else row["run"]["gpus"]
            if 1 < gpus < row["ranks"]:
                continue  # Some ranks share GPUs, others do not: no law is made for that.
            time_us = row["time_us"] if "way" in row else row["replay_us"]
            found.setdefault((way, row["ranks"], gpus == 1, row["nbytes"], row["dtype"]), []).append(time_us)
    return [Sample(*key, statistics.median(times)) for key, times in found.items()]


def _way(row: dict) -> tuple[str, str] | None:
    """The way that a row of either benchmark measured, if it is one of the model's."""
    if "way" in row:
        if row["way"] not in WAYS:
            return None  # of a link alone
        algorithm, protocol, in_place = WAYS[row["way"]]
        return None if in_place else (algorithm, protocol)
    library = row.get("library", "")
    if "replay_us" not in row or row["wrong"] or row["run"].get("label"):
        return None
    if library == "flagcx native":
        return ("native", "")
    if library.startswith("flagcx") and "comm.empty" not in library and row.get("protocol"):
        return row["algorithm"], row["protocol"]
    return None


def shipped() -> list[Path]:
    """The result files that the laws are fitted to."""
    return sorted([*RESULTS.glob("gpu_peer_memory_*h200*.jsonl"), *RESULTS.glob("gpu_replays_*h200*.jsonl")])


def predicted_us(sample: Sample, costs=COSTS) -> float:
    """The model's time of a sample."""
    links = GpuLinks(sample.one_gpu, sample.size if sample.one_gpu else 1)
    return predict_us(sample.candidate, "allreduce", sample.nbytes, sample.size, links, costs=costs)


def fit(found: Sequence[Sample]) -> dict[bool, PeerCosts]:
    """The laws of least squared log error; one for which nothing was measured stays as it is."""
    made = dict(COSTS)
    for one_gpu in made:
        for name in LAWS:
            here = [s for s in found if s.one_gpu == one_gpu and _law_name(s) == name]
            made[one_gpu] = _fitted(made, one_gpu, name, here)
    return made


def _law_name(sample: Sample) -> str:
    names = PeerCosts(*LAWS)  # type: ignore[arg-type]
    return str(names.law(sample.candidate, "allreduce", sample.size))


def _fitted(made: dict[bool, PeerCosts], one_gpu: bool, name: str, here: Sequence[Sample]) -> PeerCosts:
    best = made[one_gpu]
    if len(here) < 4:
        return best

    def loss(costs: PeerCosts) -> float:
        tried = {**made, one_gpu: costs}
        return statistics.mean(math.log(predicted_us(s, tried) / s.time_us) ** 2 for s in here)

    law, least = getattr(best, name), loss(best)
    stride = 0.3
    while stride > 0.004:
        improved = False
        for field in fields(law):
            value = getattr(law, field.name)
            for factor in (1 + stride, 1 / (1 + stride)):
                changed = replace(law, **{field.name: float(f"{value * factor:.3g}")})
                now = loss(replace(best, **{name: changed}))
                if now < least - 1e-9:
                    law, least, improved = changed, now, True
                    best = replace(best, **{name: law})
        stride *= 1.0 if improved else 0.6
    return best


def regrets(found: Sequence[Sample], costs=COSTS) -> list[tuple[Sample, Sample]]:
    """At each place that has several ways: the one that the model takes, and the fastest."""
    places: dict[tuple, list[Sample]] = {}
    for sample in found:
        places.setdefault(sample.place, []).append(sample)
    return [
        (min(ways, key=lambda s: predicted_us(s, costs)), min(ways, key=lambda s: s.time_us))
        for _, ways in sorted(places.items())
        if len(ways) > 1
    ]


def errors(found: Sequence[Sample], costs=COSTS) -> list[float]:
    """The relative error of each prediction."""
    return [predicted_us(s, costs) / s.time_us - 1 for s in found]


def report(found: Sequence[Sample], costs=COSTS) -> str:
    """The errors of the ways, and the price of the choices."""
    lines = []
    for key in sorted({(s.one_gpu, s.size, s.way) for s in found}):
        here = [s for s in found if (s.one_gpu, s.size, s.way) == key]
        off = sorted(abs(e) for e in errors(here, costs))
        place = "one GPU" if key[0] else "own GPUs"
        lines.append(
            f"{key[1]} ranks, {place:8} {' '.join(key[2]):24} median error {statistics.median(off):4.0%}, "
            f"worst {off[-1]:4.0%} of {len(off)}"
        )
    for taken, best in regrets(found, costs):
        place = "one GPU" if taken.one_gpu else "own GPUs"
        lines.append(
            f"{taken.size} ranks, {place:8} {taken.nbytes:>11} {taken.dtype}: {' '.join(taken.way):22} "
            f"{taken.time_us:9.2f} us, {taken.time_us / best.time_us:5.3f} x {' '.join(best.way)}"
        )
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    """Fits if asked to, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="result files; the shipped ones by default")
    parser.add_argument("--fit", action="store_true", help="fit the laws anew")
    options = parser.parse_args(given)
    found = samples(options.files or shipped())
    costs = fit(found) if options.fit else COSTS
    for one_gpu, laws in costs.items():
        print("TOGETHER" if one_gpu else "APART")
        for name in LAWS:
            print(f"    {name}={getattr(laws, name)}")
    print(report(found, costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
