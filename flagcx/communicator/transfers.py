"""Between two ranks: send, receive, and both at once. Only the ranks concerned call them.

The k-th send to a rank meets its k-th receive. On the host any number of messages is under way at once, begun
and waited for in any order, beside collectives too: whatever MPI's rules let end does.

On GPUs messages that are started (``async_op=True``) move likewise, through the peers' memory: each follows
those before it to, or from, the same rank, and waits for no collective. A call without ``async_op`` keeps to
the order of its stream, as all work on a GPU does, and where NCCL carries messages all of them do: what must
move together stands there in one ``comm.group()`` or ``sendrecv``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np

from flagcx.arguments import check_rank
from flagcx.communicator.caller import Caller
from flagcx.communicator.foreign_calls import refuse, refuses_foreign
from flagcx.executor.host import Executor
from flagcx.executor.staging import FunctionPlan, PlainArrays, copy
from flagcx.fusion.group import Pending

if TYPE_CHECKING:
    from flagcx.communicator.options import B
    from flagcx.executor.work import Work
    from flagcx.transport.device_messages import Transfer
    from flagcx.transport.nccl.messages import DeviceMessages

Messages = list[tuple[np.ndarray, int]]

_MOST_KNOWN = 64


@overload
def send(comm: Caller, x: Any, to: int, *, async_op: Literal[False] = ..., stream: Any = ...) -> None: ...
@overload
def send(comm: Caller, x: Any, to: int, *, async_op: Literal[True], stream: Any = ...) -> Work[None]: ...
@overload
def send(comm: Caller, x: Any, to: int, *, async_op: bool, stream: Any = ...) -> Any: ...
@refuses_foreign("x", "to")
def send(
    comm: Caller,
    x: Any = None,
    to: Any = None,
    *more: NoReturn,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Sends an array to a rank, which must call ``recv`` with the same count and dtype.

    It returns when ``x`` may be used again. A small message may have left by then; a large one has been
    received. So two ranks that both send first, and receive then, may wait for each other: use ``sendrecv``,
    ``async_op`` or ``comm.group()``. What a rank sends to itself is copied, and can be received at any time.

    Args:
        x: Array.
        to: The rank to send it to.
        async_op: See ``Communicator``, likewise ``stream``.
    """
    if more or foreign:
        refuse(send, more, foreign)
    if stream is not None:
        return comm.run_on(stream, partial(send, comm), (x,), to=to, async_op=async_op)
    if not async_op and _again_on_device(comm, x, to, None, None):
        return None
    executor = comm.executor_of(x)
    sends = [(executor.take(x, "x", False), check_rank(to, comm.size, "to"))]
    return _transfer(comm, executor, (sends, []), None, async_op)


@overload
def recv(comm: Caller, out: B, source: int, *, async_op: Literal[False] = ..., stream: Any = ...) -> B: ...
@overload
def recv(comm: Caller, out: B, source: int, *, async_op: Literal[True], stream: Any = ...) -> Work[B]: ...
@overload
def recv(comm: Caller, out: Any, source: int, *, async_op: bool, stream: Any = ...) -> Any: ...
@refuses_foreign("out", "source")
def recv(
    comm: Caller,
    out: Any = None,
    source: Any = None,
    *more: NoReturn,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Receives an array from a rank that calls ``send``.

    Args:
        out: Array that it is written to.
        source: The rank that sends it.
        async_op: See ``Communicator``, likewise ``stream``.

    Returns:
        ``out``.
    """
    if more or foreign:
        refuse(recv, more, foreign)
    if stream is not None:
        return comm.run_on(stream, partial(recv, comm), (out,), source=source, async_op=async_op)
    if not async_op and _again_on_device(comm, None, None, out, source):
        return out
    executor = comm.executor_of(out)
    receives = [(executor.take(out, "out", True), check_rank(source, comm.size, "source"))]
    return _transfer(comm, executor, ([], receives), out, async_op)


@overload
def sendrecv(
    comm: Caller, x: Any, to: int, out: B, source: int, *, async_op: Literal[False] = ..., stream: Any = ...
) -> B: ...
@overload
def sendrecv(
    comm: Caller, x: Any, to: int, out: B, source: int, *, async_op: Literal[True], stream: Any = ...
) -> Work[B]: ...
@overload
def sendrecv(
    comm: Caller, x: Any, to: int, out: Any, source: int, *, async_op: bool, stream: Any = ...
) -> Any: ...
@refuses_foreign("x", "to", "out", "source")
def sendrecv(
    comm: Caller,
    x: Any = None,
    to: Any = None,
    out: Any = None,
    source: Any = None,
    *more: NoReturn,
    async_op: bool = False,
    stream: Any = None,
    **foreign: NoReturn,
) -> Any:
    """Sends to one rank while receiving from another; neither waits for the other.

    Args:
        x: Array to send. Where it overlaps ``out`` a copy of it is sent.
        to: The rank to send it to.
        out: Array for what comes.
        source: The rank that sends it.
        async_op: See ``Communicator``, likewise ``stream``.

    Returns:
        ``out``.
    """
    if more or foreign:
        refuse(sendrecv, more, foreign)
    if stream is not None:

        def call(x: Any, out: Any) -> Any:
            return sendrecv(comm, x, to, out, source, async_op=async_op)

        return comm.run_on(stream, call, (x, out))
    if not async_op and _again_on_device(comm, x, to, out, source):
        return out
    executor = comm.executor_of(x)
    sendbuf, recvbuf = executor.take(x, "x", False), executor.take(out, "out", True)
    if executor.is_plain(sendbuf) and np.may_share_memory(sendbuf, recvbuf):  # any other is copied anyway
        sendbuf = sendbuf.copy()
    sends = [(sendbuf, check_rank(to, comm.size, "to"))]
    receives = [(recvbuf, check_rank(source, comm.size, "source"))]
    return _transfer(comm, executor, (sends, receives), out, async_op)


def _transfer(
    comm: Caller, executor: Executor, messages: tuple[Messages, Messages], value: Any, async_op: bool
) -> Any:
    if comm._group is None:
        done = _together(executor, [messages], value, async_op)
        if executor is comm._device:
            _remember(executor, messages)
        return done

    def together(items: list[tuple[Messages, Messages]]) -> None:
        _together(executor, items)

    call = Pending(partial(together, [messages]), ("transfer", id(executor)), together, messages)
    return comm.put_off(call, async_op, value)


def _together(
    executor: Executor, items: list[tuple[Messages, Messages]], value: Any = None, async_op: bool = False
) -> Any:
    """Sends and receives all messages of some calls at once."""
    plain = PlainArrays(executor)
    sends = [(plain.take(array), peer) for item in items for array, peer in item[0]]
    receives = [
        (plain.take(array, reads=False, writes=True), peer) for item in items for array, peer in item[1]
    ]
    nbytes = sum(array.nbytes for array, _ in (*sends, *receives))
    device: Any = executor
    starts = executor.messages is not None or (async_op and device.transport.messages.may_start)
    if not starts:
        transfer = FunctionPlan(lambda *_: executor.transport.transfer(sends, receives))
        plan = plain.around(executor.recorded_transfer(transfer, nbytes))
        return Caller.run(executor, plan, None, None, value, async_op, "send and receive")
    copy(plain.before)
    back = partial(copy, plain.after) if plain.after else None
    if executor.messages is None:
        return device.start_messages(sends, receives, back, nbytes, value)
    what = executor.transfer_info(nbytes)
    if async_op:
        return executor.messages.start(sends, receives, back, what, value)
    executor.messages.run(sends, receives, back, what)
    return value


def _again_on_device(comm: Caller, x: Any, to: int | None, out: Any, source: int | None) -> bool:
    """Sends and receives arrays of a GPU like earlier ones, which are plain and apart; whether it did."""
    device = comm._device
    if device is None or (out if x is None else x).__class__ is not device.array_class:
        return False
    try:
        plan = device.quick.get(_key(x, to, out, source))
    except (AttributeError, TypeError):
        return False
    if plan is None or not (x is None or device.is_contiguous(x)):
        return False
    if out is not None and not (device.is_contiguous(out) if x is None else device.is_apart(out, x)):
        return False
    device.run(plan, x, out)
    return True


def _key(x: Any, to: int | None, out: Any, source: int | None) -> tuple:
    sent = None if x is None else (x.shape, x.dtype)
    return "sendrecv", sent, to, None if out is None else (out.shape, out.dtype), source


def _remember(device: Any, messages: tuple[Messages, Messages]) -> None:
    """Lets sends and receives of arrays like these go straight to the transport."""
    (x, to), (out, source) = (each[0] if each else (None, None) for each in messages)
    if all(array is None or array.__class__ is device.array_class for array in (x, out)):
        nbytes = sum(array.nbytes for array in (x, out) if array is not None)
        plan = device.recorded_transfer(_Exchange(device.transport.messages, to, source), nbytes)
        device.remember(_key(x, to, out, source), plan)


class _Exchange:
    """A message to a rank, or from a rank, or both, of any arrays of a GPU; those of earlier ones are known.

    Args:
        messages: Carries them.
        to: The rank to send to, or None.
        source: The rank to receive from, or None.
    """

    __slots__ = ("_known", "_messages", "_source", "_to")

    def __init__(self, messages: DeviceMessages, to: int | None, source: int | None) -> None:
        self._messages, self._to, self._source = messages, to, source
        self._known: dict[tuple[int, int], Transfer] = {}

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Sends and receives at once."""
        at = 0 if sendbuf is None else sendbuf.data.ptr, 0 if recvbuf is None else recvbuf.data.ptr
        transfer = self._known.get(at)
        if transfer is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            sends = [] if self._to is None else [(sendbuf, self._to)]
            receives = [] if self._source is None else [(recvbuf, self._source)]
            transfer = self._known[at] = self._messages.described(sends, receives)
        self._messages.carry(transfer)
