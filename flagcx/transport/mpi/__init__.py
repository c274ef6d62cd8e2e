"""NumPy arrays between any number of hosts, by MPI's messages: any schedule, step by step.

MPI only carries the messages. The schedule says which rank sends what and where it is added up, so results
are the same as on one host. Each message says which call it belongs to (``message.py``), and is checked
before its data is used (``wire.py``). Every wait has a deadline, and is explained before it
(``watch.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from flagcx.bootstrap.mpi_process import MPI_PROCESS
from flagcx.errors import (
    ArgumentError,
    BootstrapError,
    CommunicatorError,
    FlagcxError,
    MissingDependencyError,
)
from flagcx.transport.average import averaging
from flagcx.transport.base import Call, Plan, TransportContext
from flagcx.transport.mpi.message import Message, kind_of
from flagcx.transport.mpi.messages import MpiMessenger
from flagcx.transport.mpi.steps import MpiSteps
from flagcx.transport.mpi.watch import Watch
from flagcx.transport.mpi.wire import TRANSFER_TAG, Wire
from flagcx.transport.steps import HostTransport, Messages

_GROUP_TAG = 1
_MOST_KNOWN = 256
_PROBLEMS: dict[str, type[FlagcxError]] = {"missing": MissingDependencyError, "setting": ArgumentError}


def find_mpi(limit_s: float, check: Callable[[], object]) -> tuple[Any, str, str]:
    """The module ``mpi4py.MPI``, with MPI started; or a problem of which kind. See ``MpiProcess.load``."""
    try:
        MPI = MPI_PROCESS.load(limit_s, check)
    except (ImportError, RuntimeError) as error:
        return (
            None,
            "missing",
            f"NumPy arrays travel between hosts by MPI, which needs mpi4py ({error}): "
            f"pip install 'flagcx[mpi]', and start the ranks with its mpirun (or srun)",
        )
    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "was finalized" if MPI.Is_initialized() else "is not started (mpi4py.rc.initialize is False)"
        return (
            None,
            "setting",
            f"MPI {state}; flagcx needs it: call MPI.Init_thread(MPI.THREAD_MULTIPLE) before fc.init(), or "
            f"leave mpi4py.rc.initialize as it is, and finalize after the last call",
        )
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
    }
    low = levels.get(MPI.Query_thread())
    if low is not None:
        return (
            None,
            "setting",
            f"MPI was started for threads of level {low!r}; asynchronous calls need 'multiple': leave "
            f"mpi4py.rc.thread_level and mpi4py.rc.threads as they are, or start MPI by "
            f"MPI.Init_thread(MPI.THREAD_MULTIPLE); if that gives no more, use an MPI built for it",
        )
    return MPI, "", ""


class MpiTransport(HostTransport):
    """Carries NumPy arrays between ranks that one MPI job started, on any hosts.

    Args:
        context: The communicator, which must have a store; ``config.timeout_s`` matters here.

    Raises:
        MissingDependencyError: mpi4py is not installed, on any of the ranks.
        ArgumentError: MPI was started without support for threads, or not at all, on any of the ranks.
        BootstrapError: MPI did not start all of the ranks.
    """

    name = "mpi"
    takes_cores = False

    def __init__(self, context: TransportContext) -> None:
        assert context.store is not None
        self.rank, self.size = context.rank, context.size
        mpi, kind, problem = find_mpi(context.config.init_timeout_s, context.store.check)
        mine = json.dumps([kind, problem or mpi.COMM_WORLD.Get_rank()]).encode()
        cards = [json.loads(card) for card in context.exchange(mine)]
        for rank, (kind, problem) in enumerate(cards):
            if kind:
                raise _PROBLEMS[kind](f"rank {rank}: {problem}")
        numbers = [number for _, number in cards]
        if len(set(numbers)) != self.size:
            raise BootstrapError(
                f"MPI knows the {self.size} ranks of this job as its ranks {numbers}: it did not start all "
                f"of them; start them with the mpirun that mpi4py was built for"
            )
        # A communicator of flagcx's own: messages of the user's MPI calls never meet those of flagcx.
        try:
            comm = _open_communicator(mpi, numbers, context.after_loss)
        except mpi.Exception as error:
            context.store.check()  # which names a rank that has died
            raise BootstrapError(f"MPI made no communicator of the job's ranks: {error}") from error
        MPI_PROCESS.arm(mpi)
        self._watch = Watch(context.store, context.config.timeout_s, context.waits)
        self._wire = Wire(mpi, comm, self._watch)
        self.messenger = MpiMessenger(self._wire, self._watch, self._message, context.config.timeout_s)
        self._known = lru_cache(_MOST_KNOWN)(_message_of)

    def _compile(self, call: Call) -> Plan:
        words = call.describe()
        return averaging(call, lambda call: MpiSteps(self._wire, self._watch, call, self.scratch, words))

    def transfer(self, sends: Messages, receives: Messages) -> None:
        """Sends and receives at once; see ``Transport.transfer``."""
        self._wire.exchange(
            [(self._message(array, peer), array.reshape(-1)) for array, peer in sends],
            [(self._message(array, peer), array.reshape(-1)) for array, peer in receives],
            TRANSFER_TAG,
        )

    def _message(self, array: np.ndarray, peer: int) -> Message:
        return self._known(peer, array.size, array.dtype)

    def check_end(self) -> None:
        """Checks that the peers have made the same calls; see ``Transport.check_end``."""
        self._wire.check_end()
        if self._watch.calls:
            self._watch.check_end()

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers why this rank cannot go on; see ``Transport.abort``."""
        self._watch.give_up(reason, culprit)
        self._wire.notify()

    def close(self) -> None:
        """Tells the peers so. MPI takes its communicator back when all ranks end: to free it needs all."""
        self._watch.close()


def _open_communicator(mpi: Any, numbers: list[int], after_loss: str) -> Any:
    """A communicator of these ranks of MPI. After a loss MPI itself is asked for one, not the world.

    Raises:
        CommunicatorError: MPI cannot go on after a loss.
    """
    group = mpi.COMM_WORLD.Get_group().Incl(numbers)
    if not after_loss:
        return mpi.COMM_WORLD.Create_group(group, tag=_GROUP_TAG)
    try:
        comm = mpi.Intracomm.Create_from_group(group, f"flagcx {after_loss}")
    except (NotImplementedError, mpi.Exception) as error:
        library = mpi.Get_library_version().partition(",")[0]
        raise CommunicatorError(
            f"{library} gives ranks that lost others no communicator ({error}); it must survive a loss and "
            f"know MPI 4's MPI_Comm_create_from_group, as Open MPI 5 does by mpirun --with-ft ulfm; or start "
            f"the job again, from a checkpoint"
        ) from None
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comm


def _message_of(peer: int, count: int, dtype: np.dtype) -> Message:
    """A message that two ranks exchange on their own."""
    kind = kind_of(f"send and receive of {dtype.name}", count * dtype.itemsize)
    return Message(peer, kind, count, dtype)
