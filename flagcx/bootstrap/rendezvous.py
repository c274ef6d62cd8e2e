"""How the ranks of a job find their store.

===========================  =====================================================================
started by                   where the store is, and how the other ranks find it
===========================  =====================================================================
alone                        in the process itself; no socket
flagcx run, fc.launch        in the launcher, which sets ``FLAGCX_STORE_ADDRESS`` and
                             ``FLAGCX_STORE_KEY`` for its ranks
any other, with              in rank 0, at that address (``host:port``)
``FLAGCX_STORE_ADDRESS``
any other, one host          in rank 0, on an abstract Unix socket, whose name is in a file that only
                             this user can read, until all ranks are connected
torchrun, several hosts      in rank 0, on the first free port after ``MASTER_PORT`` at
                             ``MASTER_ADDR``
mpirun, srun, several hosts  in rank 0, on TCP; MPI broadcasts the addresses and the key
===========================  =====================================================================

A file or port of another job does no harm: a rank joins only a store that proves to know the key.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flagcx.bootstrap.environment import Identity
from flagcx.bootstrap.remote_store import RefusedError, RemoteStore
from flagcx.bootstrap.sockets import distance_from, own_addresses, parse_address
from flagcx.bootstrap.store import LocalStore, Store, StoreServer
from flagcx.config import Config
from flagcx.errors import BootstrapError, MissingDependencyError

_ADDRESS = "FLAGCX_STORE_ADDRESS"
_KEY = "FLAGCX_STORE_KEY"
_PORTS_TRIED = 16
_ADDRESSES_TOLD = 64
_LINGER_S = 1.0


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
    deadline = time.monotonic() + config.init_timeout_s
    job = _job_of(identity, *map(environ.get, (_ADDRESS, _KEY, "MASTER_ADDR", "MASTER_PORT")))
    if identity.launcher == "flagcx":
        search = _announced(environ)
    elif identity.rank == 0:
        search = _host(identity, environ, job)
    else:
        search = _search(identity, environ)
    try:
        job.store = _join(identity, search, deadline)
    except BaseException:
        if job.server is not None:
            job.server.close()
        raise
    return job.store


class _Job:
    """This process's part in a job, whose world may be closed and made again.

    Attributes:
        server: The store's server, if this process runs it. It stays until the process ends: a rank may come
            back to it while another has yet to leave.
        store: Its latest end of the store.
    """

    def __init__(self) -> None:
        self.server: StoreServer | None = None
        self.store: RemoteStore | None = None
        atexit.register(self.end)

    def end(self) -> None:
        """Leaves as the process ends, and for a moment serves on the ranks that are not done yet."""
        if self.store is not None:
            leave(self.store)
        if self.server is not None:
            self.server.close_when_idle()
            self.server.join(_LINGER_S)
            self.server.close()


@cache
def _job_of(identity: Identity, *told: str | None) -> _Job:
    """The job of a place, by what this process was told about where the store is."""
    return _Job()


class _Place(NamedTuple):
    """Where a store may be, and the key that it must know."""

    address: str
    authkey: bytes


Search = Callable[[], list[_Place]]
"""Gives the places where the store may be by now."""


def _join(identity: Identity, search: Search, deadline: float) -> RemoteStore:
    """Tries the places of the search until a store proves to be the job's."""
    pause_s, patience_s, reason = 0.001, 1.0, "rank 0 has not said where it is"
    while True:
        places = search()
        for place in places:
            # Of several addresses some may be unreachable, which a connection finds out only by a time-out.
            longest_s = 10.0 if len(places) == 1 else patience_s
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
                f"store of job {identity.job!r} in time: {reason}. Did rank 0 start, and call init?",
                rank=0,
            )
        time.sleep(pause_s)
        pause_s = min(0.02, pause_s * 2)


def _announced(environ: Mapping[str, str]) -> Search:
    missing = [name for name in (_ADDRESS, _KEY) if name not in environ]
    if missing:
        raise BootstrapError(
            f"FLAGCX_RANK is set but {' and '.join(missing)} not; start the ranks with flagcx run or "
            f"fc.launch, or unset the FLAGCX_* variables to run alone"
        )
    return _fixed(_Place(environ[_ADDRESS], _key(environ)))


def _fixed(*places: _Place) -> Search:
    return lambda: list(places)


def _key(environ: Mapping[str, str], job: str = "") -> bytes:
    """``FLAGCX_STORE_KEY``, or else a key that follows from the job's name.

    The latter keeps other jobs out, not an attacker who knows the name; in a network that is not trusted, set
    ``FLAGCX_STORE_KEY``. (In no case does a store execute anything that it receives.)
    """
    if _KEY in environ:
        try:
            return bytes.fromhex(environ[_KEY])
        except ValueError:
            raise BootstrapError(f"{_KEY} must be hexadecimal digits, two for each byte") from None
    return hashlib.sha256(b"flagcx store key\0" + job.encode()).digest()


def _host(identity: Identity, environ: Mapping[str, str], job: _Job) -> Search:
    """Rank 0's part where it runs the store: starts it, unless it runs, and lets the other ranks find it."""
    if job.server is None or job.server.ended:
        job.server = _start(identity, environ)
    server = job.server
    if _ADDRESS not in environ and identity.local_size == identity.size:
        _show_by_file(server, _file(identity, environ))
    elif _ADDRESS not in environ and identity.launcher != "torchrun":
        port = server.address.rpartition(":")[2]
        addresses = [f"tcp:{address}:{port}" for address in own_addresses()[:_ADDRESSES_TOLD]]
        _broadcast(identity, {"addresses": addresses, "key": server.authkey.hex()})
    own = server.address.replace("tcp:0.0.0.0:", "tcp:127.0.0.1:")
    return _fixed(_Place(own, server.authkey))


def _start(identity: Identity, environ: Mapping[str, str]) -> StoreServer:
    if _ADDRESS in environ:
        return _serve(identity, environ[_ADDRESS], _key(environ, environ[_ADDRESS]))
    if identity.local_size == identity.size:
        return _serve(identity, None, None)
    if identity.launcher == "torchrun":
        return _serve_at_master(identity, environ)
    return _serve(identity, "0.0.0.0:0", secrets.token_bytes(32))


def _search(identity: Identity, environ: Mapping[str, str]) -> Search:
    """The other ranks' part."""
    if _ADDRESS in environ:
        return _fixed(_Place(environ[_ADDRESS], _key(environ, environ[_ADDRESS])))
    if identity.local_size == identity.size:
        path = _file(identity, environ)
        return lambda: _read_file(path)
    if identity.launcher == "torchrun":
        key = _key(environ, identity.job)
        return _fixed(*(_Place(address, key) for address in _master_addresses(environ)))
    message = _broadcast(identity, None)
    nearest = sorted(message["addresses"], key=distance_from(own_addresses()))
    return _fixed(*(_Place(address, bytes.fromhex(message["key"])) for address in nearest))


def _serve(identity: Identity, address: str | None, authkey: bytes | None) -> StoreServer:
    return StoreServer(identity.size, address, authkey, host="rank 0", host_rank=0).start()


def leave(store: Store) -> None:
    """Leaves the store as this process ends: in good order, or with the exception that ends it.

    After an uncaught exception (which Python keeps as ``sys.last_value``) the ranks that wait for this one
    get a ``PeerDiedError`` with its text.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        store.close()
    else:
        store.abort(f"it raised {type(error).__name__}: {str(error)[:500]}")


# One host: a file.


def _show_by_file(server: StoreServer, path: Path) -> None:
    """Leaves a file for the other ranks, until all of them have come or this process ends."""
    owner = os.getpid()

    def remove() -> None:
        atexit.unregister(remove)
        if os.getpid() == owner:  # not as a forked child ends
            with contextlib.suppress(OSError):
                path.unlink()

    _remove_stale_files(path.parent)
    server.when_complete(remove)
    atexit.register(remove)
    try:
        _write_file(path, {"address": server.address, "key": server.authkey.hex()})
    except BaseException:
        server.close()
        raise


def _file(identity: Identity, environ: Mapping[str, str]) -> Path:
    name = hashlib.sha256(f"{identity.job}\0{identity.host}".encode()).hexdigest()[:32]
    return private_directory(environ) / f"{name}.json"


def private_directory(environ: Mapping[str, str]) -> Path:
    """A directory of this user alone, made if it is not there.

    Raises:
        BootstrapError: It is another user's, or other users can enter it.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_private(Path(runtime)):
        directory = Path(runtime) / "flagcx"
    else:
        directory = Path(tempfile.gettempdir()) / f"flagcx-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not _is_private(directory):
        raise BootstrapError(
            f"{directory} must be a directory that user {os.getuid()} owns and nobody else can enter (mode "
            f"0700); remove it, or set XDG_RUNTIME_DIR to one that is"
        )
    return directory


def _is_private(directory: Path) -> bool:
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _write_file(path: Path, content: dict[str, str]) -> None:
    """Writes the file whole or not at all, in place of one that a dead job of this name may have left."""
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump(content, file)
    draft.replace(path)


def _remove_stale_files(directory: Path) -> None:
    """Removes files whose store has ended. (A store listens before its file is there.)"""
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError, IndexError), socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(parse_address(_read_file(path)[0].address)[1])
            except ConnectionRefusedError:
                path.unlink()


def _read_file(path: Path) -> list[_Place]:
    """Reads the file. One that a dead job left leads nowhere: its socket went with its process."""
    try:
        content = json.loads(path.read_text(encoding="ascii"))
        return [_Place(content["address"], bytes.fromhex(content["key"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return []


# Several hosts: torchrun.


def _serve_at_master(identity: Identity, environ: Mapping[str, str]) -> StoreServer:
    """Listens at MASTER_ADDR on a port after MASTER_PORT, which is torch's own."""
    key = _key(environ, identity.job)
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


# Several hosts: MPI.


def _broadcast(identity: Identity, message: dict | None) -> dict:
    """Sends rank 0's message to all ranks through MPI, as plain bytes."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependencyError(
            f"the ranks of this job, started by {identity.launcher}, are on several hosts; to find each "
            f"other they need mpi4py (pip install 'flagcx[mpi]'), or {_ADDRESS}=host:port of rank 0, on all"
        ) from error
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (identity.rank, identity.size):
        raise BootstrapError(
            f"mpi4py says rank {world.Get_rank()} of {world.Get_size()}, {identity.launcher} says rank "
            f"{identity.rank} of {identity.size}; install mpi4py for the MPI whose mpirun starts the ranks"
        )
    content = json.dumps(message).encode() if message is not None else b""
    buffer = bytearray(content.ljust(4096))
    world.Bcast([buffer, MPI.BYTE], root=0)
    return json.loads(buffer)
