"""One rank of gloo, through torch.distributed: ``peer_gloo.py ADDRESS RANK SIZE STORE``."""

from __future__ import annotations

import sys

import harness
import numpy as np
import torch
import torch.distributed as dist


def allocate(count: int) -> tuple[torch.Tensor, np.ndarray]:
    """A tensor and a NumPy view of it."""
    array = np.zeros(count, np.float32)
    return torch.from_numpy(array), array


def main(address: str, rank: str, size: str, store: str) -> None:
    """Serves the controller at ``address``; the ranks find each other through the file ``store``."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    subject = harness.Subject(
        rank=int(rank),
        size=int(size),
        allreduce=dist.all_reduce,
        barrier=dist.barrier,
        allocate=allocate,
        versions=harness.versions(torch=torch.__version__),
    )
    harness.serve(address, subject)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
