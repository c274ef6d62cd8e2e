"""1,000 arrays of 1 to 64 KiB: one call for each, beside one list, a list of new arrays, one group.

    flagcx run -n 2 bench/fusion.py
    flagcx run -n 4 bench/fusion.py --out results.jsonl
    flagcx run -n 2 bench/fusion.py --message-kib 4096 # longer messages, and larger arrays in them
    flagcx run -n 4 bench/fusion.py --gpu              # CuPy arrays

The kinds take turns, so that a drift of the machine hits all alike. Every result is checked. Of NumPy arrays
"copies" tells what packing alone takes: each array into a message and back, in NumPy calls that check dtypes.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from operator import setitem
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from report import write_json_lines

import flagcx as fc
from flagcx.fusion.limits import Limits

SMALLEST, LARGEST = 1 << 10, 64 << 10
SPREADS = ("1 KiB", "4 KiB", "16 KiB", "64 KiB", "powers", "even")
KINDS = ("one by one", "list", "new arrays", "group")


def sizes(count: int, spread: str) -> Iterator[int]:
    """Elements of float32 of each array, the same on all ranks.

    Args:
        count: How many arrays.
        spread: "4 KiB" for arrays of so many bytes each; "powers" for as many between 1 and 2 KiB as
            between 32 and 64; "even" for all sizes alike.
    """
    random = np.random.default_rng(0)
    for share in random.uniform(0, 1, count):
        if spread.endswith(" KiB"):
            nbytes = float(int(spread.split()[0]) << 10)
        elif spread == "powers":
            nbytes = SMALLEST * (LARGEST / SMALLEST) ** share
        else:
            nbytes = SMALLEST + (LARGEST - SMALLEST) * share
        yield int(nbytes) // 4


class Trial:
    """The arrays of one spread, and the ways to reduce them."""

    def __init__(self, comm: fc.Communicator, xp: Any, spread: str, count: int) -> None:
        self.comm, self.xp = comm, xp
        self.arrays = [xp.zeros(n, xp.float32) for n in sizes(count, spread)]
        self.nbytes = sum(a.nbytes for a in self.arrays)
        self.newer: list[Any] = []

    def of(self, kind: str) -> list[Any]:
        """The arrays that a kind of call reduces; new ones where it says so."""
        if kind != "new arrays":
            return self.arrays
        self.newer = []
        self.newer = [self.xp.zeros(a.shape, a.dtype) for a in self.arrays]
        return self.newer

    def one_by_one(self) -> None:
        for array in self.arrays:
            self.comm.allreduce(array)

    def list(self) -> None:
        self.comm.allreduce(self.arrays)

    def new_arrays(self) -> None:
        self.comm.allreduce(self.newer)

    def group(self) -> None:
        with self.comm.group():
            for array in self.arrays:
                self.comm.allreduce(array)

    def copies(self) -> Callable[[], None]:
        """What packs and unpacks all arrays and sends nothing."""
        longest = self.comm.fusion_of(self.comm._host).packer.limits.message_nbytes
        many = max(longest // self.arrays[0].nbytes, 1)
        messages = [self.arrays[i : i + many] for i in range(0, len(self.arrays), many)]
        flats = [np.empty(sum(a.size for a in message), np.float32) for message in messages]
        views = [
            np.split(f, np.cumsum([a.size for a in m])[:-1]) for f, m in zip(flats, messages, strict=True)
        ]

        def copy() -> None:
            for message, flat, parts in zip(messages, flats, views, strict=True):
                np.concatenate(message, None, flat, casting="no")
                deque(map(setitem, message, repeat(...), parts), maxlen=0)

        return copy

    def synchronize(self) -> None:
        if self.xp is not np:
            self.xp.cuda.Device().synchronize()

    def time_ms(self, call: Callable[[], None]) -> float:
        """Milliseconds until the last rank is done."""
        self.synchronize()
        self.comm.barrier()
        start = time.perf_counter()
        call()
        self.synchronize()
        return max(self.comm.allgather_object(time.perf_counter() - start)) * 1e3

    def wrong(self, call: Callable[[], None], arrays: list[Any]) -> int:
        """How many elements are wrong after one call on fresh data in these arrays; leaves zeros behind."""
        xp, size = self.xp, self.comm.size
        ramps = [xp.arange(a.size, dtype=xp.float32) % 1000 + i % 97 for i, a in enumerate(arrays)]
        for array, ramp in zip(arrays, ramps, strict=True):
            array[...] = ramp + self.comm.rank
        call()
        faults = 0
        for array, ramp in zip(arrays, ramps, strict=True):
            faults += int((array != size * ramp + size * (size - 1) // 2).sum())
            array[...] = 0
        return sum(self.comm.allgather_object(faults))


def measure(trial: Trial, rounds: int) -> dict[str, Any]:
    """Times all kinds in turns; medians."""
    calls = {kind: getattr(trial, kind.replace(" ", "_")) for kind in KINDS}
    wrong = {kind: trial.wrong(call, trial.of(kind)) for kind, call in calls.items()}
    if trial.xp is np:
        calls["copies"] = trial.copies()
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    for i in range(rounds + 2):
        for kind, call in calls.items():
            trial.of(kind)
            elapsed = trial.time_ms(call)
            if i >= 2:
                times[kind].append(elapsed)
    return {
        "ms": {kind: round(statistics.median(values), 3) for kind, values in times.items()},
        "quartiles_ms": {
            kind: [round(q, 3) for q in statistics.quantiles(values, n=4)[::2]]
            for kind, values in times.items()
            if len(values) > 1
        },
        "wrong": wrong,
    }


def surroundings(comm: fc.Communicator, gpu: bool) -> dict[str, Any]:
    """What ran where."""
    command = f"flagcx run -n {comm.size} bench/fusion.py" + " --gpu" * gpu
    found = {"command": command, "python": platform.python_version(), "numpy": np.__version__}
    if not gpu:
        return found
    import cupy

    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    gpus = len(set(comm.allgather_object(device.pci_bus_id)))
    return found | {"cupy": cupy.__version__, "gpu": name, "gpus": gpus}


def main(
    gpu: Annotated[bool, typer.Option("--gpu", help="CuPy arrays.")] = False,
    count: Annotated[int, typer.Option(min=1, help="How many arrays.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    message_kib: Annotated[int, typer.Option(min=0, help="Of NumPy arrays; 0: by the cache.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to append results as JSON lines.")] = None,
) -> None:
    """Measures fused all-reduces beside single ones."""
    with fc.init() as comm:
        xp, run = choose_arrays(gpu), surroundings(comm, gpu)
        if message_kib:
            limits = Limits(message_kib << 7, message_kib << 10)
            comm.fusion_of(comm._host).packer.limits = limits
            run["command"] += f" --message-kib {message_kib}"
        for spread in SPREADS:
            trial = Trial(comm, xp, spread, count)
            found = measure(trial, rounds)
            if comm.rank == 0:
                report(comm, trial, spread, found, run, out)


def choose_arrays(gpu: bool) -> Any:
    """NumPy or CuPy."""
    if not gpu:
        return np
    import cupy

    return cupy


def report(
    comm: fc.Communicator, trial: Trial, spread: str, found: dict, run: dict, out: Path | None
) -> None:
    """Prints a line, and appends it to a file."""
    times = found["ms"]
    alone = times["one by one"]
    gains = "  ".join(f"{kind} {t:8.2f} ms ({alone / t:4.1f} x)" for kind, t in times.items())
    wrong = sum(found["wrong"].values())
    print(
        f"{comm.size} ranks, {len(trial.arrays)} arrays, {spread:6} {trial.nbytes / 2**20:5.1f} MiB: {gains}"
        f"  wrong {wrong}"
    )
    if out is not None:
        row = {"bench": "fusion", "ranks": comm.size, "spread": spread, "nbytes": trial.nbytes}
        write_json_lines(out, [row | {"count": len(trial.arrays)} | found | {"run": run}])


if __name__ == "__main__":
    typer.run(main)
