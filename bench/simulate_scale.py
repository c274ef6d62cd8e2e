"""What it takes to simulate all-reduces of many ranks: CPU time and memory, each in a process of its own.

python bench/simulate_scale.py [--ranks 1000,10000,100000] [--topology dgx-h100] [--out PATH]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ALGORITHMS = ("ring", "double_binary_tree", "hierarchical")
NBYTES = 1 << 30


def once(topology: str, ranks: int, algorithm: str) -> dict:
    """Simulates one all-reduce, as ``flagcx simulate`` does; with what this process has spent on it."""
    from flagcx.cost.model import model_of
    from flagcx.selection.candidates import candidates
    from flagcx.topology import machine_for

    machine = machine_for(topology, ranks)
    model = model_of(machine, ranks)
    known = candidates("allreduce", ranks, machine, model.gpus)
    candidate = [one for one in known if one.algorithm == algorithm][-1]
    timing = model.timing("allreduce", candidate, NBYTES)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {
        "algorithm": algorithm, "ranks": ranks, "topology": machine.name, "nbytes": NBYTES,
        "time_us": round(timing.time_us, 1), "steps": timing.steps,
        "cpu_s": round(time.process_time(), 2), "memory_gb": round(peak, 2),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1000,10000,100000")
    parser.add_argument("--topology", default="dgx-h100")
    parser.add_argument("--out", type=Path, metavar="PATH", help="append the results there, one a line")
    parser.add_argument("--once", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.once:
        print(json.dumps(once(given.topology, int(given.once[0]), given.once[1])))
        return 0
    from report import write_json_lines

    rows = []
    print(f"{'algorithm':20} {'ranks':>8} {'steps':>8} {'time us':>14} {'CPU s':>8} {'GB':>6}", flush=True)
    for ranks in given.ranks.split(","):
        for algorithm in ALGORITHMS:
            command = [sys.executable, __file__, "--topology", given.topology, "--once", ranks, algorithm]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            rows.append(row)
            print(
                f"{algorithm:20} {row['ranks']:8} {row['steps']:8} {row['time_us']:14.1f} "
                f"{row['cpu_s']:8.2f} {row['memory_gb']:6.2f}",
                flush=True,
            )
    if given.out:
        write_json_lines(given.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
