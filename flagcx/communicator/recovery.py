"""Ends a communicator at once, and goes on with the ranks that are left.

::

    comm.allreduce(x)      PeerDiedError: rank 2 died ...          on every rank that is left, or AbortedError
    comm = comm.shrink()   abort    pending calls end, here and on ranks that don't know of the loss yet
                           agree    the store answers all ranks alike, once each has come or is gone
                           build    a new communicator of those, with shared memory of its own
                           verdict  a second answer to all: if one of them died meanwhile, all go round again

A rank may die at any point of this: the two answers are given by one store to all ranks at once, so no rank
ends with a communicator that another one doesn't have.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace
from typing import Any

from flagcx.arguments import check_seconds
from flagcx.bootstrap.mpi_process import MPI_PROCESS
from flagcx.bootstrap.store import Store
from flagcx.communicator.caller import Caller, Lineage
from flagcx.errors import (
    AbortedError,
    BootstrapError,
    CommunicationError,
    CommunicatorError,
    FlagcxError,
    PeerDiedError,
    PeerTimeoutError,
)
from flagcx.executor.abort import abort_calls, retire
from flagcx.executor.point_to_point import TWO_THREADS
from flagcx.forks import FORKED

logger = logging.getLogger("flagcx")

_LEAVE_S = 0.5
"""How long ``abort`` waits until another thread has left its call, before it gives memory back."""
_AGAIN = "again"
_SHRUNK = "comm.shrink() was called on this communicator; go on with the one that it returned"


def abort(self: Caller, reason: str = "") -> None:
    """Ends the communicator at once, and those split from it, on all ranks.

    Any rank may call it, at any time, from any thread and from a signal handler. Calls that wait, on this
    rank and on its peers, raise ``AbortedError`` within moments (peers on other hosts, and calls on GPUs,
    within two seconds), and so does work that was started; later calls raise ``CommunicatorError``. What the
    arrays of such calls then hold is undefined.

    Shared memory and descriptors are given back, at the latest when ``close`` is called. ``fc.init()`` or
    ``shrink()``, called by all ranks, makes a new communicator.

    Args:
        reason: Why, for the messages of the peers.

    Raises:
        CommunicatorError: In a forked child, whose parent is the rank.

    Example:
        >>> threading.Timer(60, comm.abort, ["no result within a minute"]).start()  # doctest: +SKIP
    """
    _refuse_in_child(self)
    for child in list(self._children):
        abort(child, reason)
    _end_calls(self, reason or "comm.abort() was called")
    # A thread that is inside a call leaves it now; in a signal handler that may be this very thread.
    if _retire(self):
        with contextlib.suppress(FlagcxError):  # of what was aborted
            self._give_back()


def _refuse_in_child(comm: Caller) -> None:
    if comm._host.forked:
        raise CommunicatorError(FORKED)


def _end_calls(comm: Caller, reason: str) -> None:
    for executor in comm.executors():
        abort_calls(executor, reason)


def _retire(comm: Caller) -> bool:
    return all(retire(executor, _LEAVE_S) for executor in comm.executors())


def shrink(self: Caller, patience_s: float | None = None) -> Caller:
    """Makes a communicator of the ranks that are left, after a rank was lost.

    Every rank that is left calls it, after a call has raised ``PeerDiedError`` or ``AbortedError``, or
    without that. Calls in which others still wait end with ``AbortedError``, so that they come too. A rank
    that is computing is waited for, up to ``Config.init_timeout_s``; one that dies meanwhile is left out too.
    With ``patience_s`` a rank that lives and does not come is left out as well: it is stopped, or hangs. Its
    process is ended (SIGKILL), if a rank of its host is left: it could wake, and write to memory in which the
    others work. Otherwise its calls raise ``AbortedError`` when it wakes.

    The new ranks are 0 to n-1 in the order of the old ones. This communicator is closed. Communicators split
    from it go on if they lost no rank; else they shrink too. Arrays of ``comm.empty`` stay as they are, and
    are ordinary memory to the new one. The call that failed may have been done on some ranks and not on
    others: agree on where to go on, such as by a ``broadcast`` from one of them.

    Args:
        patience_s: For how long ranks that live are waited for before they are left out, in seconds; the same
            on all ranks. None: they are never left out.

    Returns:
        The new communicator. ``fc.init()`` returns it too, where this is the one it made.

    Raises:
        ArgumentError: ``patience_s`` is neither a number above 0 nor None.
        CommunicatorError: The communicator was closed, or is of ranks that cannot go on: MPI's, where MPI
            cannot (see the message).
        PeerTimeoutError: A rank that lives did not come in time. ``shrink`` may be called again.
        ResourceError: A rank has no memory or descriptors left.

    Example:
        >>> try:                                                  # doctest: +SKIP
        ...     comm.allreduce(gradient)
        ... except (fc.PeerDiedError, fc.AbortedError):
        ...     comm = comm.shrink()
        ...     comm.broadcast(parameters)

    Source: MPIX_Comm_shrink of ULFM, Bland et al., "Post-failure recovery of MPI communication capability",
        IJHPCA 27(3), 2013; ncclCommShrink of NCCL 2.27.
    """
    check_seconds(patience_s, "patience_s")
    _refuse_in_child(self)
    lineage = self._lineage
    if self._host.over == _SHRUNK:
        raise CommunicatorError(_SHRUNK)
    if lineage is None or self._shut:
        why = "it was made without a store" if lineage is None else "it was closed"
        raise CommunicatorError(f"comm.shrink() cannot go on from this communicator: {why}; use fc.init()")
    _end_calls(self, "it calls comm.shrink(), as every rank that is left must")
    if not _retire(self):
        raise CommunicatorError(f"comm.shrink() waits for another thread to leave its call: {TWO_THREADS}")
    if self._device is not None:
        self._device.transport.end_enqueued()
    made = _go_on(self, lineage, patience_s)
    self._shut = True
    for executor in self.executors():
        executor.over = _SHRUNK
    made._children |= self._children
    made._at_close, self._at_close = self._at_close, []
    made.on_shrink = self.on_shrink
    made.on_shrink(made)
    return made


def _go_on(old: Caller, lineage: Lineage, patience_s: float | None) -> Caller:
    """Makes the new communicator, however many more ranks are lost meanwhile."""
    limit_s, known = patience_s or old.config.init_timeout_s, lineage.members
    for _ in range(2 * len(known) + 1):
        try:
            came = _gather(lineage, limit_s)
        except PeerTimeoutError as error:
            _leave_out(lineage.store, error, patience_s)
            continue
        if not came:
            continue
        with contextlib.suppress(FlagcxError):  # of the calls that the loss has ended
            old._give_back()  # no rank that is left works in this one's memory any more
        newest = max(int(generation) for generation in came.values())
        lineage = replace(lineage, members=tuple(came), generation=newest + 1)
        try:
            made = _build(old, lineage)
        except PeerTimeoutError as error:
            _leave_out(lineage.store, error, patience_s)
            continue
        if made is not None:
            made.lost = tuple(rank for rank, member in enumerate(known) if member not in came)
            MPI_PROCESS.lost = MPI_PROCESS.lost or bool(made.lost)
            logger.info("rank %d goes on as rank %d without %s", old.rank, made.rank, made.lost)
            return made
    raise CommunicationError(f"rank {old.rank} could not go on with ranks {lineage.members}: each try failed")


def _gather(lineage: Lineage, limit_s: float) -> dict[int, bytes]:
    """The ranks that are left, and the generation of each; none if what ran the store is gone meanwhile."""
    lineage.store.recover(limit_s)
    try:
        return lineage.store.agree("comm.shrink()", str(lineage.generation).encode(), limit_s)
    except (PeerDiedError, BootstrapError):
        return {}


def _leave_out(store: Store, error: PeerTimeoutError, patience_s: float | None) -> None:
    """Goes on without the ranks that live and did not come, on all ranks that did.

    Raises:
        PeerTimeoutError: They must not be left out.
        CommunicatorError: They cannot be ended.
    """
    whole = store.in_job()[0]
    if patience_s is None or not error.late or whole.rank in error.late:
        raise error
    for rank in error.late:
        if whole.page is not None and not whole.page.end_neighbour(rank):
            raise CommunicatorError(
                f"rank {rank} did not come to comm.shrink() and cannot be left out: it is a thread of this "
                f"process, or in a call of the system's that does not end"
            ) from error
    for rank in error.late:
        logger.warning(
            "rank %d goes on without rank %d, which did not come to comm.shrink()", whole.rank, rank
        )
        with contextlib.suppress(CommunicationError, BootstrapError):  # what ran the store is gone
            whole.expel(rank, f"it did not come to comm.shrink() within {patience_s:g} s")


def _build(old: Caller, lineage: Lineage) -> Caller | None:
    """Makes a communicator of the ranks that are left; None, on all of them, if one has died meanwhile.

    Raises:
        FlagcxError: One of them could not, for another reason.
    """
    limit_s, generation = old.config.init_timeout_s, lineage.generation
    store = lineage.store.scoped(f"shrink {generation}/", lineage.members)
    hosts = [lineage.hosts[member] for member in lineage.members]
    make: Any = type(old)
    made: Caller | None = None
    failure: FlagcxError | None = None
    try:
        made = make(
            store.rank,
            store.size,
            lambda mine: store.exchange("communicator", mine, limit_s),
            hosts,
            old.config,
            store,
            f"{lineage.name} after {generation} losses" if generation > 1 else f"{lineage.name} after a loss",
            f"{lineage.name} {generation} {lineage.members}",
        )
        made._lineage = lineage
    except FlagcxError as error:
        failure = error
    try:
        verdicts = [json.loads(raw) for raw in store.exchange("made", _verdict(failure), limit_s)]
    except PeerTimeoutError:
        _discard(made)
        raise
    except (CommunicationError, BootstrapError):  # a rank died, or left, and all of them know
        verdicts = [_AGAIN]
    if not any(verdicts):
        return made
    _discard(made)
    for rank, verdict in enumerate(verdicts):
        if verdict not in ("", _AGAIN):
            raise failure or CommunicationError(f"rank {rank} cannot go on: {verdict}", peer=rank)
    return None


def _verdict(failure: FlagcxError | None) -> bytes:
    """What a rank tells the others of its part: nothing, that a rank was lost, or why it cannot go on."""
    if failure is None:
        return json.dumps("").encode()
    again = isinstance(failure, (PeerDiedError, AbortedError))
    return json.dumps(_AGAIN if again else f"{type(failure).__name__}: {failure}").encode()


def _discard(made: Caller | None) -> None:
    if made is not None:
        with contextlib.suppress(FlagcxError):
            abort(made, "a rank was lost while ranks went on without others")
