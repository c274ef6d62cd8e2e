"""A job that lives: mixed calls of ever new sizes, verified, with memory, descriptors and threads sampled.

flagcx run -n 4 bench/soak.py --calls 1000000 [--seconds 230] [--out bench/results/soak.jsonl]

Every rank draws the same calls. The tail of the latencies is explained by what each rank did meanwhile, in a
call or before it came to it: the time in which Python's garbage collector ran on some rank (ever new sizes
make ever new plans, of 16 to 33 objects each that it visits), and that in which a rank was ready to run and
another process had the core (``/proc/thread-self/schedstat``), of the rank that lost most. The rest is the
library's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import versions
from report import write_json_lines

import flagcx as fc

LONGEST = 1 << 16
SAMPLES = 64
WARM = 0.25
"""The part of the job in which caches fill; what comes after must be flat."""
SLOW_FACTOR = 20
"""A call that takes so many medians is slow."""
MOST_GROWN_KB, MOST_PAUSES, LEAST_PAUSE_US = 16 << 10, 20_000, 300.0

Call = Callable[[int, np.random.Generator], Generator[Callable[[], Any], Any, None]]
"""One call of about so many elements: yields what makes it; then, sent its result, whether that is right."""


def calls_of(comm: fc.Communicator) -> list[tuple[float, Call]]:
    """The calls, each with its share."""
    size, rank = comm.size, comm.rank
    x, out = np.empty(2 * LONGEST * size, np.float32), np.empty(2 * LONGEST * size, np.float32)
    whole, halves = np.empty(LONGEST, np.int64), np.empty(LONGEST, np.float16)
    mapped = comm.empty(LONGEST, np.float32)
    total = size * (size + 1) // 2

    def allreduce(n, rng):
        array = (x, whole, halves, mapped)[rng.integers(4)][:n]
        op = ("sum", "max", "avg")[rng.integers(3)]
        array[...] = rank + 1
        yield partial(comm.allreduce, array, op)
        mean = total // size if array.dtype == np.int64 else total / size
        yield (array == {"sum": total, "max": size, "avg": mean}[op]).all()

    def named(n, rng):
        algorithm = ("ring", "tree", "double_binary_tree", "recursive_doubling")[rng.integers(4)]
        x[:n] = rank + 1
        yield (yield partial(comm.allreduce, x[:n], algorithm=algorithm)) == total

    def broadcast(n, rng):
        root = int(rng.integers(size))
        x[:n] = rank
        yield (yield partial(comm.broadcast, x[:n], root)) == root

    def reduce(n, rng):
        root = int(rng.integers(size))
        x[:n] = rank + 1
        found = yield partial(comm.reduce, x[:n], root=root)
        yield rank != root or found == total

    def allgather(n, rng):
        x[:n] = rank
        found = yield partial(comm.allgather, x[:n])
        yield found.reshape(size, n) == np.arange(size)[:, None]

    def reduce_scatter(n, rng):
        x[: size * n] = rank + 1
        yield (yield partial(comm.reduce_scatter, x[: size * n])) == total

    def alltoall(n, rng):
        x[: size * n] = rank
        found = yield partial(comm.alltoall, x[: size * n])
        yield found.reshape(size, n) == np.arange(size)[:, None]

    def uneven(n, rng):
        counts = [n + q for q in range(size)]
        x[: n + rank] = rank
        found = yield partial(comm.allgatherv, x[: n + rank], counts, out=out[: sum(counts)])
        yield found == np.repeat(np.arange(size), counts)

    def neighbours(n, rng):
        before = (rank - 1) % size
        x[:n] = rank
        found = yield partial(comm.sendrecv, x[:n], (rank + 1) % size, out[:n], before)
        yield found == before

    def some(n, rng):
        arrays = [x[:n], out[: n % 977 + 1], halves[:3]]
        for array in arrays:
            array[...] = rank + 1
        yield partial(comm.allreduce, arrays) if n % 2 else partial(in_group, arrays)
        yield all((array == total).all() for array in arrays)

    def in_group(arrays):
        with comm.group():
            for array in arrays:
                comm.allreduce(array)

    def started(n, rng):
        x[:n] = rank + 1
        yield (yield lambda: comm.allreduce(x[:n], async_op=True).wait()) == total

    def compressed(n, rng):
        x[:n] = rank + 1
        yield (yield partial(comm.allreduce, x[:n], compression="fp16")) == total

    def thing(n, rng):
        found = yield partial(comm.broadcast_object, {"n": n, "text": "x" * (n % 1000)}, 0)
        yield found["n"] == n

    def barrier(n, rng):
        yield comm.barrier
        yield True

    shares = {
        allreduce: 30, named: 8, broadcast: 9, reduce: 6, allgather: 9, reduce_scatter: 9, alltoall: 6,
        uneven: 4, neighbours: 6, some: 3, started: 2, compressed: 2, thing: 2, barrier: 4,
    }  # fmt: skip
    return [(share / sum(shares.values()), call) for call, share in shares.items()]


@dataclass
class Samples:
    """What the process held, now and then.

    Attributes:
        at: The call at which each sample was taken.
        resident_kb: Memory in use, in KiB, without that of shared memory that others wrote.
        descriptors: Open descriptors.
        threads: Threads.
    """

    at: list[int] = field(default_factory=list)
    resident_kb: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def take(self, call: int) -> None:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        self.at.append(call)
        self.resident_kb.append(int(status.split("RssAnon:")[1].split()[0]))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))
        self.threads.append(threading.active_count())

    def grown(self) -> dict[str, int]:
        """By how much each grew after the caches were full: the most of the second half over the first."""
        warm = max(int(len(self.at) * WARM), 1)
        middle = (warm + len(self.at)) // 2
        figures = {
            "resident_kb": self.resident_kb,
            "descriptors": self.descriptors,
            "threads": self.threads,
        }
        return {name: max(v[middle:]) - max(v[warm : middle + 1]) for name, v in figures.items()}


class Pauses:
    """When this rank could not go on for a while, of itself.

    Attributes:
        lost: From when to when (ns), and for how long (us) of it, the rank was ready to run and had no core.
        collected: From when to when (ns) the garbage collector ran.
    """

    def __init__(self) -> None:
        self.lost: list[tuple[int, int, float]] = []
        self.collected: list[tuple[int, int]] = []
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._seen_at, self._waited_us, self._begun = time.monotonic_ns(), self._waited(), 0
        gc.callbacks.append(self._collects)

    def _waited(self) -> float:
        return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e3

    def look(self) -> None:
        """Notes how long the rank had no core since it looked last."""
        now, waited_us = time.monotonic_ns(), self._waited()
        if waited_us - self._waited_us > LEAST_PAUSE_US and len(self.lost) < MOST_PAUSES:
            self.lost.append((self._seen_at, now, waited_us - self._waited_us))
        self._seen_at, self._waited_us = now, waited_us

    def _collects(self, phase: str, info: dict) -> None:
        now = time.monotonic_ns()
        if phase == "start":
            self._begun = now
        elif now - self._begun > 1e3 * LEAST_PAUSE_US and len(self.collected) < MOST_PAUSES:
            self.collected.append((self._begun, now))

    def close(self) -> None:
        """Looks no more."""
        gc.callbacks.remove(self._collects)
        os.close(self._schedstat)


def soak(comm: fc.Communicator, calls: int, seconds: float, seed: int) -> dict[str, object]:
    """Makes the calls and returns this rank's figures; all ranks make as many."""
    rng = np.random.default_rng(seed)
    shares, functions = zip(*calls_of(comm), strict=True)
    bounds = np.cumsum(shares)
    latency_us = np.full(calls, 0.0, np.float32)  # in memory from the start, which is compared
    slow: list[tuple[int, int]] = []
    samples, wrong, end = Samples(), 0, time.monotonic() + seconds
    pauses, typical_us, made = Pauses(), 1e9, calls
    for number in range(calls):
        if number % max(calls // SAMPLES, 1) == 0:
            samples.take(number)
            typical_us = float(np.median(latency_us[:number])) if number else typical_us
            if comm.broadcast_object(time.monotonic() > end, 0):
                made = number
                break
            comm.barrier()  # else the first call waits for ranks that still take their sample, which is slow
        call = functions[min(int(np.searchsorted(bounds, rng.random())), len(functions) - 1)]
        count = int(2 ** rng.uniform(0, 10 if rng.random() < 0.97 else np.log2(LONGEST)))
        steps = call(count, rng)
        run = next(steps)
        pauses.look()
        start = time.monotonic_ns()
        result = run()
        stop = time.monotonic_ns()
        pauses.look()
        latency_us[number] = (stop - start) / 1e3
        wrong += not np.all(steps.send(result))
        if latency_us[number] > SLOW_FACTOR * typical_us and len(slow) < MOST_PAUSES:
            slow.append((start, stop))
    pauses.close()
    samples.take(made)
    held = {"lost": pauses.lost, "collected": pauses.collected}
    return {"latency_us": latency_us[:made], "slow": slow, "samples": samples, "wrong": wrong, **held}


def tail(ranks: list[dict]) -> dict[str, float]:
    """What rank 0's slow calls are made of, as parts of their time; the rest of each in us."""
    taken = collected = without_core = 0.0
    own = []
    for start, stop in ranks[0]["slow"]:
        whole = (stop - start) / 1e3
        mine = _covered([one for rank in ranks for one in rank["collected"]], start, stop)
        lost = min(max(_lost(rank["lost"], start, stop) for rank in ranks), whole - mine)
        taken, collected, without_core = taken + whole, collected + mine, without_core + lost
        own.append(whole - mine - lost)
    return {
        "slow_calls": len(own),
        "part_of_garbage_collection": round(collected / taken, 3) if taken else 0.0,
        "part_without_a_core": round(without_core / taken, 3) if taken else 0.0,
        "own_median_us": round(sorted(own)[len(own) // 2], 1) if own else 0.0,
    }


def _covered(spans: list[tuple[int, int]], start: int, stop: int) -> float:
    """How much of a time lies in some of these spans, in us."""
    covered, at = 0, start
    for begin, end in sorted(span for span in spans if span[1] > start and span[0] < stop):
        covered += max(0, min(end, stop) - max(begin, at))
        at = max(at, min(end, stop))
    return covered / 1e3


def _lost(spans: list[tuple[int, int, float]], start: int, stop: int) -> float:
    """How long a rank had no core within a time, in us: what was lost in a span is spread over it evenly."""
    return sum(
        us * (min(end, stop) - max(begin, start)) / (end - begin)
        for begin, end, us in spans
        if end > start and begin < stop
    )


def report(ranks: list[dict], seconds: float) -> dict[str, object]:
    """The figures of all ranks: latencies of rank 0, and the most that any rank grew by."""
    quantiles = np.percentile(ranks[0]["latency_us"], (50, 99, 99.9, 100))
    grown = [one["samples"].grown() for one in ranks]
    return {
        "bench": "soak",
        "ranks": len(ranks),
        "calls": len(ranks[0]["latency_us"]),
        "seconds": round(seconds, 1),
        "wrong": sum(one["wrong"] for one in ranks),
        **{
            name: round(float(q), 1)
            for name, q in zip(("median_us", "p99_us", "p999_us", "worst_us"), quantiles, strict=True)
        },
        **tail(ranks),
        "grown": {name: max(g[name] for g in grown) for name in grown[0]},
        "resident_kb": ranks[0]["samples"].resident_kb[:: SAMPLES // 8],
        "descriptors": ranks[0]["samples"].descriptors[:: SAMPLES // 8],
        "threads": ranks[0]["samples"].threads[:: SAMPLES // 8],
        "load": os.getloadavg()[0],
        "versions": versions(flagcx=fc.__version__),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1e6, help="end after so many, whatever was done")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the result as a line of JSON")
    options = parser.parse_args()
    comm = fc.init()
    start = time.monotonic()
    ranks = comm.gather_object(soak(comm, options.calls, options.seconds, options.seed), 0)
    if comm.rank:
        return 0
    found = report(ranks, time.monotonic() - start)
    print(json.dumps(found))
    if options.out:
        write_json_lines(options.out, [found])
    grown = found["grown"]
    flat = grown["resident_kb"] < MOST_GROWN_KB and grown["descriptors"] <= 1 and grown["threads"] <= 1
    print("flat, and all results right" if flat and not found["wrong"] else "NOT flat, or WRONG results")
    return 0 if flat and not found["wrong"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
