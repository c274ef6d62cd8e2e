"""What compression gains on slow links, and what it costs: all-reduces of 64 MiB beside the dense one.

    python bench/compression.py                                     # 2 and 4 ranks, three links, all codecs
    python bench/compression.py --gpu                               # how fast the GPU codes
    python bench/compression.py --ranks 2 --links 0.125 --codecs int8,topk --json bench/results/it.jsonl

The slow links are imitated (FLAGCX_THROTTLE): each call takes bytes / bandwidth, in which the core is free.
"+" behind a codec is error feedback. Every result is compared with the exact sum (the error is a norm over
a norm; large ones are in the nature of codecs that leave out what the next step adds) and between the
ranks, bit by bit. Goals, in times faster than dense: at 100 Mbit/s int8 3 and topk 10, at 1 Gbit/s 2 and 4;
and on shared memory "auto" must decline.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from report import format_table, list_of, write_json_lines

import flagcx as fc
from flagcx.cli.sizes import parse_nbytes
from flagcx.compression import catalogue
from flagcx.compression.link import measure_speed
from flagcx.topology.speeds import memory_gb_per_s

LINKS = ("0.0125", "0.125", "")
NAMES = {"0.0125": "100 Mbit/s", "0.125": "1 Gbit/s", "": "shared memory"}
CODECS = ("fp16", "bf16", "fp8", "int8", "int4", "int4+", "topk", "topk+", "randomk+", "powersgd+", "auto")
GOALS = {
    ("0.0125", "int8"): 3.0,
    ("0.0125", "topk"): 10.0,
    ("0.0125", "topk+"): 10.0,
    ("0.125", "int8"): 2.0,
    ("0.125", "topk"): 4.0,
    ("0.125", "topk+"): 4.0,
}


@dataclass(frozen=True)
class Row:
    """One codec over one link.

    Attributes:
        ranks, link, codec, nbytes: What was measured.
        time_ms: Median over the calls of the slowest rank.
        least_ms, most_ms: The spread.
        speedup: How many times faster than the dense all-reduce of the same run.
        error: Distance from the exact sum, over its norm.
        equal: Whether all ranks had the same bits.
        said: The reason, for "auto".
    """

    ranks: int
    link: str
    codec: str
    nbytes: int
    time_ms: float
    least_ms: float
    most_ms: float
    speedup: float
    error: float
    equal: bool
    said: str = ""

    @property
    def goal(self) -> float | None:
        """How much faster it should be, if that was said."""
        return GOALS.get((self.link, self.codec))


def measure(link: str, codecs: Sequence[str], nbytes: int, rounds: int) -> list[Row]:
    """What every rank does."""
    comm = fc.init(throttle=link, tuning=False)
    count = nbytes // 4
    inputs = [np.random.default_rng([7, q]).standard_normal(count, np.float32) for q in range(comm.size)]
    exact = np.sum(inputs, axis=0, dtype=np.float32)
    own, norm = inputs[comm.rank].copy(), float(np.linalg.norm(exact))
    del inputs
    x, out = own.copy(), np.empty_like(own)
    rows: list[Row] = []
    for codec in ("dense", *codecs):
        option = _option(codec)
        times, result = [], out
        for _ in range(rounds + 2):
            np.copyto(x, own)
            comm.barrier()
            start = time.perf_counter()
            comm.allreduce(x, out=out, compression=option)
            times.append(max(comm.allgather_object(time.perf_counter() - start)) * 1e3)
        digests = comm.allgather_object(hashlib.sha256(result.tobytes()).hexdigest())
        error = float(np.linalg.norm(result - exact)) / norm
        timed = times[2:]
        dense = rows[0].time_ms if rows else median(timed)
        said = comm.explain_compression(x, option).reason if codec == "auto" else ""
        rows.append(
            Row(
                comm.size, link, codec, nbytes, median(timed), min(timed), max(timed),
                dense / median(timed), error, len(set(digests)) == 1, said,
            )
        )  # fmt: skip
    return rows


def _option(codec: str):
    if codec == "dense":
        return None
    return fc.compression.Feedback(codec[:-1])[0] if codec.endswith("+") else codec


def format_rows(rows: Sequence[Row]) -> str:
    """The table of one link."""
    header = ["codec", "ms", "least", "most", "times faster", "goal", "error", "ranks"]
    lines = []
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:g} " + ("ok" if row.speedup >= row.goal else "MISSED")
        numbers = [f"{t:.1f}" for t in (row.time_ms, row.least_ms, row.most_ms)]
        equal = "equal" if row.equal else "DIFFER"
        lines.append([row.codec, *numbers, f"{row.speedup:.2f}", goal, f"{row.error:.2g}", equal])
    return format_table(header, lines)


def format_speeds(device: bool = False) -> str:
    """How fast one core, or the current GPU, does its part of an all-reduce on two ranks, of all codecs.

    Those that need error feedback are measured with it, as the catalogue's figures are.
    """
    memory = memory_gb_per_s(_capability()) if device else 0.0
    rows = []
    for name, entry in catalogue().items():
        count = 1 << 24 if device else 1 << 18
        speed = measure_speed(entry.codec, device, feedback=entry.needs_feedback, count=count)
        nominal = entry.device_gb_per_s(memory) if device else entry.host_gb_per_s
        rows.append([name, f"{entry.ratio:.4f}", f"{speed:.2f}", f"{nominal:.2f}"])
    return format_table(["codec", "bytes / dense", "GB/s", "catalogue"], rows)


def _capability() -> int:
    import cupy

    return int(cupy.cuda.Device().compute_capability)


def main(given: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a goal is missed."""
    options = _parse(given)
    where = "this GPU, 64 MiB" if options.gpu else "one core, 1 MiB"
    print(f"{where}, all that a rank does in an all-reduce but for sending\n{format_speeds(options.gpu)}")
    if options.gpu:
        return 0
    missed = 0
    for ranks in options.ranks:
        for link in options.links:
            arguments = (link, options.codecs, options.size, options.rounds)
            rows = fc.launch(measure, ranks, arguments, timeout_s=1200)[0]
            name = NAMES.get(link, f"{link} GB/s")
            print(f"\n{name}, {ranks} ranks, {options.size >> 20} MiB of float32\n{format_rows(rows)}")
            for row in rows:
                missed += not row.equal or (row.goal is not None and row.speedup < row.goal)
                if row.said:
                    print(f"auto: {row.said}", flush=True)
            if options.json:
                write_json_lines(options.json, (asdict(row) for row in rows))
    return int(bool(missed))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=list_of(int), default=[2, 4])
    parser.add_argument("--links", type=lambda s: s.split(","), default=list(LINKS), help="GB/s; '' for none")
    parser.add_argument("--codecs", type=list_of(str), default=list(CODECS))
    parser.add_argument("--gpu", action="store_true", help="only the codecs' speeds on the current GPU")
    parser.add_argument("--size", type=parse_nbytes, default=64 << 20, help="bytes; default 64M")
    parser.add_argument("--rounds", type=int, default=3, help="calls that count; default 3")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append the results there, one a line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
