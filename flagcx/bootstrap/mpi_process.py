"""MPI in this process: started within a time, and left without waiting for ranks that are lost.

mpi4py starts MPI as it is imported, and ends it as the process ends: two calls that wait for all ranks, and
meanwhile let no other thread of Python run. Where nothing has imported ``mpi4py.MPI`` before flagcx needs it,
flagcx makes both calls: it starts MPI on a thread, looks for dead ranks meanwhile, and leaves
``MPI_Finalize`` out once a rank is lost. Where a program has imported ``mpi4py.MPI`` before, mpi4py ends MPI,
but for a rank that has lost another one: flagcx then begins ``MPI_Finalize``, and the process ends whether it
returns or not.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from flagcx.bootstrap.bounded import bounded
from flagcx.bootstrap.clock import ActiveClock
from flagcx.bootstrap.environment import Identity
from flagcx.bootstrap.mpi_leftovers import remove_own
from flagcx.config import environment
from flagcx.descriptors import occupy_standard_streams
from flagcx.errors import BootstrapError, FlagcxError, MissingDependencyError, ResourceError

logger = logging.getLogger("flagcx")

_SURVIVES = "OMPI_MCA_mpi_ft_enable"
"""What ``mpirun --with-ft ulfm`` sets, where a lost rank ends no other."""
_MESSAGE_NBYTES, _POLL_S = 4096, 1e-3
_FINALIZE_S, _FINALIZE_LOST_S = 5.0, 1.0
"""For how long MPI_Finalize is waited for where a rank may be lost, and where one is."""


class MpiProcess:
    """MPI of this process, once it is needed.

    Attributes:
        lost: Whether ranks went on after MPI has lost one.
        launched: Whether MPI's launcher started the ranks of this process's job.
        before_end: Closes what needs MPI.
    """

    def __init__(self) -> None:
        self.lost = self.launched = False
        self.before_end: Callable[[], object] = lambda: None
        self._armed = False
        self._mpi: Any = None  # where flagcx has started it
        self._owner, self._left = os.getpid(), False

    def load(self, limit_s: float, check: Callable[[], object] = lambda: None) -> Any:
        """The module ``mpi4py.MPI``, with MPI started unless the program wants to start it itself.

        Args:
            limit_s: How long the start may take, in seconds: it waits for all ranks of MPI's job.
            check: Raises if a rank is known to have died; called while the start waits.

        Raises:
            ImportError: mpi4py is not installed, or finds no MPI (``RuntimeError`` too).
            BootstrapError: MPI did not start in time, or failed.
        """
        import mpi4py

        occupy_standard_streams()
        rc = mpi4py.rc
        if "mpi4py.MPI" in sys.modules or not rc.initialize:
            from mpi4py import MPI

            return MPI
        rc.initialize = False
        try:
            from mpi4py import MPI
        finally:
            rc.initialize = True
        if not MPI.Is_initialized():
            self._start(MPI, rc, limit_s, check)
            self._mpi, self._owner = MPI, os.getpid()
        return MPI

    def _start(self, mpi: Any, rc: Any, limit_s: float, check: Callable[[], object]) -> None:
        level = getattr(mpi, f"THREAD_{rc.thread_level.upper()}") if rc.threads else mpi.THREAD_SINGLE
        # Without Python's lock, which mpi4py's own call keeps.
        init, codes = ctypes.CDLL(mpi.__file__).MPI_Init_thread, list[int]()
        provided = ctypes.c_int()

        def start() -> None:
            codes.append(init(None, None, ctypes.c_int(level), ctypes.byref(provided)))

        if not bounded(start, limit_s, check):
            raise BootstrapError(
                f"MPI_Init did not return within {limit_s:.1f} s: it waits for all ranks of the job, and one "
                f"of them died before it came there, is stopped or never starts MPI; a longer time-out: "
                f"fc.init(init_timeout_s=...) or FLAGCX_INIT_TIMEOUT_S"
            )
        if codes != [mpi.SUCCESS]:
            raise BootstrapError(f"MPI_Init failed: {mpi.Get_error_string(codes[0])}")
        if rc.errors == "exception":  # as mpi4py sets it where it starts MPI
            for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
                comm.Set_errhandler(mpi.ERRORS_RETURN)

    def arm(self, mpi: Any) -> None:
        """Has ``before_end`` called when the program calls ``MPI.Finalize()``; MPI aborts on any later call.

        MPI_Finalize begins by freeing ``MPI_COMM_SELF``'s attributes (MPI 4.1, 11.2.4).
        """
        if self._armed:
            return
        self._armed = True

        def deleted(*_: object) -> None:
            try:
                self.before_end()
            except FlagcxError as error:
                logger.warning("%s: %s", type(error).__name__, error)

        mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=deleted), None)

    def leave(self, lost: bool, late: bool = False) -> None:
        """Ends MPI as the process ends, unless the program ends it itself.

        Args:
            lost: Whether a rank is lost, for which ``MPI_Finalize`` might wait without end.
            late: Whether one may be lost, so that ``MPI_Finalize`` is waited for, but not for long.
        """
        mpi = self._mpi or _ended_by_mpi4py()
        if self._left or mpi is None or self._owner != os.getpid():
            return
        self._left = True
        if not mpi.Is_initialized() or mpi.Is_finalized():
            return
        # Without Python's lock, which mpi4py's own call keeps: ranks may wait for this one's store.
        finalize = ctypes.CDLL(mpi.__file__).MPI_Finalize
        lost = lost or self.lost
        if lost and self._mpi is not None:
            logger.info("MPI_Finalize is left out, which would wait for ranks that are lost")
            remove_own()
        elif lost or late or environment().get(_SURVIVES) == "1":
            _finalize_within(finalize, _FINALIZE_LOST_S if lost else _FINALIZE_S)
        elif self._mpi is not None:
            finalize()


def _ended_by_mpi4py() -> Any:
    """The module ``mpi4py.MPI`` where it ends MPI as the process ends, because it has started it."""
    mpi = sys.modules.get("mpi4py.MPI")
    rc = getattr(sys.modules.get("mpi4py"), "rc", None)
    return mpi if rc is not None and rc.initialize and rc.finalize in (None, True) else None


def _finalize_within(finalize: Callable[[], object], limit_s: float) -> None:
    """Calls MPI_Finalize on a thread, which is left to itself after a time.

    MPI counts as finalized then, since Open MPI's call waits for the other ranks only after it has noted
    that, so that mpi4py does not call it again.
    """
    try:
        returned = bounded(finalize, limit_s, lambda: None)
    except ResourceError:  # Python 3.12.0 and 3.12.1 start no thread as they end.
        returned = False
    if not returned:
        logger.info("MPI_Finalize did not return within %g s, and is left to itself", limit_s)
        remove_own()


MPI_PROCESS = MpiProcess()
"""The process's own; a process has one MPI."""


def broadcast(identity: Identity, message: dict | None, limit_s: float) -> dict:
    """Sends rank 0's message, of at most 4 KiB as JSON, to all ranks through MPI, as plain bytes.

    Args:
        identity: This rank's place in the job, which MPI must confirm.
        message: The message, on rank 0.
        limit_s: How long to wait for the other ranks, in seconds.

    Raises:
        BootstrapError: MPI numbers the ranks otherwise, or they did not come in time.
        MissingDependencyError: mpi4py is not installed.
    """
    clock = ActiveClock()
    try:
        mpi = MPI_PROCESS.load(max(limit_s, 0.0))
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            f"the ranks of this job, started by {identity.launcher}, are on several hosts; to find each "
            f"other they need mpi4py (pip install 'flagcx[mpi]'), or FLAGCX_STORE_ADDRESS=host:port of rank "
            f"0, on all"
        ) from error
    _check_place(identity, mpi.COMM_WORLD)
    buffer = bytearray((b"" if message is None else json.dumps(message).encode()).ljust(_MESSAGE_NBYTES))
    try:
        request = mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0)
        while not request.Test():
            if clock.now() >= limit_s:
                raise BootstrapError(
                    f"rank {identity.rank} of {identity.size} did not hear from rank 0 by MPI in time; did "
                    f"all ranks start, and call init?",
                    rank=0,
                )
            time.sleep(_POLL_S)
    except mpi.Exception as error:
        text = f"rank {identity.rank} did not hear from rank 0 by MPI: {error}"
        raise BootstrapError(text, rank=0) from error
    return json.loads(buffer)


def _check_place(identity: Identity, world: Any) -> None:
    if (world.Get_rank(), world.Get_size()) != (identity.rank, identity.size):
        raise BootstrapError(
            f"mpi4py says rank {world.Get_rank()} of {world.Get_size()}, {identity.launcher} says rank "
            f"{identity.rank} of {identity.size}; install mpi4py for the MPI whose mpirun starts the ranks"
        )
