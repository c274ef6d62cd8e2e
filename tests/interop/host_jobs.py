"""What ranks of several hosts do with torch in tests: ``python -m tests.interop.host_jobs``."""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist

import flagcx as fc


def main() -> None:
    """Makes flagcx the default group's backend, first where rank 1 has no ucxx, and prints what is logged."""
    dist.init_process_group("gloo")
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flagcx").addHandler(handler)
    logging.getLogger("flagcx").setLevel(logging.DEBUG)
    for lacks in (dist.get_rank() == 1, False):
        if lacks:
            sys.modules["ucxx"] = None  # type: ignore[assignment]
        fc.enhance_process_group()
        use()
        print("told:", *told, flush=True)
        told.clear()
        sys.modules.pop("ucxx", None) if lacks else None
    dist.barrier()
    dist.destroy_process_group()


def use() -> None:
    """Calls some collectives of the default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(100_000, dtype=torch.float64) + rank
    dist.all_reduce(x)
    assert torch.equal(x, size * torch.arange(100_000, dtype=torch.float64) + size * (size - 1) // 2)
    found = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(found, torch.full((3,), float(rank)))
    assert [each[0].item() for each in found] == list(range(size))


if __name__ == "__main__":
    main()
