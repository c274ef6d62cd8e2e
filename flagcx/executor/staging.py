"""Plans that are run once, above all those with copies: of arrays that are not contiguous, or misaligned.

Such arrays are copied into plain ones before a call, and back after it.

A plain array has the same shape, so elements are sent in the order of C whatever the strides, and a rank
with strides meets ranks without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flagcx.arguments import overlap, place_of
from flagcx.executor.host import Executor
from flagcx.transport.base import Plan

Copies = Sequence[tuple[Any, Any]]
"""What is copied: to which array, and from which."""


class Staging(NamedTuple):
    """Plain arrays for a call, and the copies between them and the caller's.

    Attributes:
        sendbuf: What this rank contributes, or None.
        recvbuf: Where its result goes, or None.
        before: The copies before the call.
        after: The copies after it.
    """

    sendbuf: Any
    recvbuf: Any
    before: Copies
    after: Copies

    def around(self, plan: Plan) -> Staged:
        """The plan with the copies, for the arrays of this call."""
        return Staged(plan, self.before, self.after)


class Staged:
    """A plan that is run once, with copies before and after it."""

    __slots__ = ("_after", "_before", "_plan")

    def __init__(self, plan: Plan, before: Copies, after: Copies) -> None:
        self._plan, self._before, self._after = plan, before, after

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Runs the plan on plain arrays."""
        copy(self._before)
        self._plan.run(sendbuf, recvbuf)
        copy(self._after)


class FunctionPlan:
    """A function of two arrays as a plan."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[[Any, Any], object]) -> None:
        self.run: Any = run


class PlainArrays:
    """Plain arrays for a call, in the place of those that a plan cannot take as they are.

    Args:
        executor: Makes them.

    Attributes:
        before: The copies before the call.
        after: The copies after it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.before: list[tuple[Any, Any]] = []
        self.after: list[tuple[Any, Any]] = []

    def take(self, array: Any, reads: bool = True, writes: bool = False) -> Any:
        """The array, or a plain one in its place, which the call reads or writes."""
        if self._executor.is_plain(array):
            return array
        plain = self._executor.plain_like(array)
        if reads:
            self.before.append((plain, array))
        if writes:
            self.after.append((array, plain))
        return plain

    def around(self, plan: Plan) -> Plan:
        """The plan with the copies; the plan itself where there are none."""
        return Staged(plan, self.before, self.after) if self.before or self.after else plan


def stage(executor: Executor, sendbuf: Any, recvbuf: Any, writes: bool = True) -> Staging | None:
    """Replaces arrays that a plan cannot take as they are; None where it can.

    Args:
        executor: Makes the plain arrays.
        sendbuf: An array, or None.
        recvbuf: An array, None, or ``sendbuf``.
        writes: Whether the call writes to ``recvbuf``.
    """
    odd_send = sendbuf is not None and not executor.is_plain(sendbuf)
    odd_recv = recvbuf is not None and not executor.is_plain(recvbuf)
    if not (odd_send or odd_recv):
        return None
    send = executor.plain_like(sendbuf) if odd_send else sendbuf
    if odd_send and odd_recv and (recvbuf is sendbuf or place_of(recvbuf) == place_of(sendbuf)):
        recv = send
    else:
        recv = executor.plain_like(recvbuf) if odd_recv else recvbuf
    before = [(send, sendbuf)] if odd_send else []
    return Staging(send, recv, before, [(recvbuf, recv)] if odd_recv and writes else [])


def copy(copies: Copies) -> None:
    """Copies arrays, of any dtype and on any device."""
    for to, source in copies:
        if source.dtype.isbuiltin != 1:  # CuPy computes with none of these
            carrier = f"u{source.dtype.itemsize}"
            to, source = to.view(carrier), source.view(carrier)
        to[...] = source


class StagedArrays:
    """The copies of many calls, by their plain arrays."""

    def __init__(self, stagings: Sequence[Staging]) -> None:
        self._before = {id(plain): (plain, given) for s in stagings for plain, given in s.before}
        self._after = {id(plain): (result, plain) for s in stagings for result, plain in s.after}

    def overlap(self, sendbufs: Sequence[Any], recvbufs: Sequence[Any]) -> bool:
        """Whether the callers' arrays in the place of these overlap."""
        given = [self._before.get(id(array), (0, array))[1] for array in sendbufs]
        return overlap(given + [self._after.get(id(array), (array,))[0] for array in recvbufs])

    def around(self, plan: Plan, sendbufs: Sequence[Any], recvbufs: Sequence[Any]) -> Staged:
        """A plan for lists of arrays, with the copies of these."""
        before = [self._before[id(array)] for array in sendbufs if id(array) in self._before]
        return Staged(plan, before, [self._after[id(a)] for a in recvbufs if id(a) in self._after])
