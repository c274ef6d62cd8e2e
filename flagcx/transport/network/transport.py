"""What the transports between hosts share: everything but their engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from flagcx.errors import ArgumentError, FlagcxError, MissingDependencyError
from flagcx.transport.average import averaging
from flagcx.transport.base import Call, Plan, TransportContext, groups_of
from flagcx.transport.network.engine import Engine
from flagcx.transport.network.hierarchy import HierarchicalCollective, Hosts
from flagcx.transport.network.host_memory import HostMemory, Offer
from flagcx.transport.network.message import Message, kind_of
from flagcx.transport.network.messenger import NetworkMessenger
from flagcx.transport.network.steps import NetworkSteps
from flagcx.transport.network.watch import Watch
from flagcx.transport.network.wire import TRANSFER_TAG, Wire
from flagcx.transport.steps import HostTransport, Messages

MISSING, SETTING = "missing", "setting"
_PROBLEMS: Mapping[str, type[FlagcxError]] = {MISSING: MissingDependencyError, SETTING: ArgumentError}
_MOST_KNOWN = 256


class NetworkTransport(HostTransport):
    """Carries NumPy arrays between ranks on any hosts. A subclass brings the engine.

    Args:
        context: The communicator, which must have a store; ``config.timeout_s`` matters here.
        engine: Carries its messages, and no others.
        memory: What this rank shares with the others of its host; see ``Offer.accept``.
    """

    takes_cores = False

    def __init__(self, context: TransportContext, engine: Engine, memory: HostMemory | None) -> None:
        assert context.store is not None
        self.rank, self.size, self._engine = context.rank, context.size, engine
        self.shares_memory = memory is not None
        self._watch = Watch(context.store, context.config.timeout_s, context.waits)
        self._wire = Wire(engine, self._watch)
        self.messenger = NetworkMessenger(self._wire, self._watch, self._message, context.config.timeout_s)
        self._hosts = Hosts(groups_of(context.hosts), self._wire, self._watch, self.scratch, memory)
        self._known = lru_cache(_MOST_KNOWN)(_message_of)

    def _compile(self, call: Call) -> Plan:
        words, hosts = call.describe(), self._hosts
        if hosts.serves(call):
            return averaging(call, lambda call: HierarchicalCollective(hosts, call, words))
        return averaging(call, lambda call: NetworkSteps(self._wire, self._watch, call, self.scratch, words))

    def transfer(self, sends: Messages, receives: Messages) -> None:
        """Sends and receives at once; see ``Transport.transfer``."""
        self._wire.exchange(
            [(self._message(array, peer), array.reshape(-1)) for array, peer in sends],
            [(self._message(array, peer), array.reshape(-1)) for array, peer in receives],
            TRANSFER_TAG,
        )

    def _message(self, array: np.ndarray, peer: int) -> Message:
        return self._known(peer, array.size, array.dtype)

    def has_lost(self) -> bool:
        """Whether a rank has died or given up; see ``Transport.has_lost``."""
        return self._watch.has_lost()

    def check_end(self) -> None:
        """Checks that the peers have made the same calls; see ``Transport.check_end``."""
        self._wire.check_end()
        self._watch.check_end()

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers why this rank cannot go on; see ``Transport.abort``."""
        self._watch.give_up(reason, culprit)
        if self._hosts.memory is not None:
            self._hosts.memory.give_up()
        self._wire.notify()

    def close(self) -> None:
        """Tells the peers so."""
        self._watch.close()
        self._engine.close(self._watch.all_have_ended)
        if self._hosts.memory is not None:
            self._hosts.memory.close()


def compare_cards(
    context: TransportContext, kind: str, problem: str, card: object
) -> tuple[list[object], HostMemory | None]:
    """Tells all ranks what each brings; where one lacks something, all raise the same error.

    Args:
        context: The communicator.
        kind: ``MISSING`` or ``SETTING`` where this rank has a problem; else empty.
        problem: The problem, in words.
        card: What the other ranks must know of this one; a value for JSON.

    Returns:
        Each rank's card, and what this rank shares with the others of its host.

    Raises:
        MissingDependencyError: A package is not installed, on any of the ranks.
        ArgumentError: It is not set up for flagcx, on any of the ranks.
    """
    offer = Offer(context)
    mine = json.dumps([kind, problem or card, offer.card]).encode()
    cards = [json.loads(told) for told in context.exchange(mine)]
    for rank, (kind, problem, _) in enumerate(cards):
        if kind:
            raise _PROBLEMS[kind](f"rank {rank}: {problem}")
    return [card for _, card, _ in cards], offer.accept([offered for *_, offered in cards])


def _message_of(peer: int, count: int, dtype: np.dtype) -> Message:
    """A message that two ranks exchange on their own."""
    kind = kind_of(f"send and receive of {dtype.name}", count * dtype.itemsize)
    return Message(peer, kind, count, dtype)
