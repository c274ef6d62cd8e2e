"""gloo's own collectives on NumPy arrays, by PyTorch: what ``flagcx bench --compare gloo`` measures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flagcx.errors import ArgumentError

_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}


class Gloo:
    """A process group of gloo for the ranks of a communicator. All ranks must make it together.

    Args:
        comm: The communicator.

    Raises:
        ArgumentError: The ranks are on several hosts.

    Attributes:
        name: What tables call it.
        other: True: it is another library.
    """

    other = True

    def __init__(self, comm: Any) -> None:
        if len(set(comm.hosts)) > 1:
            raise ArgumentError("--compare gloo measures ranks of one host; these are on several")
        self.name = f"gloo, PyTorch {torch.__version__.split('+')[0]}"
        folder = tempfile.mkdtemp(prefix="flagcx-") if comm.rank == 0 else ""
        self._folder = Path(comm.broadcast_object(folder))
        self._group = dist.ProcessGroupGloo(
            dist.FileStore(str(self._folder / "store"), comm.size), comm.rank, comm.size
        )
        comm.barrier()
        if comm.rank == 0:
            for path in [*self._folder.iterdir()]:
                path.unlink()
            self._folder.rmdir()

    def bind(self, message: Any, buffers: Any, in_place: bool) -> Callable[[], object] | None:
        """A call on the buffers of a benchmark, or None: gloo reduces in place, and gathers out of place."""
        group = self._group
        if message.collective == "allgather":
            if in_place:
                return None
            parts = list(torch.from_numpy(buffers.recvbuf).chunk(message.size))
            given = torch.from_numpy(buffers.sendbuf)
            return lambda: group.allgather([parts], [given]).wait()
        if not in_place:
            return None
        tensor = torch.from_numpy(buffers.recvbuf)
        if message.collective == "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank = message.root
            return lambda: group.broadcast([tensor], options).wait()
        reducing = dist.AllreduceOptions()
        reducing.reduceOp = getattr(dist.ReduceOp, _OPS[message.op.name])
        return lambda: group.allreduce([tensor], reducing).wait()
