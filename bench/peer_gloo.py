"""One rank of gloo, through torch.distributed: ``peer_gloo.py ADDRESS RANK SIZE STORE``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist


def allocate(count: int) -> tuple[torch.Tensor, np.ndarray]:
    """A tensor and a NumPy view of it."""
    array = np.zeros(count, np.float32)
    return torch.from_numpy(array), array


def join(store: str, rank: int, size: int, device: str = "") -> None:
    """Lets the ranks find each other.

    Args:
        store: Where, as torch writes it: ``file://PATH`` or ``tcp://ADDRESS:PORT``.
        rank: This one.
        size: How many there are.
        device: The network device that messages take; torch's choice if empty.
    """
    if device:
        os.environ["GLOO_SOCKET_IFNAME"] = device
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)


def call(collective: str, given: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
    """A collective of arrays, with rank 0 as the root.

    Args:
        collective: Its name; all-reduce, reduce and broadcast are in place, in ``out``.
        given: This rank's part.
        out: What the call writes.
    """
    x, y = torch.from_numpy(given), torch.from_numpy(out)
    # torch 2.13 renamed these two, and warns of each call by the old names
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "allreduce": lambda: dist.all_reduce(y),
        "allgather": lambda: gather(y, x),
        "reduce_scatter": lambda: scatter(y, x),
        "broadcast": lambda: dist.broadcast(y, 0),
        "reduce": lambda: dist.reduce(y, 0),
    }[collective]


def main(address: str, rank: str, size: str, store: str) -> None:
    """Serves the controller at ``address``; the ranks find each other through the file ``store``."""
    join(f"file://{store}", int(rank), int(size))
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
