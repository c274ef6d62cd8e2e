"""What the plans of one rank share: all ranks' memory, its layout, and the words in it."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from flagcx.config import Config
from flagcx.errors import BootstrapError, PeerDiedError, ResourceError
from flagcx.transport.shared_memory.cross_memory import CrossMemory, allow_peers, probe
from flagcx.transport.shared_memory.heap import Heap, PeerHeaps
from flagcx.transport.shared_memory.segment import ONE_NAMESPACE, Handle, Segment, pid_namespace
from flagcx.transport.shared_memory.signals import Signals
from flagcx.transport.shared_memory.words import READY, words_nbytes

ONE_SHOT_NBYTES = 64 << 10
STAGES = 4
PIECE_NBYTES = 64 << 10
PIECES = 4
_PROBE_NBYTES = 32


@dataclass(frozen=True, slots=True)
class Areas:
    """Where things lie in every segment, in bytes.

    Attributes:
        size: Number of ranks.
        slot_nbytes: Size of one stage.
        one_shot: Two slots of ONE_SHOT_NBYTES.
        contributed: STAGES slots: what this rank contributes to the other stripes of a piece.
        reduced: STAGES slots: this rank's reduced stripe of a piece.
        pairs: For each peer PIECES slots of PIECE_NBYTES, each with its header.
        nbytes: Size of a segment.
    """

    size: int
    slot_nbytes: int
    one_shot: int
    contributed: int
    reduced: int
    pairs: int
    nbytes: int

    @classmethod
    def of(cls, size: int, slot_nbytes: int) -> Areas:
        """Lays a segment out for ``size`` ranks."""
        one_shot = words_nbytes(size)
        contributed = one_shot + 2 * ONE_SHOT_NBYTES
        reduced = contributed + STAGES * slot_nbytes
        pairs = reduced + STAGES * slot_nbytes
        nbytes = pairs + size * PIECES * PIECE_NBYTES
        return cls(size, slot_nbytes, one_shot, contributed, reduced, pairs, nbytes)

    def piece(self, peer: int, number: int) -> int:
        """Where piece ``number`` to ``peer`` lies."""
        return self.pairs + (peer * PIECES + number % PIECES) * PIECE_NBYTES


class Arena:
    """One rank's side of the shared memory of a communicator.

    Args:
        rank: This rank.
        size: Number of ranks.
        exchange: Sends bytes to all ranks and returns every rank's, in rank order.
        config: Settings.

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
        try:
            cards = self._exchange_cards(own, exchange)
            self._segments = [
                own if q == rank else _attach(q, Handle(*card["segment"])) for q, card in enumerate(cards)
            ]
        except BaseException:
            own.close()
            raise
        self.pids = [card["segment"][0] for card in cards]
        self.signals = Signals(rank, self._segments, config.timeout_s)
        self.memory = [np.frombuffer(s.memory, np.uint8) for s in self._segments]
        self.heap = Heap(self.signals.own)
        self.peer_heaps = PeerHeaps(self.signals.words, self.pids)
        self.attached = [CrossMemory(pid, q) for q, pid in enumerate(self.pids)]
        self.one_shots = 0
        self.pieces = 0
        self.done = 0
        self.sent = [0] * size
        self.received = [0] * size
        self.cross_memory = self._agree_on_cross_memory([card["probe"] for card in cards])

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
            self.size == 1 or probe(self.attached[peer], at, bytes.fromhex(text))
        )
        signals = self.signals
        signals.own[READY] = 2 if allowed else 1
        for words in signals.others:
            if not words[READY]:
                ready = partial(_is_ready, words)
                signals.wait_for(words, ready, self.config.init_timeout_s, "send or receive")
        return all(words[READY] == 2 for words in signals.words)

    def view(self, rank: int, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """``count`` elements in the segment of ``rank``, from byte ``offset`` on."""
        return self.memory[rank][offset : offset + count * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Gives everything back. Further calls do nothing."""
        self.signals.close()
        self.heap.close()
        self.peer_heaps.close()
        self.memory = []
        segments, self._segments = self._segments, []
        for segment in segments:
            segment.close()


def _is_ready(words: memoryview) -> bool:
    return words[READY] > 0


def _attach(peer: int, handle: Handle) -> Segment:
    try:
        return Segment.attach(handle)
    except ResourceError:
        if not os.path.exists(f"/proc/{handle.pid}"):
            raise PeerDiedError(
                f"rank {peer} (process {handle.pid}) died during init; look at its output", peer=peer
            ) from None
        raise
