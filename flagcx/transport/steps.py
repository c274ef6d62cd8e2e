"""NumPy arrays: what transports of the host share, and the interpreter of schedules.

``HostTransport`` carries every collective over its ``transfer``; ``Steps`` runs one rank's program, and
leaves the messages of each step to the transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from flagcx.arguments import host_array, result_array
from flagcx.dtypes import check_for_host
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Buffer, Copy, Local, Recv, Send, Span, Step
from flagcx.transport.average import averaging
from flagcx.transport.base import HOST, Call, Plan, Transport
from flagcx.transport.scratch import Scratch

Part = tuple[int, int, int]
"""A buffer by its number, and its elements from start to stop."""
Messages = Sequence[tuple[np.ndarray, int]]


class HostTransport(Transport):
    """Carries NumPy arrays. A subclass must have ``transfer``, ``abort`` and ``close``."""

    kind = HOST
    takes_cores = True

    @cached_property
    def scratch(self) -> Scratch:
        """The memory that the plans of this transport share."""
        return Scratch()

    def compile(self, call: Call) -> Plan:
        """Compiles ``call``; see ``Transport.compile``.

        Raises:
            OperationError: The operation is a kernel for GPUs.
        """
        check_for_host(call.op)
        if call.op is None or call.op.scale is None:
            return self._compile(call)
        whole = call.in_place and not COLLECTIVES[call.schedule.collective].blocks
        return Scaled(self._compile(replace(call, in_place=whole)), call.op.scale, whole)

    def _compile(self, call: Call) -> Plan:
        """Compiles a call whose contributions need no factor: by default, step by step over ``transfer``."""
        return averaging(call, lambda call: MessageSteps(call, self.scratch, self.transfer))

    def take(self, array: Any, what: str, writable: bool) -> np.ndarray:
        """Takes a caller's array. See ``flagcx.arguments.host_array``."""
        return host_array(array, what, writable=writable)

    def result(self, out: Any, what: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Takes or makes the array of a result. See ``flagcx.arguments.result_array``."""
        return result_array(out, what, shape, dtype)

    def empty(self, shape: tuple[int, ...] | int, dtype: np.dtype) -> np.ndarray:
        """An uninitialised array, by default one like any other."""
        return np.empty(shape, dtype)


class Scaled:
    """A plan whose contributions are multiplied by a factor first.

    Args:
        plan: The plan for what is multiplied already.
        factor: The factor.
        in_place: Whether INPUT may be overwritten, since the result lies there.
    """

    def __init__(self, plan: Plan, factor: float, in_place: bool) -> None:
        self._plan, self._factor, self._in_place = plan, factor, in_place

    def run(self, sendbuf: np.ndarray, recvbuf: np.ndarray | None) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        factor = sendbuf.dtype.type(self._factor)
        scaled = np.multiply(sendbuf, factor, out=sendbuf if self._in_place else None)
        self._plan.run(scaled, recvbuf)


@dataclass(frozen=True, slots=True)
class StepParts:
    """One step of a rank's program, in elements.

    Attributes:
        sends: What is sent, and to which rank.
        receives: Where a message lands, the rank that sends it, and whether it is added to what is there.
        local: Whether to reduce, the source and the target of each piece of local work, in this order.
    """

    sends: tuple[tuple[Part, int], ...]
    receives: tuple[tuple[Part, int, bool], ...]
    local: tuple[tuple[bool, Part, Part], ...]


class Steps(ABC):
    """One rank's program, compiled for one count and dtype. A subclass moves the messages of a step.

    Args:
        call: The call; ``transport.average`` makes one of averages that need a wider dtype.
        scratch: The memory that plans share.
    """

    def __init__(self, call: Call, scratch: Scratch) -> None:
        program = call.program()
        self._layout, self._dtype = call.layout(program), call.dtype.numpy
        self._overlay = self._in_place_shift(call)
        self._ufunc: Any = None if call.op is None else call.op.ufunc
        self._divisor = call.schedule.size if call.op is not None and call.op.average else 0
        self._empty = np.empty(0, self._dtype)
        parts = [self._parts(step) for step in program.steps]
        self._scratch = scratch
        self._scratch_nbytes = self._scratch_count(parts) * self._dtype.itemsize
        scratch.reserve(self._scratch_nbytes)
        self._steps = [
            (self._messages(step) if step.sends or step.receives else None, step.local) for step in parts
        ]

    def _in_place_shift(self, call: Call) -> int | None:
        """INPUT element minus OUTPUT element where these are one memory; None in a call out of place."""
        s = call.schedule
        collective = COLLECTIVES[s.collective]
        shift = collective.in_place_shift(call.rank, s.size, s.chunks, s.root) if call.in_place else None
        bounds = self._layout.bounds
        return None if shift is None else bounds[Buffer.INPUT][shift[0]] - bounds[Buffer.OUTPUT][shift[1]]

    def _part(self, span: Span) -> Part:
        return (int(span.buffer), *self._layout.slice(span))

    def _parts(self, step: Step) -> StepParts:
        receives = [t for t in step.transfers if not isinstance(t, Send)]
        return StepParts(
            tuple((self._part(t.src), t.peer) for t in step.transfers if isinstance(t, Send)),
            tuple((self._part(t.dst), t.peer, not isinstance(t, Recv)) for t in receives),
            tuple(filter(None, map(self._local, step.local))),
        )

    def _local(self, work: Local) -> tuple[bool, Part, Part] | None:
        src, dst = self._part(work.src), self._part(work.dst)
        copies = isinstance(work, Copy)
        return None if copies and self._place(src) == self._place(dst) else (not copies, src, dst)

    def _place(self, part: Part) -> Part:
        """A part, named by its place in OUTPUT where INPUT and OUTPUT are one memory."""
        buffer, start, stop = part
        if self._overlay is not None and buffer == Buffer.INPUT:
            return int(Buffer.OUTPUT), start - self._overlay, stop - self._overlay
        return part

    def _scratch_count(self, steps: Sequence[StepParts]) -> int:
        """Elements of SCRATCH."""
        return self._layout.count(Buffer.SCRATCH)

    def _overlap(self, a: Part, b: Part) -> bool:
        """Whether two parts share memory."""
        (x, a0, a1), (y, b0, b1) = self._place(a), self._place(b)
        return x == y and a0 < b1 and b0 < a1

    def _messages(self, step: StepParts) -> Any:
        """What ``_exchange`` needs to know of a step."""
        return step

    @abstractmethod
    def _exchange(self, messages: Any, arrays: Sequence[np.ndarray]) -> None:
        """Sends and receives all messages of a step at once; what arrives is added in the order listed.

        Args:
            messages: What ``_messages`` made of the step.
            arrays: INPUT, OUTPUT and SCRATCH, one-dimensional.
        """

    def _enter(self, sendbuf: np.ndarray | None, recvbuf: np.ndarray | None) -> None:  # noqa: B027
        """The call begins, with these arrays."""

    def run(self, sendbuf: np.ndarray | None, recvbuf: np.ndarray | None) -> None:
        """Runs the call; see ``transport.base.Plan``."""
        self._enter(sendbuf, recvbuf)
        empty = scratch = self._empty
        if self._scratch_nbytes:
            scratch = self._scratch.memory[: self._scratch_nbytes].view(self._dtype)
        given = empty if sendbuf is None else sendbuf if sendbuf.ndim == 1 else sendbuf.reshape(-1)
        result = empty if recvbuf is None else recvbuf if recvbuf.ndim == 1 else recvbuf.reshape(-1)
        arrays, exchange = (given, result, scratch), self._exchange
        for messages, local in self._steps:
            if messages is not None:
                exchange(messages, arrays)
            if local:
                self._work(local, arrays)
        if self._divisor and recvbuf is not None:
            np.true_divide(arrays[1], self._divisor, out=arrays[1])

    def _work(self, local: Sequence[tuple[bool, Part, Part]], arrays: Sequence[np.ndarray]) -> None:
        """Does the local work of a step."""
        for reduce, (b, b0, b1), (a, a0, a1) in local:
            dst, src = arrays[a][a0:a1], arrays[b][b0:b1]
            if reduce:
                self._ufunc(dst, src, out=dst)
            else:
                dst[...] = src


class MessageSteps(Steps):
    """A program over a transport's own messages.

    Args:
        call: The call.
        scratch: The memory that plans share. What is still to be added follows the schedule's SCRATCH there.
        exchange: Sends and receives arrays at once; see ``Transport.transfer``.
        enter: Called when a run begins.
    """

    def __init__(
        self,
        call: Call,
        scratch: Scratch,
        exchange: Callable[[Messages, Messages], object],
        enter: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(call, scratch)
        self._send_and_receive, self._begin = exchange, enter

    def _scratch_count(self, steps: Sequence[StepParts]) -> int:
        self._arrivals = super()._scratch_count(steps)
        added = (sum(b - a for (_, a, b), _, adds in step.receives if adds) for step in steps)
        return self._arrivals + max(added, default=0)

    def _enter(self, sendbuf: np.ndarray | None, recvbuf: np.ndarray | None) -> None:
        self._begin()

    def _exchange(self, messages: StepParts, arrays: Sequence[np.ndarray]) -> None:
        receives, additions, taken = [], [], self._arrivals
        for (buffer, a, b), peer, adds in messages.receives:
            target = data = arrays[buffer][a:b]
            if adds:
                data, taken = arrays[Buffer.SCRATCH][taken : taken + b - a], taken + b - a
                additions.append((target, data))
            receives.append((data, peer))
        self._send_and_receive([(arrays[x][a:b], peer) for (x, a, b), peer in messages.sends], receives)
        for target, data in additions:
            self._ufunc(target, data, out=target)
