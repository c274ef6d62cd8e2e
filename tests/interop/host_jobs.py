"""What ranks of several hosts do with torch in tests: ``python -m tests.interop.host_jobs [RANK]``.

The rank with this number has no ucxx.
"""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist

import flagcx as fc


def main() -> None:
    """Makes flagcx the default group's backend, where it can be, and prints what is logged."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if sys.argv[1:] == [str(rank)]:
        sys.modules["ucxx"] = None  # type: ignore[assignment]
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flagcx").addHandler(handler)
    logging.getLogger("flagcx").setLevel(logging.DEBUG)
    fc.enhance_process_group()
    x = torch.arange(100_000, dtype=torch.float64) + rank
    dist.all_reduce(x)
    assert torch.equal(x, size * torch.arange(100_000, dtype=torch.float64) + size * (size - 1) // 2)
    found = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(found, torch.full((3,), float(rank)))
    assert [each[0].item() for each in found] == list(range(size))
    print("told:", *told, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
