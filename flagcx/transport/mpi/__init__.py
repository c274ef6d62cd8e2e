"""NumPy arrays between hosts by MPI's messages, for ranks that MPI started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flagcx.bootstrap.mpi_process import MPI_PROCESS
from flagcx.errors import BootstrapError, CommunicatorError
from flagcx.transport.base import TransportContext
from flagcx.transport.mpi.engine import MpiEngine
from flagcx.transport.network.transport import MISSING, SETTING, NetworkTransport, compare_cards

_GROUP_TAG = 1


def find_mpi(limit_s: float, check: Callable[[], object]) -> tuple[Any, str, str]:
    """The module ``mpi4py.MPI``, with MPI started; or a problem of which kind.

    See ``flagcx.bootstrap.mpi_process.MpiProcess.load``.
    """
    try:
        MPI = MPI_PROCESS.load(limit_s, check)
    except (ImportError, RuntimeError) as error:
        return (
            None,
            MISSING,
            f"NumPy arrays travel between hosts by MPI, which needs mpi4py ({error}): "
            f"pip install 'flagcx[mpi]', and start the ranks with its mpirun (or srun)",
        )
    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "was finalized" if MPI.Is_initialized() else "is not started (mpi4py.rc.initialize is False)"
        return (
            None,
            SETTING,
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
            SETTING,
            f"MPI was started for threads of level {low!r}; asynchronous calls need 'multiple': leave "
            f"mpi4py.rc.thread_level and mpi4py.rc.threads as they are, or start MPI by "
            f"MPI.Init_thread(MPI.THREAD_MULTIPLE); if that gives no more, use an MPI built for it",
        )
    return MPI, "", ""


class MpiTransport(NetworkTransport):
    """Carries NumPy arrays between ranks that one MPI job started, on any hosts.

    Args:
        context: The communicator, which must have a store; ``config.timeout_s`` matters here.

    Raises:
        MissingDependencyError: mpi4py is not installed, on any of the ranks.
        ArgumentError: MPI was started without support for threads, or not at all, on any of the ranks.
        BootstrapError: MPI did not start all of the ranks.
    """

    name = "mpi"

    def __init__(self, context: TransportContext) -> None:
        assert context.store is not None
        mpi, kind, problem = find_mpi(context.config.init_timeout_s, context.store.check)
        number = mpi and mpi.COMM_WORLD.Get_rank()
        numbers, memory = compare_cards(context, kind, problem, number)
        if len(set(numbers)) != context.size:
            raise BootstrapError(
                f"MPI knows the {context.size} ranks of this job as its ranks {numbers}: it did not start "
                f"all of them; start them with the mpirun that mpi4py was built for"
            )
        # A communicator of flagcx's own: messages of the user's MPI calls never meet those of flagcx.
        try:
            comm = _open_communicator(mpi, numbers, context.after_loss)
        except mpi.Exception as error:
            context.store.check()  # which names a rank that has died
            raise BootstrapError(f"MPI made no communicator of the job's ranks: {error}") from error
        MPI_PROCESS.arm(mpi)
        super().__init__(context, MpiEngine(mpi, comm), memory)


def _open_communicator(mpi: Any, numbers: list[Any], after_loss: str) -> Any:
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
