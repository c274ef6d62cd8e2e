"""How the ranks of a job find their store.

===========================  =====================================================================
started by                   where the store is, and how the other ranks find it
===========================  =====================================================================
alone                        in the process itself; no socket
flagcx run, fc.launch        in the launcher, which sets ``FLAGCX_STORE_ADDRESS`` and
                             ``FLAGCX_STORE_KEY`` for its ranks
any other, with              in rank 0, at that address (``host:port``); several hosts need
``FLAGCX_STORE_ADDRESS``     ``FLAGCX_STORE_KEY`` too; so do ``fc.init(rank=, ...)``'s
                             ``address=`` and ``key=``
any other, one host          in rank 0, on an abstract Unix socket, whose name is in a file that only
                             this user can read, until all ranks are connected
torchrun, several hosts      in rank 0, on the first free port after ``MASTER_PORT`` at
                             ``MASTER_ADDR``, with ``FLAGCX_STORE_KEY``
mpirun, srun, several hosts  in rank 0, on TCP; MPI broadcasts the addresses and the key
===========================  =====================================================================

A file or port of another job does no harm: a rank joins only a store that proves to know the key, and a
store takes only ranks that do. The key is a secret of the job: random, and handed over by the launcher, by a
file that this user alone can read, or by MPI; where there is none of these, the user sets it. On a Unix
socket both ends also see that the other is the same user. When the rank that serves the store is lost,
another one does (``takeover.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flagcx.bootstrap.announcement import (
    Place,
    private_directory,
    read_file,
    remove_stale_files,
    unusable,
    write_file,
)
from flagcx.bootstrap.environment import GIVEN, Identity, of_the_job
from flagcx.bootstrap.key import read_key
from flagcx.bootstrap.mpi_process import broadcast
from flagcx.bootstrap.other_directory import OtherDirectory
from flagcx.bootstrap.remote_store import RefusedError, RemoteStore
from flagcx.bootstrap.serving import SERVING
from flagcx.bootstrap.sockets import distance_from, own_addresses, told_addresses
from flagcx.bootstrap.store import LocalStore, Store, StoreServer
from flagcx.config import Config
from flagcx.errors import BootstrapError, what_it_raised

_ADDRESS = "FLAGCX_STORE_ADDRESS"
_KEY = "FLAGCX_STORE_KEY"
_PORTS_TRIED = 16
_FREED_S = 5.0
"""How long rank 0 waits for an address that another process has just served at, in seconds."""


def connect(identity: Identity, config: Config, environ: Mapping[str, str]) -> Store:
    """Connects a rank to its job's store, starting the store where that is this rank's part.

    Args:
        identity: This rank's place in the job.
        config: Its ``init_timeout_s`` bounds the search.
        environ: The environment, as from ``config.environment()``.

    Returns:
        The store. When the process ends it is closed, or aborted with the exception that ended the process.

    Raises:
        BootstrapError: The store cannot be found or reached in time, or refused this rank.
        MissingDependencyError: mpi4py is needed (several hosts under mpirun or srun) and not installed.
    """
    if identity.size == 1:
        return LocalStore()
    environ = of_the_job(environ)
    deadline = time.monotonic() + config.init_timeout_s
    job = _job_of(identity, *map(environ.get, (_ADDRESS, _KEY, "MASTER_ADDR", "MASTER_PORT")))
    job.timeout_s = config.timeout_s
    if identity.launcher == "flagcx":
        search = _announced(environ)
    elif identity.rank == 0:
        search = _host(identity, environ, job, deadline)
    else:
        search = _search(identity, environ, deadline)
    try:
        job.store = _join(identity, search, deadline)
    except BaseException:
        if job.server is not None:
            job.server.close()
        raise
    return job.store


def join_told(identity: Identity, addresses: Sequence[str], key: bytes, timeout_s: float) -> RemoteStore:
    """Connects a rank to a store of whose addresses the program has told it.

    Raises:
        BootstrapError: None of them is a store of this key, or it refused this rank.
    """
    nearest = sorted(addresses, key=distance_from(own_addresses())) if len(addresses) > 1 else addresses
    places = (Place(address, key) for address in nearest)
    return _join(identity, _fixed(*places), time.monotonic() + timeout_s)


class _Job:
    """This process's part in a job, whose world may be closed and made again.

    Attributes:
        server: The store's server, if this process runs it. It stays until the process ends: a rank may come
            back to it while another has yet to leave.
        store: Its latest end of the store.
        timeout_s: The time-out of its calls.
    """

    def __init__(self) -> None:
        self.server: StoreServer | None = None
        self.store: RemoteStore | None = None
        self.timeout_s = 0.0
        SERVING.arm()
        atexit.register(self.end)

    def end(self) -> None:
        """Leaves as the process ends; where it runs the store, that goes on."""
        server, failed = self.server, False
        if self.store is not None:
            failed = bool(self.store.blames())
            leave(self.store)
            server = server or self.store.server
        SERVING.go_on(server, self.timeout_s, failed)


@cache
def _job_of(identity: Identity, *told: str | None) -> _Job:
    """The job of a place, by what this process was told about where the store is."""
    return _Job()


class _Search(NamedTuple):
    """How the store is looked for.

    Attributes:
        places: Gives the places where it may be by now.
        remedy: What may be wrong if it never has one.
    """

    places: Callable[[], list[Place]]
    remedy: str = "Did rank 0 start, and call init?"


def _join(identity: Identity, search: _Search, deadline: float) -> RemoteStore:
    """Tries the places of the search until a store proves to be the job's."""
    pause_s, patience_s, reason = 0.001, 1.0, "rank 0 has not said where it is"
    while True:
        places = search.places()
        for place in places:
            # Of several addresses some may be unreachable, which a connection finds out only by a time-out.
            longest_s = (
                math.inf if identity.launcher == "flagcx" else 10.0 if len(places) == 1 else patience_s
            )
            patience_s = min(2 * patience_s, 10.0) if place is places[-1] else patience_s
            longest_s = max(0.1, min(longest_s, deadline - time.monotonic()))
            try:
                return RemoteStore(*place, identity.rank, identity.size, longest_s)
            except RefusedError:
                raise
            except BootstrapError as error:
                reason = str(error)
                if identity.launcher == "flagcx":
                    raise
        if time.monotonic() >= deadline:
            raise BootstrapError(
                f"rank {identity.rank} of {identity.size} (started by {identity.launcher}) did not find the "
                f"store of job {identity.job!r} in time: {reason}. {search.remedy}",
                rank=0,
            )
        time.sleep(pause_s)
        pause_s = min(0.02, pause_s * 2)


def _announced(environ: Mapping[str, str]) -> _Search:
    missing = [name for name in (_ADDRESS, _KEY) if name not in environ]
    if missing:
        raise BootstrapError(
            f"FLAGCX_RANK is set but {' and '.join(missing)} not; start the ranks with flagcx run or "
            f"fc.launch, or unset the FLAGCX_* variables to run alone"
        )
    return _fixed(Place(environ[_ADDRESS], _key(environ)))


def _fixed(*places: Place) -> _Search:
    return _Search(lambda: list(places))


def _key(environ: Mapping[str, str]) -> bytes:
    """``FLAGCX_STORE_KEY``: a secret of the job's ranks, without which strangers could join.

    Raises:
        BootstrapError: It is not set, or is no key.
    """
    if _KEY not in environ:
        raise BootstrapError(
            f"{_KEY} is not set, and whoever reaches rank 0's port from another host could join the job; "
            f"make a key (python -c 'import secrets; print(secrets.token_hex(16))') and set {_KEY} to it on "
            f"all ranks, or give it to fc.init(key=); ranks of one host meet at 127.0.0.1 without one"
        )
    try:
        return read_key(environ[_KEY])
    except ValueError as error:
        raise BootstrapError(f"{_KEY} {error}") from None


def _host(identity: Identity, environ: Mapping[str, str], job: _Job, deadline: float) -> _Search:
    """Rank 0's part where it runs the store: starts it, unless it runs, and lets the other ranks find it."""

    def own() -> list[Place]:
        if job.server is None or job.server.ended:
            job.server = _start(identity, environ)
            show(job.server)
        address = job.server.address.replace("tcp:0.0.0.0:", "tcp:127.0.0.1:")
        return [Place(address, job.server.authkey)]

    def show(server: StoreServer) -> None:
        if _meets_by_file(identity, environ):
            _show_by_file(server, _file(identity, environ))
        elif _ADDRESS not in environ and identity.launcher != "torchrun":
            told = {"addresses": told_addresses(server.address), "key": server.authkey.hex()}
            broadcast(identity, told, deadline - time.monotonic())

    if job.server is not None and not job.server.ended:
        show(job.server)
    return _Search(own)


def _start(identity: Identity, environ: Mapping[str, str]) -> StoreServer:
    if _ADDRESS in environ:
        key = None if _meets_by_file(identity, environ) else _key(environ)
        return _serve_at(identity, environ[_ADDRESS], key)
    if _meets_by_file(identity, environ):
        return _serve(identity, None, None)
    if identity.launcher == "torchrun":
        return _serve_at_master(identity, environ)
    return _serve(identity, "0.0.0.0:0", secrets.token_bytes(32))


def _search(identity: Identity, environ: Mapping[str, str], deadline: float) -> _Search:
    """The other ranks' part."""
    if _meets_by_file(identity, environ):
        path = _file(identity, environ)
        remedy = (
            f"Rank 0 writes {path} when it calls init; if TMPDIR or XDG_RUNTIME_DIR differs between the "
            f"ranks, set it alike, or set {_ADDRESS}=127.0.0.1:PORT and {_KEY} on all; if rank 0 was given "
            f"a key, give it to this rank too"
        )
        other = OtherDirectory(identity, path.name)
        return _Search(lambda: read_file(path) or other.places(), remedy)
    if _ADDRESS in environ:
        return _fixed(Place(environ[_ADDRESS], _key(environ)))
    if identity.launcher == "torchrun":
        key = _key(environ)
        return _fixed(*(Place(address, key) for address in _master_addresses(environ)))
    message = broadcast(identity, None, deadline - time.monotonic())
    nearest = sorted(message["addresses"], key=distance_from(own_addresses()))
    return _fixed(*(Place(address, bytes.fromhex(message["key"])) for address in nearest))


def _meets_by_file(identity: Identity, environ: Mapping[str, str]) -> bool:
    """Whether the ranks find address and key in a file: all are on one host, and the user has set no key."""
    return identity.local_size == identity.size and not (_ADDRESS in environ and _KEY in environ)


def _serve(identity: Identity, address: str | None, authkey: bytes | None) -> StoreServer:
    moves = identity.launcher == GIVEN
    return StoreServer(identity.size, address, authkey, host="rank 0", host_rank=0, moves=moves).start()


def _serve_at(identity: Identity, address: str, authkey: bytes | None) -> StoreServer:
    """Listens at an address; one at which the rank 0 of before still serves others is waited for."""
    end = time.monotonic() + _FREED_S
    while True:
        try:
            return _serve(identity, address, authkey)
        except BootstrapError:
            if identity.launcher != GIVEN or time.monotonic() >= end:
                raise
            time.sleep(_FREED_S / 100)


def leave(store: Store, lives_on: bool = False) -> None:
    """Leaves the store as this process ends: in good order, or with the exception that ends it.

    After an uncaught exception (which Python keeps as ``sys.last_value``) the ranks that wait for this one
    get a ``PeerDiedError`` with its text.

    Args:
        store: The store.
        lives_on: Whether a thread keeps the process alive for now.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        store.close()
    else:
        store.abort(what_it_raised(error), lives_on)


# One host: a file.


def _show_by_file(server: StoreServer, path: Path) -> None:
    """Leaves a file for the other ranks, until all of them have come or this process ends."""
    owner = os.getpid()

    def remove() -> None:
        atexit.unregister(remove)
        if os.getpid() == owner:  # not as a forked child ends
            with contextlib.suppress(OSError):
                path.unlink()

    remove_stale_files(path.parent)
    server.when_complete(remove)
    atexit.register(remove)
    try:
        write_file(path, Place(server.address, server.authkey))
    except OSError as error:
        server.close()
        raise unusable(path, error) from error


def _file(identity: Identity, environ: Mapping[str, str]) -> Path:
    name = hashlib.sha256(f"{identity.job}\0{identity.host}".encode()).hexdigest()[:32]
    return private_directory(environ) / f"{name}.json"


# Several hosts: torchrun.


def _serve_at_master(identity: Identity, environ: Mapping[str, str]) -> StoreServer:
    """Listens at MASTER_ADDR on a port after MASTER_PORT, which is torch's own."""
    key = _key(environ)
    problem: BootstrapError | None = None
    for address in _master_addresses(environ):
        # The name may be one by which only other hosts know this host; then listen on all interfaces.
        for candidate in (address, f"0.0.0.0:{address.rpartition(':')[2]}"):
            try:
                return _serve(identity, candidate, key)
            except BootstrapError as error:
                problem = problem or error
    raise BootstrapError(
        f"no port from {_master_addresses(environ)[0]} on is free for the store ({problem}); set {_ADDRESS} "
        f"to host:port of rank 0 on all ranks",
        rank=0,
    )


def _master_addresses(environ: Mapping[str, str]) -> list[str]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise BootstrapError(
            f"the ranks are on several hosts and {' and '.join(missing)} is not set; start them with "
            f"torchrun, or set {_ADDRESS} to host:port of rank 0 on all ranks"
        )
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536 - _PORTS_TRIED:
        raise BootstrapError(f"MASTER_PORT={port!r} is no port number below {65536 - _PORTS_TRIED}")
    host = f"[{host}]" if ":" in host else host
    return [f"tcp:{host}:{int(port) + step}" for step in range(1, _PORTS_TRIED + 1)]
