"""Sends and receives of GPU arrays: in the order of the stream, or started, on streams of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flagcx.transport.device import address
from flagcx.transport.device_messages import Message, ToSelf, Transfer
from flagcx.transport.pair_streams import PairStreams
from flagcx.transport.peer_memory import PeerMemory
from flagcx.transport.stream_order import StreamOrder

Sized = Sequence[tuple[bool, int, int, int, int]]


class DeviceMessages:
    """The messages of one rank of a communicator.

    Args:
        cupy: The CuPy module.
        order: The communicator's order.
        peers: Carries them; NCCL does where there is none.
        by_nccl: Enqueues messages by NCCL on a stream, by its handle.
    """

    def __init__(
        self, cupy: Any, order: StreamOrder, peers: PeerMemory | None, by_nccl: Callable[[Sized, int], None]
    ) -> None:
        self._order, self._peers, self._by_nccl = order, peers, by_nccl
        self._to_self = ToSelf(cupy, order)
        self._pairs = None if peers is None else PairStreams(cupy, order, self._to_self, peers.messages)

    @property
    def may_start(self) -> bool:
        """Whether messages can be started that wait neither for collectives nor for each other."""
        return self._pairs is not None

    def transfer(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        """Sends arrays to ranks and receives arrays from ranks, all at once, in the order of the calls."""
        self.carry(self.described(sends, receives))

    def carry(self, transfer: Transfer) -> None:
        """Sends and receives, all at once, in the order of the calls."""
        order, (messages, own) = self._order, transfer
        self._to_self.check(own)
        stream = order.enter(transfer)
        if self._pairs is not None:
            self._pairs.meet(messages, stream)
        others = self._to_self.settle(messages, stream) if own else messages
        if self._peers is not None:
            self._peers.messages.transfer(others, stream)
        elif sized := [(m.sends, 0, m.at, m.nbytes, m.peer) for m in others if m.nbytes]:
            self._by_nccl(sized, stream.ptr)
        order.leave(stream)

    def start(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> list[Any]:
        """Starts what ``transfer`` does, each message on the stream of its pair; returns their events."""
        assert self._pairs is not None
        order = self._order
        messages, own = self.described(sends, receives)
        self._to_self.check(own, started=True)
        ready = order.current().record(order.event())
        arrays = [array for array, _ in (*sends, *receives)]
        return [self._pairs.start(*each, ready) for each in zip(messages, arrays, strict=True)]

    def described(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> Transfer:
        """The messages that carry arrays to ranks, and from ranks to arrays."""
        order = self._order
        messages = [Message(True, address(a, order), a.nbytes, peer) for a, peer in sends]
        messages += [Message(False, address(a, order), a.nbytes, peer) for a, peer in receives]
        own = (message for message in messages if message.peer == order.rank)
        return Transfer(tuple(messages), tuple(own))

    def finish(self) -> None:
        """Launches what was started and waits for peers that are not ready."""
        if self._pairs is not None:
            self._pairs.finish()

    def close(self) -> None:
        """Gives everything back, after all operations have ended."""
        self._to_self.close()
        if self._pairs is not None:
            self._pairs.close()
