"""Communicators of flagcx for communicators of mpi4py, which is not imported: the program has done so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flagcx.bootstrap.environment import host_name
from flagcx.bootstrap.meeting import MetRank, open_meeting
from flagcx.config import Config, environment
from flagcx.errors import ArgumentError, what_it_raised
from flagcx.world import init

if TYPE_CHECKING:
    from flagcx.communicator import Communicator


def from_mpi(comm: Any, **settings: Any) -> Communicator:
    """Makes a communicator of the ranks of an mpi4py communicator: the whole world's, or any part of it.

    All ranks of ``comm`` call it together. Its collectives then go through flagcx's own transports; the MPI
    communicator stays as it is. A process may have several, beside that of ``fc.init()``.

    Args:
        comm: An intracommunicator of mpi4py, such as ``MPI.COMM_WORLD`` or what ``Split`` returned.
        settings: Fields of ``fc.Config``, such as ``timeout_s=60``.

    Returns:
        The communicator, with the ranks of ``comm``. Close it, or leave it to the end of the process.

    Raises:
        ArgumentError: ``comm`` is no intracommunicator of mpi4py, or this process is none of its ranks.
        BootstrapError: The ranks did not find each other.

    Example:
        >>> from mpi4py import MPI                                                    # doctest: +SKIP
        >>> node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)                    # doctest: +SKIP
        >>> with fc.from_mpi(node) as comm:                                           # doctest: +SKIP
        ...     comm.allreduce(x)
    """
    _check(comm)
    config = Config.from_environment(environment(), **settings)
    rank, size = comm.Get_rank(), comm.Get_size()
    hosts = comm.allgather(host_name())
    meeting = server = None
    if rank == 0:
        meeting, server = open_meeting(size, len(set(hosts)) == 1, "from_mpi")
    meeting = comm.bcast(meeting, root=0)
    met = MetRank(meeting, rank, config.init_timeout_s, server)
    try:
        made = met.call(init, **settings)
    except BaseException as error:
        met.fail(what_it_raised(error))
        raise
    made.at_close(met.end)
    return made


def _check(comm: Any) -> None:
    """Refuses everything but an intracommunicator that this process is a rank of."""
    if not all(hasattr(comm, name) for name in ("Get_rank", "Get_size", "allgather", "bcast")):
        raise ArgumentError(
            f"from_mpi takes a communicator of mpi4py, such as MPI.COMM_WORLD, got {type(comm).__name__}"
        )
    if not comm:  # MPI.COMM_NULL
        raise ArgumentError(
            "from_mpi got MPI.COMM_NULL: this process is no rank of that communicator; call from_mpi on its "
            "ranks alone"
        )
    if comm.Is_inter():
        raise ArgumentError("from_mpi takes an intracommunicator; give comm.Merge() for an intercommunicator")
