"""A communicator for processes that ``torch.distributed`` has joined already.

The ranks find each other through the store of torch's process group: there the group's rank 0 says where
flagcx's own store is, through which they then learn of each other's memory and death. At the end they tell
each other whether it worked; where it did not for one of them, none uses flagcx.
"""

from __future__ import annotations

import atexit
import json
import logging
import weakref
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore

from flagcx.bootstrap.environment import host_name
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.rendezvous import leave
from flagcx.bootstrap.store import LocalStore, Store, StoreServer
from flagcx.communicator import Communicator
from flagcx.config import Config
from flagcx.errors import BootstrapError, FlagcxError

logger = logging.getLogger("flagcx")

_LINGER_S = 1.0


class Bond:
    """What joins the ranks of a process group in flagcx.

    Args:
        comm: The communicator.
        store: The rank's end of the store.
        server: The store itself, on the group's rank 0.
    """

    def __init__(self, comm: Communicator, store: Store, server: StoreServer | None) -> None:
        self.comm, self._store, self._server = comm, store, server
        atexit.register(_end, weakref.ref(self))

    def close(self, linger_s: float = 0.0) -> None:
        """Leaves in good order; rank 0 serves on for those who are not done. Idempotent.

        Args:
            linger_s: How long rank 0 waits for them, in seconds.
        """
        self.comm.close()
        leave(self._store)
        server, self._server = self._server, None
        if server is not None:
            server.close_when_idle()
            if linger_s:
                server.join(linger_s)
                server.close()


def _end(reference: weakref.ref[Bond]) -> None:
    bond = reference()
    if bond is not None:
        bond.close(_LINGER_S)


class _Table:
    """What the ranks write down for each other in torch's store, for one attempt to join.

    Args:
        store: The process group's store.
        rank: This rank of the group.
        size: Number of ranks.
        timeout_s: How long to wait for a rank, in seconds.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        attempt = store.add(f"flagcx/attempts/{rank}", 1)
        self._store = PrefixStore(f"flagcx/{attempt}", store)
        self.rank, self.size, self._timeout = rank, size, timedelta(seconds=timeout_s)

    def tell(self, key: str, value: str) -> None:
        """Writes a value down."""
        self._store.set(key, value)

    def hear(self, key: str) -> str:
        """Reads a value, waiting for it if need be."""
        self._store.wait([key], self._timeout)
        return self._store.get(key).decode()

    def exchange(self, name: str, value: str) -> list[str]:
        """Every rank's value."""
        self.tell(f"{name}/{self.rank}", value)
        return [self.hear(f"{name}/{q}") for q in range(self.size)]


def join(store: Any, rank: int, size: int, config: Config) -> Bond | None:
    """Joins the ranks of a process group.

    Args:
        store: The process group's store.
        rank: This rank of the group.
        size: Number of ranks.
        config: Settings; ``init_timeout_s`` bounds how long ranks wait for each other.

    Returns:
        The bond; or None, on every rank, where flagcx cannot join them.
    """
    table = _Table(store, rank, size, config.init_timeout_s)
    hosts = table.exchange("host", host_name())
    if len(set(hosts)) > 1:
        logger.debug("torch's own backend serves this group: its ranks are on %d hosts", len(set(hosts)))
        return None
    bond, problem = None, ""
    try:
        bond = _join(table, hosts, config)
    except (FlagcxError, OSError) as error:
        problem = f"rank {rank}: {error}"
    problems = [text for text in table.exchange("outcome", problem) if text]
    if not problems:
        return bond
    logger.debug("torch's own backend serves this group: %s", problems[0])
    if bond is not None:
        bond.close()
    return None


def _join(table: _Table, hosts: list[str], config: Config) -> Bond:
    rank, size, limit = table.rank, table.size, config.init_timeout_s
    server = _serve(table) if rank == 0 and size > 1 else None
    try:
        own = _connect(table, limit)
        try:

            def exchange(value: bytes) -> list[bytes]:
                return own.exchange("communicator", value, limit)

            comm = Communicator(rank, size, exchange, hosts, config, own.scoped("group/"))
        except BaseException as error:
            own.abort(f"joining failed: {error}")
            raise
    except BaseException:
        if server is not None:
            server.close()
        raise
    return Bond(comm, own, server)


def _serve(table: _Table) -> StoreServer:
    try:
        server = StoreServer(table.size, host="rank 0", host_rank=0).start()
    except BaseException as error:
        table.tell("store", json.dumps({"error": str(error)}))
        raise
    table.tell("store", json.dumps({"address": server.address, "key": server.authkey.hex()}))
    return server


def _connect(table: _Table, timeout_s: float) -> Store:
    if table.size == 1:
        return LocalStore()
    where = json.loads(table.hear("store"))
    if "error" in where:
        raise BootstrapError(f"rank 0 could not serve the store: {where['error']}", rank=0)
    return RemoteStore(where["address"], bytes.fromhex(where["key"]), table.rank, table.size, timeout_s)
