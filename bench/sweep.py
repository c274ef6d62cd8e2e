"""Times one collective of flagcx over a range of sizes and prints the table of nccl-tests.

    flagcx run -n 4 bench/sweep.py
    flagcx run -n 4 bench/sweep.py --collective reduce_scatter --begin 1K --end 64M --factor 4
    flagcx run -n 2 bench/sweep.py --dtype float16 --op max --algorithm ring --json bench/results/ring.jsonl
    mpirun -n 4 python bench/sweep.py

Each time is the median over several rounds; a round is a batch of calls after a barrier and counts with
its slowest rank. Each size begins with a call on fresh data, whose result is compared with NumPy's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from nccl_table import Row, Timing, footer, format_row, header, sizes
from oracle import Buffers, Message, has_place, storage_count
from report import parse_size, write_json_lines

import flagcx as fc
from flagcx.collectives import COLLECTIVES
from flagcx.dtypes import OPS, dtype_of, resolve_op

BATCH_S = 0.02
"""How long a batch should take, in seconds."""

NAMES = tuple(name for name in COLLECTIVES if name != "barrier")


def bind(comm: Any, message: Message, buffers: Buffers, in_place: bool, algorithm: str | None) -> Callable:
    """One call of the collective on the given buffers, without arguments."""
    name, given, got = message.collective, buffers.given, buffers.got
    options: dict[str, Any] = {"algorithm": algorithm}
    if message.op is not None:
        options["op"] = message.op
    if message.root is not None:
        options["root"] = message.root
    in_place_by_default = name == "broadcast" or (in_place and name in ("allreduce", "reduce"))
    if not in_place_by_default:
        options["out"] = got
    method = getattr(comm, name)
    first = got if name == "broadcast" else given
    return lambda: method(first, **options)


def time_calls(comm: Any, call: Callable, rounds: int) -> float:
    """The time of a call in us: the median over the rounds, each with its slowest rank."""

    def batch(calls: int) -> float:
        seconds = harness.time_batch(call, comm.barrier, calls, warmup=min(calls, 20))
        return float(comm.allreduce(np.array([seconds]), op="max")[0])

    calls = 1
    while (seconds := batch(calls)) * calls < BATCH_S / 5 and calls < 1024:
        calls *= 4
    calls = max(1, math.ceil(BATCH_S / seconds))
    return 1e6 * statistics.median(batch(calls) for _ in range(rounds))


def measure(
    comm: Any, message: Message, storage: np.ndarray, in_place: bool, algorithm: str | None, rounds: int
) -> Timing:
    """Verifies one call on fresh data, then times calls on zeros, which never overflow."""
    buffers = Buffers(message, comm.rank, storage, in_place)
    call = bind(comm, message, buffers, in_place, algorithm)
    buffers.fill()
    call()
    wrong = comm.allreduce(np.array([buffers.count_wrong()]))
    storage.view(np.uint8)[:] = 0
    return Timing(time_calls(comm, call, rounds), int(wrong[0]))


def sweep(comm: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Measures every size, smallest first."""
    kind, dtype = COLLECTIVES[options.collective], dtype_of(options.dtype)
    op = resolve_op(options.op, dtype) if kind.reduces else None
    root = options.root if kind.rooted else None
    for nbytes in sizes(options.begin, options.end, options.factor):
        count = nbytes // dtype.numpy.itemsize // (comm.size if kind.blocks else 1)
        message = Message(options.collective, comm.size, root, count, dtype, op)
        length = storage_count(message, comm.rank)
        storage = comm.empty(length, dtype.numpy) if options.symmetric else np.empty(length, dtype.numpy)
        out_of_place, in_place = (
            measure(comm, message, storage, place, options.algorithm, options.rounds) if has else None
            for place, has in zip((False, True), has_place(message), strict=True)
        )
        yield Row(
            collective=options.collective,
            size=comm.size,
            nbytes=message.nbytes,
            count=count,
            dtype=dtype.name,
            op=op.name if op else "none",
            root=-1 if root is None else root,
            out_of_place=out_of_place,
            in_place=in_place,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a result is wrong."""
    options = parse(arguments)
    rows = []
    with fc.init() as comm:
        first = comm.rank == 0
        if first:
            memory = "arrays of comm.empty" if options.symmetric else "NumPy arrays"
            algorithm = options.algorithm or "chosen by flagcx"
            print(f"# {options.collective}, {comm.size} ranks, {memory}, algorithm {algorithm}")
            print(header(), flush=True)
        for row in sweep(comm, options):
            rows.append(row)
            if first:
                print(format_row(row), flush=True)
        if first:
            print(footer(rows), flush=True)
            if options.json:
                further = {"algorithm": options.algorithm, "symmetric": options.symmetric}
                versions = {"versions": harness.versions(flagcx=harness.version_of("flagcx"))}
                write_json_lines(options.json, ({**row.as_json(), **further, **versions} for row in rows))
    return int(any(timing.wrong for row in rows for timing in row.timings))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collective", choices=NAMES, default="allreduce")
    parser.add_argument("--begin", type=parse_size, default="8", metavar="SIZE", help="default 8 bytes")
    parser.add_argument("--end", type=parse_size, default="64M", metavar="SIZE", help="default 64M")
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next; default 4")
    parser.add_argument("--dtype", default="float32", help="default float32")
    parser.add_argument("--op", choices=tuple(OPS), default="sum")
    parser.add_argument("--root", type=int, default=0)
    parser.add_argument("--algorithm", help="the choice is flagcx's own by default")
    parser.add_argument("--symmetric", action="store_true", help="use arrays of comm.empty")
    parser.add_argument("--rounds", type=int, default=7, help="for each time; default 7")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append the rows there, one a line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
