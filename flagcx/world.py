"""The world communicator of this process: all ranks of the job."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from flagcx.bootstrap.mpi_process import MPI_PROCESS
from flagcx.bootstrap.serving import SERVING
from flagcx.bootstrap.thread_rank import thread_rank
from flagcx.communicator import Communicator
from flagcx.config import Config, check_settings, environment, unknown_settings
from flagcx.errors import (
    ArgumentError,
    CommunicationError,
    CommunicatorError,
    FlagcxError,
    PeerDiedError,
    PeerTimeoutError,
    ResourceError,
    text_of,
    what_it_raised,
)
from flagcx.forks import abandon_in_children

if TYPE_CHECKING:
    from flagcx.bootstrap.environment import Identity
    from flagcx.bootstrap.store import Store
    from flagcx.diagnosis.own_page import OwnPage
    from flagcx.topology import Topology

logger = logging.getLogger("flagcx")


class _World:
    """The communicator that ``init`` made, or what ``shrink`` has made of it: state of the rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.comm: Communicator | None = None
        self.store: Store | None = None
        self.page: OwnPage | None = None

    def abandon(self) -> None:
        """Frees the lock in a forked child: the thread that may hold it is not there."""
        self.lock = threading.Lock()

    def close(self) -> None:
        """Closes the communicator, if ``init`` made one."""
        if self.comm is not None:
            self.comm.close()

    def close_at_exit(self) -> None:
        """Closes the communicator as the process ends; after an error the exit code is 1."""
        if self.page is not None:
            self.page.record_uncaught()
        comm = self.comm
        kinds = {PeerDiedError: ""} if comm is None else comm.broken_by()  # None: fc.init() has failed
        lost = hasattr(sys, "last_value") or PeerDiedError in kinds
        try:
            self.close()
        except FlagcxError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            SERVING.hurry()
            SERVING.wait()
            os._exit(1)  # an exception raised here would not change the exit code
        MPI_PROCESS.leave(lost, bool(kinds))
        if kinds:
            SERVING.hurry()


_WORLD = _World()


def _world() -> _World:
    """The state of the calling rank: of the process, or of one of its threads."""
    rank = thread_rank.get()
    if rank is None:
        return _WORLD
    if rank.world is None:
        rank.world = _World()
        rank.on_end.append(rank.world.close)
    return rank.world


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str = "",
    key: str = "",
    enable_topology_detection: bool = True,
    **settings: Any,
) -> Communicator:
    """Joins the ranks of the job and returns the communicator of all of them.

    The process's rank and the number of ranks come from its launcher: ``flagcx run``, ``fc.launch``, Open
    MPI's or MPICH's ``mpirun``, Slurm's ``srun`` or torchrun. A process that none of them started is the
    only rank. In a thread of ``fc.launch(..., threads=True)`` that thread is the rank. Processes that
    something else has started (a pool, a scheduler's workers) are told their place.

    As long as the communicator is open, a further call returns it again. The settings of the first call
    hold; a further call that asks for others warns (``RuntimeWarning``). After an error, of this rank or of
    another one, a further call makes a new communicator, when all ranks have called it; under
    ``flagcx run --elastic`` lost ranks that were started again take part, and ranks that will not be are left
    out.

    Args:
        rank: This process's rank, from 0, where the program tells and no launcher; with ``size``.
        size: Number of ranks.
        address: ``host:port`` at which the others meet rank 0: any free port, the same on all ranks;
            ``127.0.0.1:port`` where all ranks are on one host.
        key: A secret of the ranks, for ranks on several hosts: at least 16 bytes in hexadecimal digits, such
            as ``secrets.token_hex(16)``, made once and handed to all.
        enable_topology_detection: Whether the machine's links are detected when they are first needed.
        settings: Fields of ``fc.Config``, such as ``timeout_s=60``; they win over ``FLAGCX_*`` variables.

    Returns:
        The communicator of all ranks.

    Raises:
        BootstrapError: The ranks did not find each other.
        CommunicatorError: This process is a child that a rank has forked.
        PeerDiedError: A rank died before all had joined.
        ArgumentError: An argument is no setting, or has a value that none has; also in a further call.

    Example:
        >>> comm = fc.init(rank=1, size=4, address="127.0.0.1:29400")  # doctest: +SKIP
        >>> comm = fc.init()      # doctest: +SKIP
        >>> comm.allreduce(x)     # doctest: +SKIP
    """
    check_settings(settings, ("rank", "size", "address", "key"))
    if not isinstance(enable_topology_detection, bool):
        raise ArgumentError(
            f"enable_topology_detection must be True or False, got {enable_topology_detection!r}"
        )
    settings = {"topology_detection": enable_topology_detection, **settings}
    environ = environment()
    if (rank, size, address, key) != (None, None, "", ""):
        from flagcx.arguments import check_place
        from flagcx.bootstrap.environment import place_given

        rank, size = check_place(rank, size, address, key)
        environ = place_given(environ, rank, size, address, key)
    world = _world()
    with world.lock:
        comm = world.comm
        _refuse_in_child(comm)
        if comm is None or comm.is_lost():
            config = Config.from_environment(environ, **settings)
            if comm is not None:
                _close_lost(comm)
            elif world is _WORLD:
                SERVING.arm()
                atexit.register(world.close_at_exit)
                MPI_PROCESS.before_end = world.close
                abandon_in_children(world)
                sys.excepthook = partial(_tell_of_uncaught, sys.excepthook)
            world.comm = comm = _join(config, environ)
            comm.on_shrink = partial(setattr, world, "comm")
        else:
            if rank is not None and (rank, size) != (comm.rank, comm.size):
                raise ArgumentError(
                    f"init(rank={rank}, size={size}): this process is rank {comm.rank} of {comm.size} "
                    f"already; close that communicator before, or use comm.split for a part of its ranks"
                )
            _warn_of_others(settings, comm.config)
        return comm


def _close_lost(comm: Communicator) -> None:
    """Closes a communicator that was lost; who joins anew knows that, so its last error is only logged."""
    try:
        comm.close()
    except CommunicationError as error:
        logger.warning("the communicator before ended with an error that no call had told of: %s", error)


def _refuse_in_child(comm: Communicator | None) -> None:
    """Refuses a forked child that would join as the rank that its parent is."""
    if comm is not None and comm.forked and comm.size > 1:
        raise CommunicatorError(
            f"fc.init() was called in a child that rank {comm.rank} of {comm.size} forked, and that is its "
            f"parent; call it in the parent alone, or fork before and call it in the child alone, or start "
            f"further ranks with flagcx run or fc.launch"
        )


def _tell_of_uncaught(before: Callable[..., object], kind: type, error: BaseException, trace: Any) -> None:
    """The hook for an exception that ends the main thread: the peers learn of it at once.

    The process may live on: Python waits for its threads and for processes of ``multiprocessing``, and closes
    the communicator only then. The launcher is told so.
    """
    before(kind, error, trace)
    comm = _WORLD.comm
    if comm is not None and not comm.closed and _is_waited_for():
        comm.abort(f"{kind.__name__}: {text_of(error)}")
        if _WORLD.store is not None:
            from flagcx.bootstrap.rendezvous import leave

            leave(_WORLD.store, lives_on=True)


def _is_waited_for() -> bool:
    """Whether Python waits for something else before it ends this process."""
    main, multiprocessing = threading.main_thread(), sys.modules.get("multiprocessing")
    children = multiprocessing.active_children() if multiprocessing is not None else []
    threads = (thread for thread in threading.enumerate() if thread is not main)
    return any(not one.daemon for one in (*threads, *children))


def _warn_of_others(wanted: dict[str, Any], config: Config) -> None:
    """Checks the settings of a further call, and warns of them: they have no effect."""
    replace(config, **wanted)
    # True is the default of ``init``, so the caller may not have asked for it.
    ignored = {
        name: value
        for name, value in wanted.items()
        if value != getattr(config, name) and (name, value) != ("topology_detection", True)
    }
    if ignored:
        asked = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        kept = ", ".join(f"{name}={getattr(config, name)!r}" for name in ignored)
        warnings.warn(
            f"init({asked}) has no effect: this process has joined its job already, with {kept}; close that "
            f"communicator before, or give the settings to the first init",
            RuntimeWarning,
            stacklevel=3,
        )


def get_topology() -> Topology:
    """The topology of this machine: its GPUs, sockets and network cards, and the links between them.

    Returns:
        A ``Topology``, detected once in a process. ``topology["nvlink_peers"][0]`` and
        ``topology["pcie_peers"][0]`` are the peers of GPU 0 by NVLink and by PCIe; without a GPU 0 they
        raise ``TopologyError``, which is a ``KeyError`` too.

    Raises:
        CommunicatorError: Detection is switched off: ``fc.init(enable_topology_detection=False)``.

    Example:
        >>> comm = fc.init(enable_topology_detection=True)  # doctest: +SKIP
        >>> fc.get_topology()["nvlink_peers"][0]            # doctest: +SKIP
        [1, 2, 3]
    """
    comm = _world().comm
    if comm is not None and not comm.config.topology_detection:
        raise CommunicatorError(
            "topology detection is switched off; close the communicator and use "
            "fc.init(enable_topology_detection=True), or "
            "flagcx.topology.detect() to look all the same"
        )
    return _detected()


@lru_cache(maxsize=1)
def _detected() -> Topology:
    from flagcx.topology import detect

    return detect()


def _join(config: Config, environ: Mapping[str, str]) -> Communicator:
    """Joins the job; where lost ranks are started again, as often as ranks are lost meanwhile."""
    deadline = time.monotonic() + config.init_timeout_s
    while True:
        try:
            return _join_once(config, environ)
        except _LostWhileJoining as lost:
            if time.monotonic() >= deadline:
                raise lost.error from None
        except (OSError, RuntimeError, ImportError, MemoryError) as error:
            if not isinstance(error, FlagcxError) and _is_exhausted(error):
                raise ResourceError(
                    f"fc.init() has no room left in this process ({error}); allow it more descriptors "
                    f"(ulimit -n), threads (ulimit -u) or memory (ulimit -v)"
                ) from error
            raise


def _is_exhausted(error: Exception) -> bool:
    """Whether an error of the system's means that a limit of the process was met."""
    if isinstance(error, ImportError):  # of a library for which no memory is left
        return "failed to map segment" in str(error) or "cannot allocate memory" in str(error).lower()
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
    return "start new thread" in str(error)


class _LostWhileJoining(Exception):
    """A rank was lost before all had joined, and the ranks of this job meet again."""

    def __init__(self, error: CommunicationError) -> None:
        super().__init__(str(error))
        self.error = error


def _meet(config: Config, environ: Mapping[str, str]) -> tuple[Store, Identity]:
    """This rank's end of the store of its job, and its place in the job."""
    from flagcx.bootstrap.environment import identify, launched_by_mpi, located
    from flagcx.bootstrap.rendezvous import connect

    thread = thread_rank.get()
    if thread is not None:
        store, identity = thread.store, thread.identity
    else:
        identity = identify(environ)
        if identity.rank == 0:
            for text in unknown_settings(environ):
                logger.warning("%s", text)
        MPI_PROCESS.launched = launched_by_mpi(identity, environ)
        store = _WORLD.store = connect(identity, config, environ)
    if not identity.local_size:
        told = store.scoped("located/").exchange("fc.init()", identity.host.encode(), config.init_timeout_s)
        identity = located(identity, [host.decode() for host in told])
    return store, identity


def _generation(store: Store, config: Config) -> list[int]:
    """The ranks with which an elastic job goes on.

    A rank that was started again waits for those that live as long as calls wait: they may be in the middle
    of a step, and learn of the loss at its end.
    """
    return list(store.agree("fc.init()", b"", max(config.init_timeout_s, config.timeout_s)))


def _join_once(config: Config, environ: Mapping[str, str]) -> Communicator:
    from flagcx.bootstrap.rendezvous import leave
    from flagcx.diagnosis.own_page import OwnPage
    from flagcx.transport.device import bind_local_device

    thread, limit_s = thread_rank.get(), config.init_timeout_s
    if thread is not None and not thread.own_process:
        config = replace(config, transport=config.transport or "threads")
    store, identity = _meet(config, environ)
    page = _world().page = OwnPage(store, identity, config)
    try:
        bind_local_device(identity.local_rank, config.share_gpu)
        members = _generation(store, config) if store.elastic else None
        scope = store.scoped("world/", members)
        hosts = page.join(scope.exchange("fc.init()", page.card(), limit_s), scope.in_job()[1])
        store.stand_by(limit_s)

        def exchange(value: bytes) -> list[bytes]:
            return scope.exchange("communicator", value, limit_s)

        comm = Communicator(scope.rank, scope.size, exchange, hosts, config, scope)
    except BaseException as error:
        store.abort(f"its fc.init() failed: {what_it_raised(error)}", returns=True)
        page.close()
        late = isinstance(error, PeerTimeoutError)
        if store.elastic and isinstance(error, CommunicationError) and not late:
            raise _LostWhileJoining(error) from None
        raise
    comm.at_close(page.close)
    if thread is None:
        comm.at_close(lambda: leave(store))
    if thread is None or thread.own_process:
        world = _world()
        store.blames = lambda: "" if world.comm is None else world.comm.blames
    return comm
