"""A communicator for processes that ``torch.distributed`` has joined already.

The ranks find each other through the store of torch's process group: there the group's rank 0 writes the
address of flagcx's own store, which serves the communicator, and its key. At the end the ranks exchange
whether they succeeded; if one of them did not, such as for want of a transport between hosts, none uses
flagcx.
"""

from __future__ import annotations

import atexit
import json
import logging
import weakref
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore

from flagcx.bootstrap.environment import Identity, host_name
from flagcx.bootstrap.meeting import open_meeting
from flagcx.bootstrap.rendezvous import join_told, leave
from flagcx.bootstrap.serving import SERVING
from flagcx.bootstrap.store import LocalStore, Store, StoreServer
from flagcx.communicator import Communicator
from flagcx.config import Config
from flagcx.errors import BootstrapError, FlagcxError
from flagcx.transport.registry import MissingTransport

logger = logging.getLogger("flagcx")

_JOB = "a process group of torch's"


class GroupCommunicator:
    """The communicator of a process group, with the store that serves it: on rank 0 also its server."""

    def __init__(self, comm: Communicator, store: Store, server: StoreServer | None) -> None:
        self.comm, self._store, self._server = comm, store, server
        SERVING.arm()
        atexit.register(_end, weakref.ref(self))

    def close(self) -> None:
        """Closes the communicator; on rank 0 the store goes on until the others have left."""
        self.comm.close()
        leave(self._store)
        server, self._server = self._server, None
        SERVING.go_on(server, self.comm.config.timeout_s, bool(self.comm.blames))


def _end(reference: weakref.ref[GroupCommunicator]) -> None:
    group = reference()
    if group is not None:
        group.close()


class _Values:
    """Values that the ranks exchange through torch's store, in one attempt to join."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        attempt = store.add(f"flagcx/attempts/{rank}", 1)
        self._store = PrefixStore(f"flagcx/{attempt}", store)
        self.rank, self.size, self._timeout = rank, size, timedelta(seconds=timeout_s)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> str:
        """Reads a value, after waiting for it if it is not there."""
        self._store.wait([key], self._timeout)
        return self._store.get(key).decode()

    def exchange(self, name: str, value: str) -> list[str]:
        self.set(f"{name}/{self.rank}", value)
        return [self.get(f"{name}/{q}") for q in range(self.size)]


def join(store: Any, rank: int, size: int, config: Config) -> GroupCommunicator | None:
    """Joins the ranks of a process group.

    Args:
        store: The process group's store.
        rank: This rank of the group.
        size: Number of ranks.
        config: Settings; ``init_timeout_s`` bounds how long ranks wait for each other.

    Returns:
        The communicator; or None, on every rank, where flagcx cannot join them.
    """
    values = _Values(store, rank, size, config.init_timeout_s)
    hosts = values.exchange("host", host_name())
    group, problem = None, ""
    try:
        group = _join(values, hosts, config)
    except (FlagcxError, OSError) as error:
        problem = f"rank {rank}: {error}"
    problems = [text for text in values.exchange("outcome", problem) if text]
    if not problems:
        return group
    logger.debug("torch's own backend serves this group: %s", problems[0])
    if group is not None:
        group.close()
    return None


def _join(values: _Values, hosts: list[str], config: Config) -> GroupCommunicator:
    rank, size, limit = values.rank, values.size, config.init_timeout_s
    with ExitStack() as undo:
        server = None
        if rank == 0 and size > 1:
            server = _serve(values, len(set(hosts)) == 1)
            undo.callback(server.close)
        own = _connect(values, limit)
        undo.push(lambda kind, error, trace: own.abort(f"joining failed: {error}"))

        def exchange(value: bytes) -> list[bytes]:
            return own.exchange("communicator", value, limit)

        comm = Communicator(rank, size, exchange, hosts, config, own.scoped("group/"), "process group")
        undo.callback(comm.close)
        transport = comm._host.transport
        if isinstance(transport, MissingTransport):
            raise transport.why
        undo.pop_all()
    return GroupCommunicator(comm, own, server)


def _serve(values: _Values, one_host: bool) -> StoreServer:
    try:
        meeting, server = open_meeting(values.size, one_host, _JOB)
    except BaseException as error:
        values.set("store", json.dumps({"error": str(error)}))
        raise
    values.set("store", json.dumps({"addresses": meeting.addresses, "key": meeting.key.hex()}))
    return server


def _connect(values: _Values, timeout_s: float) -> Store:
    if values.size == 1:
        return LocalStore()
    where = json.loads(values.get("store"))
    if "error" in where:
        raise BootstrapError(f"rank 0 could not serve the store: {where['error']}", rank=0)
    me = Identity(values.rank, values.size, -1, 0, host_name(), _JOB, "torch")
    return join_told(me, where["addresses"], bytes.fromhex(where["key"]), timeout_s)
