"""How the ranks of a job find their store.

===========================  =====================================================================
started by                   where the store is, and how the others learn of it
===========================  =====================================================================
alone                        in the process itself; no socket
flagcx run, fc.launch        in the launcher, which tells its ranks by ``FLAGCX_STORE_ADDRESS`` and
                             ``FLAGCX_STORE_KEY``
any other, with              in rank 0, at that address (``host:port``)
``FLAGCX_STORE_ADDRESS``
any other, one host          in rank 0, on an abstract Unix socket; a file that only this user can
                             read says which, until all ranks are connected
torchrun, several hosts      in rank 0, on the first free port after ``MASTER_PORT`` at
                             ``MASTER_ADDR``
mpirun, srun, several hosts  in rank 0, on TCP; MPI broadcasts the addresses and the key
===========================  =====================================================================

A file or port of another job does no harm: a rank joins only a store that proves to know the key.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import stat
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flagcx.bootstrap.environment import Identity
from flagcx.bootstrap.remote_store import RefusedError, RemoteStore
from flagcx.bootstrap.sockets import parse_address
from flagcx.bootstrap.store import LocalStore, Store, StoreServer
from flagcx.config import Config
from flagcx.errors import BootstrapError, MissingDependencyError

_ADDRESS = "FLAGCX_STORE_ADDRESS"
_KEY = "FLAGCX_STORE_KEY"
_PORTS_TRIED = 16
_ADDRESSES_TOLD = 64
_LINGER_S = 1.0
_SIOCGIFADDR = 0x8915


def connect(identity: Identity, config: Config, environ: Mapping[str, str]) -> Store:
    """Connects a rank to its job's store, starting the store where that is this rank's part.

    Args:
        identity: Who this rank is.
        config: Its ``init_timeout_s`` bounds the search.
        environ: The environment, as from ``config.environment()``.

    Returns:
        The store. At the process's end it is closed, or told of the exception that ended the process.

    Raises:
        BootstrapError: The store cannot be found or reached in time, or turned this rank away.
        MissingDependencyError: mpi4py is needed (several hosts under mpirun or srun) and not installed.
    """
    if identity.size == 1:
        return LocalStore()
    deadline = time.monotonic() + config.init_timeout_s
    if identity.launcher == "flagcx":
        found = _Finding(*_announced(environ))
        server = None
    elif identity.rank == 0:
        server, found = _host(identity, environ)
    else:
        server, found = None, None
    try:
        store = _join(identity, found or _search(identity, environ), deadline)
    except BaseException:
        if server is not None:
            server.close()
        raise
    atexit.register(_end, weakref.ref(store), None if server is None else weakref.ref(server))
    return store


@dataclass(frozen=True, slots=True)
class _Finding:
    """Where a store may be, and the key that it must know."""

    address: str
    authkey: bytes


def _join(
    identity: Identity, search: _Finding | Callable[[], list[_Finding]], deadline: float
) -> RemoteStore:
    """Tries what the search finds until a store proves to be the job's."""
    pause_s, patience_s, reason = 0.001, 1.0, "rank 0 has not said where it is"
    while True:
        findings = [search] if isinstance(search, _Finding) else search()
        for finding in findings:
            # Of several addresses some may lead into the void, which takes a connection long to find out.
            longest_s = 10.0 if len(findings) == 1 else patience_s
            patience_s = min(2 * patience_s, 10.0) if finding is findings[-1] else patience_s
            longest_s = max(0.1, min(longest_s, deadline - time.monotonic()))
            try:
                return RemoteStore(finding.address, finding.authkey, identity.rank, identity.size, longest_s)
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


def _announced(environ: Mapping[str, str]) -> tuple[str, bytes]:
    missing = [name for name in (_ADDRESS, _KEY) if name not in environ]
    if missing:
        raise BootstrapError(
            f"FLAGCX_RANK is set but {' and '.join(missing)} not; start the ranks with flagcx run or "
            f"fc.launch, or unset the FLAGCX_* variables to run alone"
        )
    return environ[_ADDRESS], _key(environ)


def _key(environ: Mapping[str, str], job: str = "") -> bytes:
    """The key that was given, or one that follows from the job's name.

    The latter keeps other jobs out, not an attacker who knows the name; across hosts that are not
    trusted set ``FLAGCX_STORE_KEY``. (No store executes what it is sent, in any case.)
    """
    if _KEY in environ:
        try:
            return bytes.fromhex(environ[_KEY])
        except ValueError:
            raise BootstrapError(f"{_KEY} must be hexadecimal digits, two for each byte") from None
    return hashlib.sha256(b"flagcx store key\0" + job.encode()).digest()


def _host(identity: Identity, environ: Mapping[str, str]) -> tuple[StoreServer, _Finding]:
    """Rank 0's part where no launcher of ours runs the store: start it and make it known."""
    single_host = identity.local_size == identity.size
    if _ADDRESS in environ:
        server = _serve(identity, environ[_ADDRESS], _key(environ, environ[_ADDRESS]))
    elif single_host:
        return _host_by_file(identity, environ)
    elif identity.launcher == "torchrun":
        server = _serve_at_master(identity, environ)
    else:
        server = _serve(identity, "0.0.0.0:0", secrets.token_bytes(32))
        port = server.address.rpartition(":")[2]
        addresses = [f"tcp:{address}:{port}" for address in _own_addresses()[:_ADDRESSES_TOLD]]
        _broadcast(identity, {"addresses": addresses, "key": server.authkey.hex()})
    return server, _Finding(server.address.replace("tcp:0.0.0.0:", "tcp:127.0.0.1:"), server.authkey)


def _search(identity: Identity, environ: Mapping[str, str]) -> Callable[[], list[_Finding]]:
    """The other ranks' part: a function that says where the store may be by now."""
    single_host = identity.local_size == identity.size
    if _ADDRESS in environ:
        findings = [_Finding(environ[_ADDRESS], _key(environ, environ[_ADDRESS]))]
    elif single_host:
        path = _file(identity, environ)
        return lambda: _read_file(path)
    elif identity.launcher == "torchrun":
        key = _key(environ, identity.job)
        findings = [_Finding(address, key) for address in _master_addresses(environ)]
    else:
        told = _broadcast(identity, None)
        nearest = sorted(told["addresses"], key=_distance(_own_addresses()))
        findings = [_Finding(address, bytes.fromhex(told["key"])) for address in nearest]
    return lambda: findings


def _serve(
    identity: Identity,
    address: str | None,
    authkey: bytes | None,
    on_complete: Callable[[], None] | None = None,
) -> StoreServer:
    return StoreServer(
        identity.size, address, authkey, host="rank 0", host_rank=0, on_complete=on_complete
    ).start()


def leave(store: Store) -> None:
    """Leaves the store as this process ends: in good order, or else the others are told why.

    After an exception that nobody caught (which Python then keeps as ``sys.last_value``) the ranks that
    wait for this one get a ``PeerDiedError`` with its text.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        store.close()
    else:
        store.abort(f"it raised {type(error).__name__}: {str(error)[:500]}")


def _end(store: weakref.ref[RemoteStore], server: weakref.ref[StoreServer] | None) -> None:
    """At the process's end: leaves, and serves on for a moment those who are not done yet."""
    found = store()
    if found is not None:
        leave(found)
    running = None if server is None else server()
    if running is not None:
        running.close_when_idle()
        running.join(_LINGER_S)
        running.close()


# One host: a file.


def _host_by_file(identity: Identity, environ: Mapping[str, str]) -> tuple[StoreServer, _Finding]:
    path = _file(identity, environ)

    def remove() -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    _remove_stale_files(path.parent)
    server = _serve(identity, None, None, on_complete=remove)
    atexit.register(remove)
    try:
        _write_file(path, {"address": server.address, "key": server.authkey.hex()})
    except BaseException:
        server.close()
        raise
    return server, _Finding(server.address, server.authkey)


def _file(identity: Identity, environ: Mapping[str, str]) -> Path:
    name = hashlib.sha256(f"{identity.job}\0{identity.host}".encode()).hexdigest()[:32]
    return private_directory(environ) / f"{name}.json"


def private_directory(environ: Mapping[str, str]) -> Path:
    """A directory of this user alone, made if need be.

    Raises:
        BootstrapError: It is there and is someone else's, or others can enter it.
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
    """Puts the file there whole or not at all, in place of what a dead job of this name may have left."""
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump(content, file)
    draft.replace(path)


def _remove_stale_files(directory: Path) -> None:
    """Removes files whose store is no more. (A store listens before its file is there.)"""
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError, IndexError), socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(parse_address(_read_file(path)[0].address)[1])
            except ConnectionRefusedError:
                path.unlink()


def _read_file(path: Path) -> list[_Finding]:
    """Reads the file. One that a dead job left leads nowhere: its socket went with its process."""
    try:
        content = json.loads(path.read_text(encoding="ascii"))
        return [_Finding(content["address"], bytes.fromhex(content["key"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return []


# Several hosts: torchrun.


def _serve_at_master(identity: Identity, environ: Mapping[str, str]) -> StoreServer:
    """Listens at MASTER_ADDR on a port after MASTER_PORT, which is torch's own."""
    key = _key(environ, identity.job)
    problem: BootstrapError | None = None
    for address in _master_addresses(environ):
        # The name may be one that only the others see this host by; then listen on all interfaces.
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


def _own_addresses() -> list[str]:
    """This host's IPv4 addresses, one for each interface, the loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                found.append(socket.inet_ntoa(reply[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))


def _distance(own: list[str]) -> Callable[[str], int]:
    """Sorts addresses of the other end: the more leading bits it shares with one of ours, the nearer."""

    def number(address: str) -> int:
        return int.from_bytes(socket.inet_aton(address), "big")

    def distance(address: str) -> int:
        host = number(address.split(":")[1])
        return min(((host ^ number(mine)).bit_length() for mine in own), default=32)

    return distance
