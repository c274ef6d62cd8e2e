"""What the facade adds to a call that repeats: its time beside that of its plan, and its Python calls.

flagcx run -n 2 bench/facade_cost.py [--calls]

Times are medians over batches in which the call and its plan take turns, so that drift of the machine hits
both. ``--calls`` lists the Python functions of the package that one call runs through, and their files.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import flagcx as fc

BATCHES, CALLS, NBYTES = 15, 2000, 1 << 10
PACKAGE = str(Path(fc.__file__).parent)

Call = Callable[[], object]


def calls_of(
    comm: fc.Communicator, nbytes: int
) -> dict[str, tuple[Call, Callable[[Callable[..., object]], Call] | None]]:
    """The calls by name, each with how its plan is run alone; None where it has no single plan."""
    x, y = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    blocks = np.zeros((comm.size, x.size), np.float32)
    many = [np.zeros(x.size, np.float32) for _ in range(100)]

    def runs(sendbuf: object, recvbuf: object) -> Callable[[Callable[..., object]], Call]:
        return lambda run: lambda: run(sendbuf, recvbuf)

    return {
        "allreduce": (lambda: comm.allreduce(x), runs(x, x)),
        "allreduce out=": (lambda: comm.allreduce(x, out=y), runs(x, y)),
        "allgather out=": (lambda: comm.allgather(x, out=blocks), runs(x, blocks)),
        "reduce_scatter out=": (lambda: comm.reduce_scatter(blocks, out=x), runs(blocks, x)),
        "broadcast": (lambda: comm.broadcast(x), runs(None if comm.rank else x, x)),
        "allreduce ring": (lambda: comm.allreduce(x, algorithm=fc.Algorithm.RING), runs(x, x)),
        "allreduce int8": (lambda: comm.allreduce(x, compression="int8"), None),
        "allreduce of 100": (lambda: comm.allreduce(many), None),
    }


def plan_of(comm: fc.Communicator, call: Call) -> Callable[..., object]:
    """Runs the plan to which a call goes straight when it repeats."""
    quick = comm._host.quick
    quick.clear()
    call()
    (found,) = quick.values()
    return found.run if hasattr(found, "sends") else found


def time_us(comm: fc.Communicator, call: Call, calls: int) -> float:
    """Microseconds a call, over one batch that all ranks begin together."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def functions_of(call: Call) -> list[tuple[str, str]]:
    """The functions of the package that one call runs, each with its file."""
    seen: list[tuple[str, str]] = []

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            seen.append((path[len(PACKAGE) + 1 :], frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def main() -> None:
    """Prints a row for each call on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", action="store_true", help="list the Python functions of each call")
    parser.add_argument("--nbytes", type=int, default=NBYTES, help="bytes of the array, default %(default)s")
    asked = parser.parse_args()
    comm = fc.init()
    for name, (call, alone) in calls_of(comm, asked.nbytes).items():
        for _ in range(5):
            call()
        facade, bare = [], []
        plan = None if alone is None else alone(plan_of(comm, call))
        few = CALLS if plan else CALLS // 10
        for _ in range(BATCHES):
            facade.append(time_us(comm, call, few))
            bare.append(0.0 if plan is None else time_us(comm, plan, few))
        seen = functions_of(call)
        if comm.rank:
            continue
        whole, without = statistics.median(facade), statistics.median(bare)
        added = "" if plan is None else f", its plan {without:7.2f} us, facade {whole - without:5.2f} us"
        files = len({path for path, _ in seen})
        print(f"{name:20} {whole:8.2f} us{added}; {len(seen)} Python calls in {files} files")
        for path, function in seen if asked.calls else ():
            print(f"    {path}: {function}")


if __name__ == "__main__":
    main()
