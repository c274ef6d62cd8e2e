"""What the plans of one rank share: all ranks' memory, its layout, and the words in it."""

from __future__ import annotations

import ctypes
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Protocol

import numpy as np

from flagcx.config import Config
from flagcx.errors import (
    AbortedError,
    BootstrapError,
    CommunicationError,
    PeerDiedError,
    PeerTimeoutError,
    ResourceError,
)
from flagcx.forks import abandon_in_children
from flagcx.transport.scratch import Scratch
from flagcx.transport.shared_memory.areas import (
    EXCHANGE_NBYTES,
    PIECE_NBYTES,
    PIECES,
    Areas,
)
from flagcx.transport.shared_memory.call_log import CallLog
from flagcx.transport.shared_memory.cross_memory import CrossMemory, allow_peers, probe
from flagcx.transport.shared_memory.heap import Heap, PeerHeaps
from flagcx.transport.shared_memory.segment import (
    ONE_NAMESPACE,
    Handle,
    Rows,
    Segment,
    has_ended,
    is_closed,
    pid_namespace,
)
from flagcx.transport.shared_memory.signals import Signals
from flagcx.transport.shared_memory.words import (
    ABORTED,
    CLOSED,
    EXCHANGE,
    MESSAGES,
    READY,
    STEPS,
)

MAPPED_PART_NBYTES = 256 << 10
COPIED_PART_NBYTES = 128 << 10  # leaves room in the second-level cache for what is copied in
"""What is added up at a time of arrays that peers map, and of those that are copied in first."""
_WIDER = 8
"""How much wider than its dtype a sum is made at most."""
_MOST_VIEWS = 1 << 15
_PROBE_NBYTES = 32
_TELL_S = 0.5
_STAY_S, _LOOK_S = 5.0, 1e-3


class Lane:
    """One of the two sets of channels between this rank and its peers, each used by one thread at a time.

    Args:
        number: ``words.STEPS`` or ``words.MESSAGES``.
        pids: The process of each rank.

    Attributes:
        sent: How many pieces this rank has sent to each.
        received: How many pieces it has received from each.
        attached: The private memory of each.
    """

    def __init__(self, number: int, pids: list[int]) -> None:
        self.number = number
        self.sent, self.received = [0] * len(pids), [0] * len(pids)
        self.attached = [CrossMemory(pid, q) for q, pid in enumerate(pids)]


class Preparation(Protocol):
    """What a plan has prepared for certain arrays, and makes anew where it is gone.

    Attributes:
        pieces: The parts of the arrays that are worked on one after the other.
    """

    pieces: list

    def forget(self) -> None:
        """Lets go of the pieces."""


class Prepared:
    """The latest preparations of all plans together.

    Args:
        most: How many pieces are kept; those of the latest preparation in any case.
    """

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._latest: deque[tuple[Preparation, list]] = deque()

    def add(self, one: Preparation) -> None:
        """Keeps what was prepared just now, and lets go of the oldest where it is too much."""
        self._latest.append((one, one.pieces))
        self._count += len(one.pieces)
        while self._count > self._most and len(self._latest) > 1:
            self._drop()

    def clear(self) -> None:
        """Lets go of all."""
        while self._latest:
            self._drop()

    def _drop(self) -> None:
        oldest, pieces = self._latest.popleft()
        self._count -= len(pieces)
        if oldest.pieces is pieces:
            oldest.forget()


class Arena:
    """One rank's side of the shared memory of a communicator.

    Args:
        rank: This rank.
        size: Number of ranks.
        exchange: Sends bytes to all ranks and returns every rank's, in rank order.
        config: Settings.

    Attributes:
        scratch: Memory of this rank alone that plans share.
        prepared: What plans have prepared for arrays of the peers.
        turns: How many exchanges of all ranks with all ranks have been begun so far.
        broadcasts: How many broadcasts have gone through slots so far.
        private_calls: How many all-reduces of a MiB or more had private arrays.
        broadcasts_read: How many of them all ranks have read, as far as this rank knows.

    Raises:
        ResourceError: There is no room for shared memory.
        BootstrapError: The ranks are of different versions or settings.
        PeerDiedError: A peer died meanwhile.
    """

    def __init__(
        self, rank: int, size: int, exchange: Callable[[bytes], list[bytes]], config: Config
    ) -> None:
        self.rank, self.size, self.config = rank, size, config
        self.areas = Areas.of(size, config.slot_nbytes)
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(_PROBE_NBYTES), _PROBE_NBYTES)
        allow_peers()
        own = Segment.create(self.areas.nbytes)
        self._segments: list[Segment] = []
        try:
            cards = self._exchange_cards(own, exchange)
            self._rows = Rows(size, 2 * EXCHANGE_NBYTES)
            handles = [Handle(*card["segment"]) for card in cards]
            for q, handle in enumerate(handles):
                with _explained_by_end(q, handles):
                    self._segments.append(own if q == rank else Segment.attach(handle))
                    self._rows.map(q, handle, self.areas.one_shot)
            self.signals = Signals(rank, self._segments, config.timeout_s)
        except BaseException as error:
            _tell_failure(own, rank, size, error)
            if size > 1 and isinstance(error, Exception):
                time.sleep(_TELL_S)  # a peer that has yet to map the segment finds the reason in it
            for segment in {own, *self._segments}:
                segment.close()
            raise
        self.own_handle = own.handle
        self.pids = [card["segment"][0] for card in cards]
        self.memory = [np.frombuffer(s.memory, np.uint8) for s in self._segments]
        self._slots: dict[tuple, list[np.ndarray]] = {}
        self.scratch = Scratch()
        # Pages are taken when they are first written, so what no plan uses costs nothing.
        self._accumulator = np.empty(_WIDER * MAPPED_PART_NBYTES, np.uint8)
        self._incoming = np.empty((size, COPIED_PART_NBYTES), np.uint8)
        self.prepared = Prepared(_MOST_VIEWS // size)
        self.heap = Heap(self.signals.own)
        self.peer_heaps = PeerHeaps(self.signals.words, self.pids)
        self.steps, self.messages = Lane(STEPS, self.pids), Lane(MESSAGES, self.pids)
        self.turns = self.private_calls = 0
        self.broadcasts, self.broadcasts_read = 0, 0
        self.pieces = 0
        self.done = 0
        abandon_in_children(self)
        try:
            self.cross_memory = self._agree_on_cross_memory([card["probe"] for card in cards])
        except BaseException as error:
            self.signals.abort(str(error), error.peer if isinstance(error, CommunicationError) else None)
            if isinstance(error, CommunicationError) and not isinstance(error, PeerTimeoutError):
                self._stay_for_the_late()
            self.close()
            raise

    def _exchange_cards(self, own: Segment, exchange) -> list[dict]:
        handle = own.handle
        card = {
            "segment": handle,
            "namespace": pid_namespace(),
            "probe": (ctypes.addressof(self._probe), self._probe.raw.hex()),
        }
        cards = [json.loads(raw) for raw in exchange(json.dumps(card).encode())]
        for q, other in enumerate(cards):
            if other["namespace"] != card["namespace"]:
                raise BootstrapError(
                    f"ranks {self.rank} and {q} are in different PID namespaces ({card['namespace']} and "
                    f"{other['namespace']}); {ONE_NAMESPACE}",
                    rank=q,
                )
            if other["segment"][2] != handle.nbytes:
                raise BootstrapError(
                    f"rank {q} laid out {other['segment'][2]:,} bytes of shared memory, rank {self.rank} "
                    f"{handle.nbytes:,}; all ranks need the same version of flagcx and the same "
                    f"FLAGCX_SLOT_NBYTES",
                    rank=q,
                )
        return cards

    def _agree_on_cross_memory(self, probes: list[tuple[int, str]]) -> bool:
        """Every rank tries its next neighbour; it is used only where all of them can."""
        peer = (self.rank + 1) % self.size
        at, text = probes[peer]
        allowed = self.config.cross_memory and (
            self.size == 1 or probe(self.steps.attached[peer], at, bytes.fromhex(text))
        )
        signals = self.signals
        signals.own[READY] = 2 if allowed else 1
        for words in signals.others:
            if not words[READY]:
                ready = partial(_is_ready, words)
                signals.wait_for(words, ready, self.config.init_timeout_s, "send or receive")
        return all(words[READY] == 2 for words in signals.words)

    def _stay_for_the_late(self) -> None:
        """Waits for the peers that have yet to map this rank's segment: they find in it which rank failed."""
        signals, deadline = self.signals, time.monotonic() + _STAY_S
        while time.monotonic() < deadline:
            dead = signals.dead()
            late = [q for q, w in enumerate(signals.words) if not (w[READY] or w[ABORTED] or w[CLOSED])]
            if all(q in dead for q in late):
                return
            time.sleep(_LOOK_S)

    def enter_exchange(self, turn: int, signature: int) -> None:
        """Tells the peers that this rank has come to an exchange, and waits for all of them.

        The word that says so is not the call log's: that of a peer that goes on with calls in which it waits
        for nobody may be written again before this rank has seen it. The peer writes this one again two
        exchanges later, when it has seen this rank in the one between. It holds a hash of the calls before,
        so that ranks find out here that one of those differed, however long ago.

        Args:
            turn: Number of the exchange.
            signature: The call's entry for the call log.
        """
        signals = self.signals
        if signals.fence:
            signals.fence()
        before, index = signals.before, EXCHANGE + (turn & 1)
        signals.own[index] = value = signals.enter(signature) ^ before
        signals.before = before  # in this call a rank waits for all others
        for words in signals.others:
            if words[index] != value:
                signals.wait_call(words, index, value)
        if signals.fence:
            signals.fence()

    def view(self, rank: int, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """``count`` elements in the segment of ``rank``, from byte ``offset`` on."""
        return self.memory[rank][offset : offset + count * dtype.itemsize].view(dtype)

    def rows(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """The same part of every rank's slots for one exchange, one row a rank, to be read.

        Args:
            offset: Where it begins in each segment, in bytes.
            count: Its elements.
            dtype: Their dtype.
        """
        start = offset - self.areas.one_shot
        return self._rows.array[:, start : start + count * dtype.itemsize].view(dtype)

    def slots(self, owner: int, peer: int, lane: Lane, dtype: np.dtype) -> list[np.ndarray]:
        """The slots through which ``owner`` sends to ``peer``, as whole pieces."""
        key = owner, peer, lane.number, dtype
        found = self._slots.get(key)
        if found is None:
            count = PIECE_NBYTES // dtype.itemsize
            at = [self.areas.piece(peer, lane.number, number) for number in range(PIECES)]
            found = self._slots[key] = [self.view(owner, offset, count, dtype) for offset in at]
        return found

    def accumulator(self, count: int, dtype: np.dtype) -> np.ndarray:
        """``count`` elements in which plans make sums: of a part of the message, or of what a slot holds."""
        return self._accumulator[: count * dtype.itemsize].view(dtype)

    def incoming(self, rank: int, dtype: np.dtype) -> np.ndarray:
        """Where parts of a private array of ``rank`` are copied to."""
        return self._incoming[rank].view(dtype)

    def arriving(self, dtype: np.dtype) -> np.ndarray:
        """Where parts of one message are copied to that are then combined with what is there."""
        return self._incoming.reshape(-1)[:MAPPED_PART_NBYTES].view(dtype)

    def close(self) -> None:
        """Gives everything back. Further calls do nothing."""
        self.signals.close()
        self.heap.close()
        self.abandon()

    def abandon(self) -> None:
        """Lets go of all memory without a word; see ``flagcx.forks.Inherited``."""
        self.signals.abandon()
        self.prepared.clear()
        self.heap.abandon()
        self.peer_heaps.close()
        self.memory = []
        self._rows.close()
        self._slots.clear()
        segments, self._segments = self._segments, []
        for segment in segments:
            segment.close()


def _tell_failure(own: Segment, rank: int, size: int, error: BaseException) -> None:
    """Tells the peers that have mapped this rank's segment, and wait for the rank, that it gives up."""
    memory = memoryview(own.memory)
    words = memory.cast("Q")
    CallLog(rank, [words] * size, [memory] * size).write_reason(str(error))
    words[ABORTED] = 2 + error.peer if isinstance(error, CommunicationError) and error.peer is not None else 1


def _is_ready(words: memoryview) -> bool:
    return words[READY] > 0


@contextmanager
def _explained_by_end(peer: int, handles: Sequence[Handle]) -> Iterator[None]:
    """Says that a peer has died or given up, where that is why its segment cannot be mapped."""
    try:
        yield
    except ResourceError:
        handle = handles[peer]
        if has_ended(handle.pid):
            raise PeerDiedError(
                f"rank {peer} (process {handle.pid}) died during init; look at its output", peer=peer
            ) from None
        if is_closed(handle):
            culprit = _culprit(handles, peer)
            raise AbortedError(
                f"rank {culprit} failed during init; look at its output", peer=culprit
            ) from None
        raise


def _culprit(handles: Sequence[Handle], closed: int) -> int:
    """The rank that the peers blame, as far as their segments can be mapped; else the one that has closed."""
    for handle in handles:
        with suppress(ResourceError), closing(Segment.attach(handle)) as segment:
            blamed = int.from_bytes(segment.memory[8 * ABORTED : 8 * ABORTED + 8], "little")
            if blamed > 1:
                return blamed - 2
    return closed
