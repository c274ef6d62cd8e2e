"""All-reduce of torch tensors on the CPU: gloo, and gloo's process group enhanced by flagcx, in one run.

    flagcx run -n 2 bench/torch_allreduce.py
    flagcx run -n 4 bench/torch_allreduce.py --output bench/results/torch_allreduce.jsonl
    torchrun --nproc-per-node 2 bench/torch_allreduce.py --sizes 64K,1M

The two take turns on the same tensor, batch by batch. A batch begins behind a barrier and takes as long as
its slowest rank. Results are compared with the exact sum before and after the batches.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import count_wrong, expected_pattern, fill, pattern, versions
from report import Result, list_of, result_row, write_json_lines

import flagcx as fc
from flagcx.cli.sizes import parse_nbytes
from flagcx.config import environment

NAMES = {"gloo": "torch gloo", "flagcx": "torch gloo enhanced by flagcx"}
SIZES = "1K,16K,64K,256K,1M,4M,16M,64M"
BATCH_S = 0.03
MOST_CALLS = 200


def main() -> None:
    """Measures, prints a table on rank 0, and adds lines to the output file."""
    options = _options()
    torch.set_num_threads(1)
    rank, size = join()
    group = fc.enhance_process_group()
    ways = {"gloo": group.original, "flagcx": group}
    rows = []
    if rank == 0:
        print(f"{'bytes':>10} {'gloo us':>22} {'flagcx us':>22} {'speed-up':>9} {'wrong':>6}", flush=True)
    named = versions(torch=torch.__version__, flagcx=fc.__version__)
    for nbytes in options.sizes:
        times, wrong = measure(ways, nbytes, options.rounds, rank, size)
        if rank == 0:
            results = [Result.of(NAMES[way], size, nbytes, times[way], wrong[way]) for way in ways]
            rows += [result_row(result, named) for result in results]
            show(nbytes, times, sum(wrong.values()))
    if rank == 0 and options.output:
        write_json_lines(options.output, rows)
    dist.destroy_process_group()


def join() -> tuple[int, int]:
    """Joins torch's default group, whoever started the ranks. Returns rank and size."""
    if "RANK" in environment():
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    comm = fc.init()
    first = dist.TCPStore("127.0.0.1", 0, is_master=True) if comm.rank == 0 else None
    port = comm.broadcast_object(None if first is None else first.port)
    store = first or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    return comm.rank, comm.size


def measure(
    ways: dict[str, Any], nbytes: int, rounds: int, rank: int, size: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds a call of the slowest rank, for each batch of each way; and how many elements were wrong."""
    tensor = torch.zeros(nbytes // 4)
    calls = {name: partial(dist.all_reduce, tensor, group=group) for name, group in ways.items()}
    wrong = {name: check(call, tensor.numpy(), rank, size) for name, call in calls.items()}
    counts = {name: batch_size(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(batch(call, counts[name]))
    slowest = torch.tensor([times[name] for name in ways], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    for name, call in calls.items():
        wrong[name] += check(call, tensor.numpy(), rank, size)
    return dict(zip(ways, slowest.tolist(), strict=True)), wrong


def check(call: Callable[[], object], array: np.ndarray, rank: int, size: int) -> int:
    """One call on data of its own in every place. Leaves zeros, which never overflow."""
    fill(array, pattern(rank))
    call()
    found = count_wrong(array, expected_pattern(size))
    array[:] = 0
    total = torch.tensor([found])
    dist.all_reduce(total)
    return int(total)


def batch(call: Callable[[], object], calls: int) -> float:
    """Seconds a call, of ``calls`` that follow upon a barrier and a call that warms up."""
    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def batch_size(call: Callable[[], object]) -> int:
    """How many calls make a batch: the same on all ranks."""
    seconds = torch.tensor([min(batch(call, 3) for _ in range(2))])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return int(min(max(BATCH_S / seconds.item(), 1), MOST_CALLS))


def show(nbytes: int, times: dict[str, list[float]], wrong: int) -> None:
    """One line of the table: medians with their quartiles."""
    texts = []
    for seconds in times.values():
        low, middle, high = (q * 1e6 for q in statistics.quantiles(seconds, n=4))
        texts.append(f"{middle:.1f} [{low:.0f}, {high:.0f}]")
    gain = statistics.median(times["gloo"]) / statistics.median(times["flagcx"])
    print(f"{nbytes:>10} {texts[0]:>22} {texts[1]:>22} {gain:>8.1f}x {wrong:>6}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = list_of(parse_nbytes)
    parser.add_argument("--sizes", type=sizes, default=SIZES, help="bytes of the message, such as 64K,1M")
    parser.add_argument("--rounds", type=int, default=15, help="batches of each")
    parser.add_argument("--output", type=Path, help="file that JSON lines are added to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
