"""Compares flagcx with gloo, Open MPI and MPICH on this machine: float32, sum, in place.

    python bench/compare_host.py                 # 2 and 4 ranks, six sizes, a few minutes
    python bench/compare_host.py --quick         # the same with fewer rounds
    python bench/compare_host.py --ranks 2 --sizes 1K,4M --json bench/results/laptop.jsonl
    python bench/compare_host.py --collective broadcast --sizes 1K,16K,256K,4M   # beside Open MPI and MPICH

All libraries are alive at once and take turns, round by round, so that a machine that speeds up or
slows down does so for all of them. A round is one batch of calls between ranks that have just met in
a barrier; it counts with its slowest rank. Each round begins with a call on fresh data, whose result is
verified. The libraries are started several times, since where a start puts its memory matters too.

The first run installs each peer in an environment of its own under ``bench/.environments/``. A peer
that can't be installed or started is reported as missing, and the others are measured.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from environments import PeerMissing
from groups import IMPLEMENTATIONS, OURS_SYMMETRIC, Group, GroupFailed
from report import Result, describe_machine, format_table, list_of, result_row, write_json_lines
from targets import OUR_NAMES, SIZES, TARGETS, Target, judge

from flagcx.arguments import format_nbytes
from flagcx.cli.sizes import parse_nbytes

COLLECTIVES = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall")
SAMPLE_S = 0.03
"""How long a batch should take, in seconds: long enough for ranks that share a core to take turns."""

LARGE = 16 << 20
"""From here on, in bytes, a round is slow enough for fewer rounds to do."""


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """How much is measured.

    Attributes:
        launches: How often every library is started afresh.
        rounds: Rounds for each launch and size below ``LARGE``.
        rounds_large: Rounds for each launch and larger size.
    """

    launches: int
    rounds: int
    rounds_large: int

    def rounds_for(self, nbytes: int) -> int:
        """Rounds of one launch for messages of ``nbytes``."""
        return self.rounds if nbytes < LARGE else self.rounds_large


FULL, QUICK = (
    TimeBudget(launches=3, rounds=7, rounds_large=3),
    TimeBudget(launches=1, rounds=7, rounds_large=3),
)


@dataclass
class Samples:
    """What the rounds with one number of ranks have brought so far.

    Attributes:
        seconds: (implementation, size) -> seconds a call, for each round.
        wrong: (implementation, size) -> wrong elements so far.
        startups: Implementation -> seconds of each start.
        versions: Implementation -> its versions.
        troubles: What is missing or went wrong, and why.
    """

    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    startups: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)

    def results(self, ranks: int) -> list[Result]:
        """The statistics, by size and then in the order of the implementations."""
        names = list(IMPLEMENTATIONS)
        keys = sorted(self.seconds, key=lambda key: (key[1], names.index(key[0])))
        return [
            Result.of(name, ranks, size, self.seconds[name, size], self.wrong[name, size])
            for name, size in keys
        ]


def measure(
    names: Sequence[str], ranks: int, sizes: Sequence[int], pace: TimeBudget, collective: str = "allreduce"
) -> Samples:
    """Measures implementations against each other.

    Args:
        names: Which implementations.
        ranks: How many ranks each has.
        sizes: Messages, in bytes.
        pace: How much is measured.
        collective: What is called; of blocks of so many bytes, where ranks have one for each.

    Returns:
        All samples.
    """
    samples = Samples()
    for launch in range(pace.launches):
        with launched(names, ranks, samples) as groups:
            for size in sizes:
                _say(f"{ranks} ranks, start {launch + 1} of {pace.launches}, {format_nbytes(size)}")
                blocks = 1 if collective in ("allreduce", "broadcast") else 3 * ranks
                if _fits(len(groups) * ranks * blocks * size):
                    _measure_size(groups, collective, size, pace.rounds_for(size), samples)
                else:
                    samples.troubles[format_nbytes(size)] = "left out: not enough memory is available"
    return samples


@contextmanager
def launched(names: Sequence[str], ranks: int, samples: Samples) -> Iterator[list[Group]]:
    """All implementations that come up; what keeps one from it goes to ``samples.troubles``."""
    groups = []
    with ExitStack() as stack:
        for name in names:
            _say(f"starting {name} with {ranks} ranks")
            try:
                group = Group(IMPLEMENTATIONS[name], ranks)
            except (PeerMissing, GroupFailed) as trouble:
                samples.troubles[name] = f"missing: {trouble}"
                continue
            groups.append(group)
            stack.callback(_close, group, samples)
            samples.startups[name].append(group.startup_s)
            samples.versions[name] = group.versions
        yield groups


def _close(group: Group, samples: Samples) -> None:
    left = group.close()
    if left:
        samples.troubles[group.name] = f"left {len(left)} file(s) in /dev/shm, now removed: {left[0]}"


def _measure_size(groups: list[Group], collective: str, size: int, rounds: int, samples: Samples) -> None:
    """Lets the groups take turns at one size; one that fails leaves ``groups`` for good."""
    calls: dict[str, int] = {}
    for group in list(groups):
        with _without_the_failed(group, groups, samples):
            group.order("prepare", count=size // 4, collective=collective)
            calls[group.name] = _calls_for_a_batch(group)
    for turn in range(rounds):
        for group in random.Random(turn).sample(groups, len(groups)):
            with _without_the_failed(group, groups, samples):
                wrong = group.order("verify")
                batch = group.order("sample", calls=calls[group.name], warmup=min(calls[group.name] // 2, 20))
                samples.wrong[group.name, size] += sum(answer["wrong"] for answer in wrong)
                samples.seconds[group.name, size].append(max(answer["seconds"] for answer in batch))
    for group in list(groups):
        with _without_the_failed(group, groups, samples):
            group.order("release")


def _calls_for_a_batch(group: Group) -> int:
    """How many calls a batch has, found with batches that grow until one is long enough to tell."""
    for calls in (1, 4, 16, 64, 256):
        seconds = max(answer["seconds"] for answer in group.order("sample", calls=calls, warmup=calls // 2))
        if calls * seconds > SAMPLE_S / 5:
            break
    return max(1, math.ceil(SAMPLE_S / seconds))


@contextmanager
def _without_the_failed(group: Group, groups: list[Group], samples: Samples) -> Iterator[None]:
    try:
        yield
    except GroupFailed as trouble:
        samples.troubles[group.name] = f"failed: {trouble}"
        groups.remove(group)


def _fits(nbytes: int) -> bool:
    """Whether all ranks' messages fit in memory at once, with as much again for the libraries' own."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return 2 * nbytes < available


def format_results(results: Sequence[Result], targets: Sequence[Target] = TARGETS) -> str:
    """The results as a table: times in us, and for each peer how many times ours its median is."""
    verdicts = {(v.peer, v.ours.implementation): v for v in judge(results, targets)}
    header = ["size", "implementation", "median us", "p25", "p75", "min", "rounds", "wrong"]
    for name in OUR_NAMES:
        header += [f"/ {name}", "target", ""]
    rows = []
    for result in results:
        times = (result.median_us, result.p25_us, result.p75_us, result.min_us)
        row = [format_nbytes(result.nbytes), result.implementation, *(f"{time_us:.1f}" for time_us in times)]
        row += [str(result.rounds), str(result.wrong)]
        for name in OUR_NAMES:
            verdict = verdicts.get((result, name))
            least = verdict and verdict.least
            row += [f"{verdict.ratio:.2f}" if verdict else "", f"{least:g}" if least else ""]
            row += [verdict.word if verdict else ""]
        rows.append(row)
    return format_table(header, rows)


def format_summary(samples: Samples) -> str:
    """One line for each implementation: how fast it starts, its versions; then what went wrong."""
    lines = [
        f"{name}: {min(samples.startups[name]):.2f} s from start to first allreduce; "
        + ", ".join(f"{key} {value}" for key, value in versions.items())
        for name, versions in samples.versions.items()
    ]
    return "\n".join([*lines, *(f"{name}: {trouble}" for name, trouble in samples.troubles.items())])


def _say(text: str) -> None:
    """Tells on stderr what is going on, on one line that's written over where it's a terminal."""
    ending = "\r" if sys.stderr.isatty() else "\n"
    print(f"{text:<79}", end=ending, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a target is missed or a result is wrong."""
    options = _parse(arguments)
    start = time.monotonic()
    machine = describe_machine()
    print(
        "{collective} float32, on {cpu}, {cores} cores, {system}".format(
            **machine, collective=options.collective
        )
    )
    results: list[Result] = []
    targets = TARGETS if options.collective == "allreduce" else ()
    for ranks in options.ranks:
        samples = measure(
            options.implementations,
            ranks,
            options.sizes,
            QUICK if options.quick else FULL,
            options.collective,
        )
        new = samples.results(ranks)
        print(f"\n{ranks} ranks\n{format_results(new, targets)}\n\n{format_summary(samples)}", flush=True)
        if options.json:
            versions = samples.versions
            rows = (result_row(one, versions[one.implementation], options.collective) for one in new)
            write_json_lines(options.json, rows)
        results += new
    verdicts = [verdict for verdict in judge(results, targets) if verdict.least is not None]
    missed = sum(not verdict.passed for verdict in verdicts)
    wrong = sum(result.wrong for result in results)
    print(
        f"\n{len(verdicts) - missed} of {len(verdicts)} targets reached, {wrong} wrong elements, "
        f"{time.monotonic() - start:.0f} s"
    )
    return int(bool(missed or wrong))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=list_of(int), default=[2, 4], help="numbers of ranks; default 2,4")
    parser.add_argument("--sizes", type=list_of(parse_nbytes), default=list(SIZES), help="such as 1K,16K,64M")
    parser.add_argument("--collective", choices=COLLECTIVES, default="allreduce", help="default allreduce")
    parser.add_argument(
        "--implementations",
        type=list_of(str),
        default=list(IMPLEMENTATIONS),
        help=f"some of {','.join(IMPLEMENTATIONS)}",
    )
    parser.add_argument("--quick", action="store_true", help="start once, with fewer rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append the results there, one a line")
    options = parser.parse_args(arguments)
    if options.collective != "allreduce":  # what gloo and comm.empty are compared by
        options.implementations = [n for n in options.implementations if n not in ("gloo", OURS_SYMMETRIC)]
    unknown = [name for name in options.implementations if name not in IMPLEMENTATIONS]
    if unknown:
        parser.error(f"no implementation {unknown[0]!r}: choose from {', '.join(IMPLEMENTATIONS)}")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the ranks are ended in any case
    sys.exit(main())
