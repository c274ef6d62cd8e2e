"""MPI as an engine: the methods of mpi4py, of which most are called as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flagcx.transport.network.engine import Engine


class MpiEngine(Engine):
    """One MPI communicator.

    Args:
        mpi: The module ``mpi4py.MPI``.
        comm: A communicator that carries nothing else.
    """

    name = "MPI"

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm, self._byte = mpi, comm, mpi.BYTE
        self.error, self.rank, self.size = mpi.Exception, comm.Get_rank(), comm.Get_size()
        self.send, self.receive, self.is_done = comm.Isend, comm.Irecv, mpi.Request.Test
        self.all_done, self._some_done = mpi.Request.Testall, mpi.Request.Testsome

    def memory(self, array: np.ndarray) -> Any:
        """The bytes of an array, with MPI's word for bytes."""
        return [array.view(np.uint8), self._byte]

    def some_done(self, requests: Sequence[Any]) -> bool:  # type: ignore[override]
        """Whether some have ended that had not when this was asked last, since they are null from then on."""
        if len(requests) == 1:
            return bool(requests[0].Test())
        return bool(self._some_done(requests))

    def first(self, tag: int) -> int | None:
        """A rank whose piece waits; see ``Engine.first``."""
        status = self._mpi.Status()
        return status.Get_source() if self._comm.Iprobe(self._mpi.ANY_SOURCE, tag, status) else None

    def cancel(self, request: Any) -> None:
        """Takes a request back, where MPI can."""
        request.Cancel()

    def lost(self) -> list[int]:
        """The ranks that MPI knows to have died, where it tells (ULFM)."""
        with contextlib.suppress(AttributeError, NotImplementedError, self._mpi.Exception):
            lost, ours = self._comm.Get_failed(), self._comm.Get_group()
            return list(lost.Translate_ranks(None, ours))
        return []

    def close(self, over: Callable[[], bool]) -> None:
        """MPI takes its communicator back when all ranks end: to free it needs all."""
