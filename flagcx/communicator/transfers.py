"""Between two ranks: send, receive, and both at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcx.arguments import check_rank
from flagcx.communicator.streams import on_stream
from flagcx.communicator.uneven import UnevenCollectives
from flagcx.executor.host import Executor
from flagcx.fusion.group import Pending
from flagcx.transport.base import Plan

Messages = list[tuple[np.ndarray, int]]


class Transfers(UnevenCollectives):
    """Operations that only the ranks concerned call. The k-th send to a rank meets its k-th receive."""

    @on_stream
    def send(self, x: Any, to: int, *, async_op: bool = False) -> Any:
        """Sends an array to a rank, which must call ``recv`` with the same count and dtype.

        Args:
            x: Array.
            to: The rank to send it to.
            async_op: See the class ``Communicator``.
        """
        executor = self._executor_of(x)
        sends = [(executor.take(x, "x", False), check_rank(to, self.size, "to"))]
        return self._transfer(executor, sends, [], None, async_op)

    @on_stream
    def recv(self, out: Any, source: int, *, async_op: bool = False) -> Any:
        """Receives an array from a rank that calls ``send``.

        Args:
            out: Array that it is written to.
            source: The rank that sends it.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``.
        """
        executor = self._executor_of(out)
        receives = [(executor.take(out, "out", True), check_rank(source, self.size, "source"))]
        return self._transfer(executor, [], receives, out, async_op)

    @on_stream
    def sendrecv(self, x: Any, to: int, out: Any, source: int, *, async_op: bool = False) -> Any:
        """Sends to one rank while receiving from another; neither waits for the other.

        Args:
            x: Array to send. Where it overlaps ``out`` a copy of it is sent.
            to: The rank to send it to.
            out: Array for what comes.
            source: The rank that sends it.
            async_op: See the class ``Communicator``.

        Returns:
            ``out``.
        """
        executor = self._executor_of(x)
        given, result = executor.take(x, "x", False), executor.take(out, "out", True)
        if np.may_share_memory(given, result):
            given = given.copy()
        sends = [(given, check_rank(to, self.size, "to"))]
        receives = [(result, check_rank(source, self.size, "source"))]
        return self._transfer(executor, sends, receives, out, async_op)

    def _transfer(
        self, executor: Executor, sends: Messages, receives: Messages, value: Any, async_op: bool
    ) -> Any:
        plan = _plan(executor, sends, receives)
        if self._group is None:
            return self._go(executor, plan, None, None, value, async_op, "send and receive")

        def together(items: list[tuple[Messages, Messages]]) -> None:
            sent = [message for item in items for message in item[0]]
            received = [message for item in items for message in item[1]]
            executor.run(_plan(executor, sent, received), None, None)

        call = Pending(
            lambda: executor.run(plan, None, None), ("transfer", id(executor)), together, (sends, receives)
        )
        return self._put_off(call, async_op, value)


def _plan(executor: Executor, sends: Messages, receives: Messages) -> Plan:
    nbytes = sum(array.nbytes for array, _ in (*sends, *receives))
    return executor.recorded_transfer(_Transfer(executor.transport, sends, receives), nbytes)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Messages between ranks, as a plan that is run once."""

    transport: Any
    sends: Messages
    receives: Messages

    def run(self, given: object, result: object) -> None:
        """See ``transport.base.Plan``."""
        self.transport.transfer(self.sends, self.receives)
