"""Sends and receives the messages of a step by MPI, and checks what comes before it is used.

Whatever comes lands in memory of the wire's own. A message whose head is not the expected one is refused;
of any other the data is copied or added to where it belongs. So nothing that comes late, after an error,
meets an array of the caller's.

First pieces and the rest have tags of their own, and so have collective calls, the messages between two ranks
that are parts of such calls, and what ranks send on their own (``messages.py``). With each tag, what a rank
sends to another one arrives in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from flagcx.errors import CommunicationError, MismatchError
from flagcx.transport.mpi.message import SAME_CALLS, Slot, in_words, put, stamp_of
from flagcx.transport.mpi.pieces import Messages, Pieces
from flagcx.transport.mpi.watch import Wait, Watch

COLLECTIVE_TAG, TRANSFER_TAG, _NOTICE_TAG, MESSAGE_TAG = 2, 4, 6, 8
_LAST_LOOK_S = 1.0


class Wire:
    """One rank's messages to and from the other ranks of a communicator.

    Args:
        mpi: The module ``mpi4py.MPI``.
        comm: An MPI communicator that carries nothing else.
        watch: Watches the other ranks while this one waits.
    """

    def __init__(self, mpi: Any, comm: Any, watch: Watch) -> None:
        self._mpi, self._comm, self._watch, self._byte = mpi, comm, watch, mpi.BYTE
        self.rank: int = comm.Get_rank()
        self._slots: list[Slot] = []

    def exchange(
        self,
        sends: Messages,
        receives: Messages,
        tag: int,
        what: str = "",
        number: int = 0,
        ufunc: Any = None,
    ) -> None:
        """Sends and receives messages, all at once.

        Args:
            sends: Messages that this rank sends.
            receives: Messages to this rank, in the order in which they are added.
            tag: ``COLLECTIVE_TAG`` or ``TRANSFER_TAG``.
            what: The call that all ranks make, in words; empty for one of two ranks.
            number: The number of that call.
            ufunc: Adds what comes to what is there.

        Raises:
            MismatchError: A rank sent something else.
            CommunicationError: A rank died, gave up or came too late.
        """
        comm, byte, rank, long = self._comm, self._byte, self.rank, False
        stamp = stamp_of(number)
        requests: list[Any] = []
        landed: list[Slot] = []
        sent: list[Slot] = []
        try:
            for message, _ in receives:
                landed.append(slot := self.slot())
                requests.append(comm.Irecv(slot.whole, message.peer, tag))
                long = long or message.long
            for message, array in sends:
                sent.append(slot := self.slot())
                slot.head[:] = stamp + message.kind
                slot.first(message)[...] = array[: message.first]
                requests.append(comm.Isend([slot.memory, message.stop, byte], message.peer, tag))
                long = long or message.long
            if long:
                self._finish_pieces(sends, receives, landed, requests, tag, stamp, what, ufunc)
            else:
                if not self._mpi.Request.Testall(requests):
                    self._wait(sends, receives, landed, requests, stamp, what)
                for (message, _), slot in zip(receives, landed, strict=True):
                    message.check(rank, stamp, slot)
                for (message, array), slot in zip(receives, landed, strict=True):
                    put(message, array, slot.first(message), ufunc)
        except BaseException as error:
            self.abandon(requests, [sent, landed])
            if isinstance(error, self._mpi.Exception):
                what = what or "a send or receive"
                self._watch.blame_dead(what)
                raise CommunicationError(f"rank {rank}: MPI failed in {what}: {error}") from error
            raise
        self._slots += sent
        self._slots += landed

    # -- one piece -----------------------------------------------------------------------------------

    def slot(self) -> Slot:
        """Memory for a piece."""
        try:
            return self._slots.pop()  # which another thread may do too
        except IndexError:
            return Slot(self._byte)

    def give_slot(self, slot: Slot) -> None:
        """Takes the memory of a piece back."""
        self._slots.append(slot)

    def send(self, memory: np.ndarray, peer: int, tag: int) -> Any:
        """Begins to send a piece, and returns MPI's request."""
        return self._comm.Isend([memory, memory.nbytes, self._byte], peer, tag)

    def receive(self, slot: Slot, peer: int, tag: int) -> Any:
        """Begins to receive a piece, and returns MPI's request."""
        return self._comm.Irecv(slot.whole, peer, tag)

    def test(self, requests: list[Any]) -> list[int] | None:
        """The numbers of requests that are done.

        Raises:
            CommunicationError: MPI failed.
        """
        try:
            done: list[int] | None = self._mpi.Request.Testsome(requests)
        except self._mpi.Exception as error:
            raise CommunicationError(f"rank {self.rank}: MPI failed in a send or receive: {error}") from error
        return done

    # -- the messages of a step ------------------------------------------------------------------------

    def _wait(
        self,
        sends: Messages,
        receives: Messages,
        landed: list[Slot],
        requests: list[Any],
        stamp: bytes,
        what: str,
    ) -> None:
        """Waits until all messages have come and gone."""

        def held_up() -> tuple[int, bool]:
            waiting: tuple[int, bool] | None = None
            for number, (message, _) in enumerate((*receives, *sends)):
                receiving = number < len(receives)
                if requests[number] and not requests[number].Get_status():
                    waiting = waiting or (message.peer, receiving)
                elif receiving:
                    message.check(self.rank, stamp, landed[number])
            return waiting or (self.rank, False)

        wait, test = Wait(self._watch, what, self.noticed), self._mpi.Request.Testall
        while not test(requests):
            wait.pause(held_up)
        wait.end()

    def _finish_pieces(
        self,
        sends: Messages,
        receives: Messages,
        landed: list[Slot],
        requests: list[Any],
        tag: int,
        stamp: bytes,
        what: str,
        ufunc: Any,
    ) -> None:
        """Lets the rest of the messages follow their first pieces, and waits until all have come and gone."""
        pieces = Pieces(
            self._comm,
            self._byte,
            tag + 1,
            sends,
            receives,
            landed,
            requests,
            self.slot,
            self.give_slot,
            stamp,
            ufunc,
        )
        wait, test = Wait(self._watch, what, self.noticed), self._mpi.Request.Testsome
        while pieces.left:
            done = test(requests)
            if done:
                wait.moved()
                for number in done:
                    pieces.done(number)
            else:
                wait.pause(pieces.held_up)
        if self.noticed():
            # A rank that gave up may have gone on to change the array of which the last pieces came.
            self._watch.check_failures(what or "a send or receive")

    # -- the end -----------------------------------------------------------------------------------

    def abandon(self, requests: list[Any], slots: Sequence[Sequence[object]]) -> None:
        """Leaves messages to MPI that are not done; what it may still read or write is never freed."""
        with contextlib.suppress(self._mpi.Exception):
            for request in requests:
                if request and not request.Get_status():
                    request.Cancel()
            if self._mpi.Request.Testall(requests):
                return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((requests, slots)))

    def notify(self) -> None:
        """Lets the other ranks know that this one has given up, and that the store says why."""
        with contextlib.suppress(self._mpi.Exception):
            none = bytearray(0)
            others = [q for q in range(self._comm.Get_size()) if q != self.rank]
            requests = [self._comm.Isend([none, 0, self._byte], q, _NOTICE_TAG) for q in others]
            self.abandon(requests, [])

    def noticed(self) -> bool:
        """Whether another rank has given up."""
        return bool(self._comm.Iprobe(self._mpi.ANY_SOURCE, _NOTICE_TAG))

    def check_end(self) -> None:
        """Looks for messages that no call of this rank has received.

        Raises:
            MismatchError: There is one.
        """
        status = self._mpi.Status()
        for tag in (COLLECTIVE_TAG, TRANSFER_TAG, MESSAGE_TAG):
            if not self._comm.Iprobe(self._mpi.ANY_SOURCE, tag, status):
                continue
            peer, slot = status.Get_source(), self.slot()
            request = self._comm.Irecv(slot.whole, peer, tag)
            end = time.monotonic() + _LAST_LOOK_S
            while not (came := request.Test()) and time.monotonic() < end:
                time.sleep(0)
            if not came:
                self.abandon([request], [[slot]])
            sent = in_words(slot.head.tobytes()) if came else "a message"
            raise MismatchError(
                f"rank {peer} sent {sent}, which rank {self.rank} never received; {SAME_CALLS}", peer=peer
            )
