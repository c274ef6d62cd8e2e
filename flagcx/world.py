"""The world communicator of this process: all ranks of the job."""

from __future__ import annotations

import atexit
import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from flagcx.communicator import Communicator
from flagcx.config import Config, environment
from flagcx.errors import ArgumentError

if TYPE_CHECKING:
    from flagcx.bootstrap.store import Store


class _World:
    """What ``init`` made. State of the process by nature: it has one place in its job."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.comm: Communicator | None = None
        self.store: Store | None = None

    def close(self) -> None:
        """Closes the communicator and the connection to the store. Idempotent."""
        with self.lock:
            if self.comm is not None:
                self.comm.close()
            if self.store is not None:
                self.store.close()
            self.comm = self.store = None


_WORLD = _World()


def init(*, enable_topology_detection: bool = True, **settings: Any) -> Communicator:
    """Joins the ranks of the job and returns the communicator of all of them.

    Who this rank is comes from what started it: ``flagcx run``, ``fc.launch``, Open MPI's or MPICH's
    ``mpirun``, Slurm's ``srun``, torchrun; started alone, it is the only rank. A second call returns the
    same communicator, as long as it is open.

    Args:
        enable_topology_detection: Whether to look at the machine's links when they are first needed.
        settings: Fields of ``fc.Config``, such as ``timeout_s=60``; they win over ``FLAGCX_*`` variables.

    Raises:
        BootstrapError: The ranks did not find each other.
        PeerDiedError: A rank died meanwhile.
        ArgumentError: There is no such setting.

    Example:
        >>> comm = fc.init()      # doctest: +SKIP
        >>> comm.allreduce(x)     # doctest: +SKIP
    """
    known = [field.name for field in fields(Config)]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ArgumentError(f"init has no setting {unknown[0]!r}; expected one of {', '.join(known)}")
    with _WORLD.lock:
        if _WORLD.comm is None or _WORLD.comm.closed:
            config = Config.from_environment(topology_detection=enable_topology_detection, **settings)
            _WORLD.comm, _WORLD.store = _join(config)
            atexit.register(_WORLD.close)
        return _WORLD.comm


def _join(config: Config) -> tuple[Communicator, Store]:
    from flagcx.bootstrap.environment import identify
    from flagcx.bootstrap.rendezvous import connect
    from flagcx.transport.device import bind_local_device

    environ = environment()
    identity = identify(environ)
    store = connect(identity, config, environ)
    try:
        hosts = [
            raw.decode() for raw in store.exchange("hosts", identity.host.encode(), config.init_timeout_s)
        ]

        def exchange(value: bytes) -> list[bytes]:
            return store.exchange("communicator", value, config.init_timeout_s)

        bind_local_device(identity.local_rank, config.share_gpu)
        scope = store.scoped("world/")
        return Communicator(identity.rank, identity.size, exchange, hosts, config, scope), store
    except BaseException:
        store.close()
        raise
