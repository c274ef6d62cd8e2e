"""Injects faults into jobs, and prints what came of it for each transport and fault.

    python -m tests.faults --faults 1000 --seed 1
    python -m tests.faults --faults 1 --seed 17 --transport MPI --fault kill    # one of them again

With ``--out FILE`` a JSON line is added to a file. The logs of the ranks of a job that did not end as it must
are kept. Jobs between hosts need root, and the programs ip and tc.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

import flagcx as fc
from flagcx._launch.share_gpu import DRIVER
from tests.faults.job import run
from tests.faults.plan import FAULTS, Plan, draw
from tests.faults.verdict import Verdict
from tests.mpi import MPIRUN

SHARES = {
    "shared memory": 14,
    "threads": 2,
    "MPI": 2,
    "MPI, two hosts": 2,
    "UCX, two hosts": 2,
    "GPU": 3,
    "GPU, MPS": 1,
}
"""How many of 26 faults each transport gets. Jobs on GPUs, of MPI and of UCX take seconds to start."""
_MISLED = 2
"""Errors that name another rank than the victim: so many, or one in a hundred, fail no run."""
COUNTED = ("hangs", "wrong", "leaks", "blame", "unclear")


def cannot(transport: str) -> str:
    """Why a transport cannot be tested here; "" if it can."""
    if "MPI" in transport and not MPIRUN.exists():
        return "no mpirun beside this Python"
    if "UCX" in transport and not importlib.util.find_spec("ucxx"):
        return "the extra 'ucx' is not installed"
    if "GPU" in transport and not (os.path.exists(DRIVER) and importlib.util.find_spec("cupy")):
        return "no NVIDIA GPU here, or no CuPy"
    if "hosts" in transport and (os.geteuid() or not (shutil.which("ip") and shutil.which("tc"))):
        return "two hosts need root, ip and tc"
    return ""


def plans(first: int, faults: int, transports: list[str]) -> Iterator[Plan]:
    """The jobs of consecutive seeds; every fault of a transport in turn."""
    row = [name for name in transports for _ in range(SHARES[name])]
    row = [row[(7 * i) % len(row)] if len(row) % 7 else row[i] for i in range(len(row))]
    turns: dict[str, int] = defaultdict(int)
    for number in range(first, first + faults):
        transport = row[number % len(row)]
        kinds = FAULTS[transport]
        if os.geteuid():
            kinds = tuple(kind for kind in kinds if kind != "small /dev/shm")
        turns[transport] += 1
        yield draw(number, transport, kinds[(turns[transport] + first) % len(kinds)])


def rows(verdicts: list[Verdict]) -> list[dict[str, object]]:
    """One row for each transport and fault, and the last for all."""
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.plan.transport, verdict.plan.fault].append(verdict)
    ordered = [((*key,), group) for key, group in sorted(groups.items())]
    return [
        {
            "transport": transport,
            "fault": fault,
            "count": len(group),
            "struck": sum(v.struck for v in group),
            **{name: sum(bool(getattr(v, name)) for v in group) for name in (*COUNTED, "tardy")},
            "median_s": _or_none(statistics.median, [t for v in group for t in v.raised_s]),
            "worst_s": _or_none(max, [t for v in group for t in v.raised_s]),
        }
        for (transport, fault), group in [*ordered, (("all", ""), verdicts)]
    ]


def _or_none(function, values: list[float]) -> float | None:
    return round(function(values), 3) if values else None


def show(table: list[dict[str, object]]) -> None:
    """Prints the rows."""
    print(f"{'transport':15} {'fault':14} " + " ".join(f"{name:>7}" for name in [*table[0]][2:]))
    for row in table:
        cells = ["" if value is None else f"{value}" for value in [*row.values()][2:]]
        print(f"{row['transport']:15} {row['fault']:14} " + " ".join(f"{cell:>7}" for cell in cells))


def tell(verdict: Verdict) -> None:
    """Prints what is wrong with a job."""
    plan = verdict.plan
    about = f"{plan.transport}, {plan.size} ranks, store in {plan.store}"
    print(f"seed {plan.seed} ({about}): {plan.fault} of rank {plan.victim} {plan.kind}")
    for name in COUNTED:
        for text in getattr(verdict, name):
            print(f"    {name}: {text}")
    if verdict.tardy:
        print(f"    tardy: an error came {max(verdict.raised_s):.1f} s after the fault")
    print(f"    logs: {verdict.logs}")
    sys.stdout.flush()


def main() -> int:
    """Runs the command."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first job")
    parser.add_argument("--transport", choices=[*FAULTS], action="append")
    parser.add_argument("--fault", default="", help="this one alone")
    parser.add_argument("--at-once", type=int, default=4, help="jobs that run at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many")
    parser.add_argument("--out", default="", help="file that a JSON line is added to")
    parser.add_argument("--verdicts", default="", help="file that a JSON line for each job is added to")
    parser.add_argument("--each", action="store_true", help="print each job as it ends")
    given = parser.parse_args()
    transports = given.transport or [*FAULTS]
    for name in list(transports):
        if reason := cannot(name):
            print(f"without {name}: {reason}")
            transports.remove(name)
    chosen = list(plans(given.seed, given.faults, transports))
    if given.fault:
        chosen = [draw(plan.seed, plan.transport, given.fault) for plan in chosen]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the jobs too
    begin, verdicts = time.monotonic(), []
    with contextlib.suppress(SystemExit, KeyboardInterrupt):  # the table of what has ended comes all the same
        for verdict in run(chosen, given.at_once, begin + given.seconds):
            verdicts.append(verdict)
            if not verdict.good or verdict.unclear or verdict.tardy:
                tell(verdict)
            elif given.each:
                plan, raised_s = verdict.plan, [round(s, 2) for s in verdict.raised_s]
                print(
                    f"seed {plan.seed}: {plan.transport}, {plan.fault} {plan.kind}: good {raised_s}",
                    flush=True,
                )
            if given.verdicts:
                with open(given.verdicts, "a") as file:
                    found = {name: getattr(verdict, name) for name in (*COUNTED, "struck", "raised_s")}
                    print(json.dumps({**verdict.plan._asdict(), **found}), file=file)
    if not verdicts:
        return 2
    table = rows(verdicts)
    show(table)
    if given.out:
        about = {
            "command": "python -m tests.faults " + " ".join(sys.argv[1:]),
            "date": time.strftime("%Y-%m-%d"),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "flagcx": fc.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "seconds": round(time.monotonic() - begin),
        }
        with open(given.out, "a") as file:
            print(json.dumps({"run": about, "rows": table}), file=file)
    misled = sum(bool(verdict.blame) for verdict in verdicts)
    harmless = not any(verdict.hangs or verdict.wrong or verdict.leaks for verdict in verdicts)
    return int(not harmless or misled > max(_MISLED, len(verdicts) // 100))


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")


if __name__ == "__main__":
    sys.exit(main())
