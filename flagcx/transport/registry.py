"""The transports that there are, and which of them carries a communicator's arrays.

``base`` tells how a transport is made. It is registered here, the built-in ones without being imported, so
that no optional package is loaded for a transport that is not used.

"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NoReturn

from flagcx.bootstrap.mpi_process import MPI_PROCESS
from flagcx.descriptors import occupy_standard_streams
from flagcx.errors import ArgumentError, BootstrapError, FlagcxError, MissingDependencyError
from flagcx.transport.base import DEVICE, HOST, Transport, TransportContext


@dataclass(frozen=True, slots=True)
class TransportEntry:
    """A transport that can be opened.

    Attributes:
        name: Its name.
        kind: The kind of array that it carries: ``HOST`` or ``DEVICE``.
        load: Returns its class.
        serves: Whether it can carry the arrays of a job.
        needs: What ``serves`` asks for, in words for an error.
        automatic: Whether it may be chosen for a job where the user names none.
        late: Whether one that was chosen automatically and cannot be had is an error only when an array
            needs it.
    """

    name: str
    kind: str
    load: Callable[[], type[Transport]]
    serves: Callable[[TransportContext], bool]
    needs: str = ""
    automatic: Callable[[TransportContext], bool] = lambda context: True
    late: bool = False

    def open(self, context: TransportContext) -> Transport:
        """Makes the transport, on all ranks together."""
        occupy_standard_streams()  # for descriptors that MPI, UCX or CUDA open
        if not self.late or context.config.transport == self.name:
            return self.load().open(context)
        try:
            return self.load().open(context)
        except (MissingDependencyError, BootstrapError) as error:
            return MissingTransport(context, error)


class MissingTransport(Transport):
    """Stands for a transport that cannot be had, until an array needs it.

    Args:
        context: The communicator.
        why: What is raised then.
    """

    name, kind = "missing", HOST

    def __init__(self, context: TransportContext, why: FlagcxError) -> None:
        self.rank, self.size, self.why = context.rank, context.size, why

    def _refuse(self, *_: Any) -> NoReturn:
        raise type(self.why)(str(self.why))

    compile = transfer = take = result = empty = _refuse  # type: ignore[assignment]

    def abort(self, reason: str, culprit: int | None) -> None:
        """No rank waits for this one."""

    def close(self) -> None:
        """Has nothing to give back."""


def _on_one_host(context: TransportContext) -> bool:
    return len(set(context.hosts)) <= 1


def _has_store(context: TransportContext) -> bool:
    return context.store is not None


def _always(context: TransportContext) -> bool:
    return True


def _never(context: TransportContext) -> bool:
    return False


def _without_mpi(context: TransportContext) -> bool:
    return not MPI_PROCESS.launched


def _built_in(module: str, name: str) -> Callable[[], type[Transport]]:
    return lambda: getattr(import_module(f"flagcx.transport.{module}"), name)


@lru_cache(maxsize=1)
def _entries() -> dict[str, TransportEntry]:
    """All transports; among those that serve a job, the last one is chosen."""
    built_in = (
        TransportEntry("nccl", DEVICE, _built_in("nccl.transport", "NcclTransport"), _has_store, "a store"),
        TransportEntry("mpi", HOST, _built_in("mpi", "MpiTransport"), _has_store, "a store", late=True),
        TransportEntry(
            "ucx",
            HOST,
            _built_in("ucx", "UcxTransport"),
            _has_store,
            "a store",
            automatic=_without_mpi,
            late=True,
        ),
        TransportEntry(
            "shared_memory",
            HOST,
            _built_in("shared_memory", "SharedMemoryTransport"),
            _on_one_host,
            "all ranks on one host",
        ),
        TransportEntry(
            "threads",
            HOST,
            _built_in("threads", "ThreadsTransport"),
            _on_one_host,
            "all ranks on one host",
            automatic=_never,
        ),
    )
    return {entry.name: entry for entry in built_in}


def register_transport(
    transport: type[Transport],
    serves: Callable[[TransportContext], bool] = _always,
    *,
    needs: str = "another job",
    automatic: bool = False,
) -> None:
    """Adds a transport of the user's own, for ``fc.init(transport=name)``. All ranks must register it alike.

    Args:
        transport: Its class; see ``flagcx.transport.base``.
        serves: Whether it can carry the arrays of a job; the same answer on all ranks.
        needs: What ``serves`` asks for, in words for an error, such as "all ranks on one host".
        automatic: Whether it is chosen, before those that come with flagcx, where the user names none.

    Raises:
        ArgumentError: The class is not a transport, or its name is taken.

    Example:
        >>> register_transport(MyTransport)         # doctest: +SKIP
        >>> comm = fc.init(transport="mine")        # doctest: +SKIP
    """
    if not (isinstance(transport, type) and issubclass(transport, Transport)):
        raise ArgumentError(
            f"register_transport needs a class derived from flagcx.transport.base.Transport, "
            f"got {transport!r}"
        )
    if transport.name in _entries():
        raise ArgumentError(f"transport {transport.name!r} is registered already; choose another name")
    chosen = _always if automatic else _never
    entry = TransportEntry(transport.name, transport.kind, lambda: transport, serves, needs, chosen)
    _entries()[entry.name] = entry


def unregister_transport(name: str) -> None:
    """Removes a transport that ``register_transport`` added.

    Raises:
        ArgumentError: There is none of that name.
    """
    if _entries().pop(name, None) is None:
        raise ArgumentError(f"no transport named {name!r} is registered")


def find_transport(kind: str, context: TransportContext) -> TransportEntry:
    """The transport for arrays of ``kind``: the one that the setting names, else the last that serves.

    Args:
        kind: ``HOST`` or ``DEVICE``.
        context: The communicator.

    Raises:
        ArgumentError: ``transport`` names none that there is, or one that cannot serve the job.
        BootstrapError: None serves the job.
    """
    named = context.config.transport
    if named and named not in _entries():
        raise ArgumentError(f"transport={named!r} is not known; expected one of {', '.join(_entries())}")
    entries = [entry for entry in _entries().values() if entry.kind == kind]
    if named and _entries()[named].kind == kind:
        entry = _entries()[named]
        if not entry.serves(context):
            raise ArgumentError(
                f"transport={named!r} cannot carry this job's arrays: it needs {entry.needs}; the ranks are "
                f"on {len(set(context.hosts))} hosts; leave transport out to have one chosen"
            )
        return entry
    for entry in reversed(entries):
        if entry.automatic(context) and entry.serves(context):
            return entry
    raise BootstrapError(
        f"no transport carries {kind} arrays of this job: "
        + ", ".join(f"{entry.name} needs {entry.needs}" for entry in entries if entry.automatic(context))
    )


def open_transport(kind: str, context: TransportContext) -> Transport:
    """Finds and makes the transport of a communicator; all ranks call it together. See ``find_transport``."""
    return find_transport(kind, context).open(context)
