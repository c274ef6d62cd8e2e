"""The benchmark of the article: a large all-reduce under torch.distributed, before and after one line.

    torchrun --nproc-per-node 8 examples/article_benchmark.py
    flagcx run -n 4 examples/article_benchmark.py                # on the CPU where there is no GPU
    flagcx run -n 4 --share-gpu examples/article_benchmark.py    # ranks that share one GPU

The article sums up 20 GB of gradients over 8 GPUs: each holds a random float32 tensor of
``2_500_000_000 // 4 // 8`` elements, makes 5 all-reduces to warm up, synchronises, and times 10. Here the
ranks do so with torch's own backend, then again after ``fc.enhance_process_group()``, several times in turn.
Where the memory is short the tensor is smaller; the table says how large it was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import flagcx as fc
from flagcx.config import environment

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError:  # so that --help works
    torch = None  # type: ignore[assignment]

ELEMENTS = 2_500_000_000 // 4 // 8
WARM_UP, TIMED = 5, 10
SHARE = 8  # of the free memory, the tensors of a host's ranks take at most one part in so many


def main() -> None:
    """Measures both in turn, and prints their table on rank 0."""
    options = parse()
    if torch is None:
        raise SystemExit("this benchmark needs PyTorch, which is not installed: pip install 'flagcx[torch]'")
    rank, size, device = join(options.backend)
    count = options.elements or affordable(device, size)
    tensor = torch.rand(count, dtype=torch.float32, device=device)
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    check(tensor, rank, size)
    for _ in range(options.rounds):
        seconds["before"].append(average(tensor))
        fc.enhance_process_group()  # the line that this is about
        check(tensor, rank, size)
        seconds["after"].append(average(tensor))
        fc.restore_process_group()
    if rank == 0:
        show(seconds, tensor, size)
    dist.destroy_process_group()


def join(backend: str) -> tuple[int, int, torch.device]:
    """Joins torch's default process group, whoever started the ranks."""
    environ = environment()
    local = int(environ.get("LOCAL_RANK", environ.get("FLAGCX_LOCAL_RANK", "0")))
    device = torch.device("cpu")
    if torch.cuda.is_available() and backend != "gloo-cpu":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if backend == "auto":
        alone = local < torch.cuda.device_count()  # NCCL wants a GPU for each rank
        backend = "nccl" if device.type == "cuda" and alone and not shares_gpu(environ) else "gloo"
    backend = backend.removesuffix("-cpu")
    if "RANK" in environ:
        dist.init_process_group(backend)
    else:
        comm = fc.init()
        first = dist.TCPStore("127.0.0.1", 0, is_master=True) if comm.rank == 0 else None
        port = comm.broadcast_object(None if first is None else first.port)
        store = first or dist.TCPStore("127.0.0.1", port)
        dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    return dist.get_rank(), dist.get_world_size(), device


def shares_gpu(environ: dict[str, str]) -> bool:
    """Whether ``flagcx run --share-gpu`` started the ranks."""
    return environ.get("FLAGCX_SHARE_GPU", "") not in ("", "0")


def affordable(device: torch.device, size: int) -> int:
    """The article's number of elements, or as many as the memory allows; the same on all ranks."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        sharers = max(1, size // torch.cuda.device_count())
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        sharers = size
    least = torch.tensor([min(ELEMENTS, free // SHARE // sharers // 4)], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


def average(tensor: torch.Tensor) -> float:
    """Seconds of an all-reduce, as the article measures them: an average of ten in a row."""
    tensor.uniform_()
    for _ in range(WARM_UP):
        dist.all_reduce(tensor)
    synchronise(tensor)
    start = time.perf_counter()
    for _ in range(TIMED):
        dist.all_reduce(tensor)
    synchronise(tensor)
    return (time.perf_counter() - start) / TIMED


def synchronise(tensor: torch.Tensor) -> None:
    """Waits until all ranks have come, with all that they enqueued."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    dist.barrier()


def check(tensor: torch.Tensor, rank: int, size: int) -> None:
    """One all-reduce of data that differs in every place: the sum must be exact."""
    place = torch.arange(tensor.numel(), device=tensor.device) % 1009
    torch.add(place, 1009 * rank, out=place)
    tensor.copy_(place)
    dist.all_reduce(tensor)
    place -= 1009 * rank
    expected = (place * size + 1009 * size * (size - 1) // 2).to(torch.float32)
    if not torch.equal(tensor, expected):
        raise SystemExit(f"rank {rank}: a sum is wrong")


def show(seconds: dict[str, list[float]], tensor: torch.Tensor, size: int) -> None:
    """Prints the table of comparison."""
    nbytes = tensor.numel() * tensor.element_size()
    where = torch.cuda.get_device_name(tensor.device) if tensor.is_cuda else "CPU"
    cut = "" if tensor.numel() == ELEMENTS else f" (the article's has {ELEMENTS * 4 / 1e6:.1f} MB)"
    print(f"all-reduce of {nbytes / 1e6:.1f} MB float32 on {size} ranks{cut}")
    print(f"{where}, torch {torch.__version__}")
    print(f"average of {TIMED} calls behind {WARM_UP} to warm up, {len(seconds['before'])} times in turn")
    print()
    print(f"{'':<26} {'average s':>10} {'least s':>9} {'most s':>9} {'busbw GB/s':>11} {'speed-up':>9}")
    names = {"before": f"torch, {dist.get_backend()}", "after": "fc.enhance_process_group()"}
    before = statistics.median(seconds["before"])
    for key, name in names.items():
        middle = statistics.median(seconds[key])
        busbw = 2 * (size - 1) / size * nbytes / middle / 1e9
        spread = f"{min(seconds[key]):>9.4f} {max(seconds[key]):>9.4f}"
        print(f"{name:<26} {middle:>10.4f} {spread} {busbw:>11.2f} {before / middle:>8.2f}x")


def parse() -> Any:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--elements", type=int, help=f"float32 elements of the tensor; the article's {ELEMENTS:,}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often both are measured")
    parser.add_argument(
        "--backend",
        default="auto",
        choices=["auto", "nccl", "gloo", "gloo-cpu"],
        help="torch's backend; gloo-cpu keeps the tensor on the CPU where there is a GPU",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
