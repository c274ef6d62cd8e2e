"""Where things lie in the segment of each rank."""

from __future__ import annotations

from dataclasses import dataclass

from flagcx.schedule.collectives import cut
from flagcx.transport.shared_memory.words import LANES, words_nbytes

ONE_SHOT_NBYTES = 64 << 10
EXCHANGE_NBYTES = 1 << 20
"""What each rank reads of every peer in one exchange at most, and what it leaves for all of them."""
_LONG_NBYTES = 32 << 10
BROADCAST_HEAD_NBYTES, BROADCASTS = 64, 8
_BROADCAST_NBYTES = ONE_SHOT_NBYTES + 4096
STAGES = 4
PIECE_NBYTES = 64 << 10
PIECES = 4
_LINE_NBYTES = 64


def stripes(count: int, itemsize: int, size: int) -> list[int]:
    """Cuts ``count`` elements into a stripe a rank, on cache lines, so that no two ranks write one line.

    Returns:
        The ``size + 1`` boundaries.
    """
    line = max(_LINE_NBYTES // itemsize, 1)
    return [min(bound * line, count) for bound in cut(-(-count // line), size)]


@dataclass(frozen=True, slots=True)
class Areas:
    """Where things lie in every segment, in bytes.

    Attributes:
        size: Number of ranks.
        slot_nbytes: Size of one stage.
        one_shot: Two halves of EXCHANGE_NBYTES, for one exchange after the other.
        broadcasts: BROADCASTS slots for what this rank sends to all others, each with its header.
        contributed: STAGES slots: what this rank contributes to the other stripes of a piece.
        reduced: Half as much: this rank's reduced stripes, where three ranks or more have one each.
        pairs: For each peer and lane PIECES slots of PIECE_NBYTES, each with its header.
        nbytes: Size of a segment.
    """

    size: int
    slot_nbytes: int
    one_shot: int
    broadcasts: int
    contributed: int
    reduced: int
    pairs: int
    nbytes: int

    @classmethod
    def of(cls, size: int, slot_nbytes: int) -> Areas:
        """Lays a segment out for ``size`` ranks."""
        one_shot = words_nbytes(size)
        broadcasts = one_shot + 2 * EXCHANGE_NBYTES
        contributed = broadcasts + BROADCASTS * _BROADCAST_NBYTES
        reduced = contributed + STAGES * slot_nbytes
        pairs = reduced + STAGES * slot_nbytes // 2
        nbytes = pairs + size * LANES * PIECES * PIECE_NBYTES
        return cls(size, slot_nbytes, one_shot, broadcasts, contributed, reduced, pairs, nbytes)

    def broadcast(self, number: int) -> int:
        """Where the header of broadcast ``number`` lies; the data come after BROADCAST_HEAD_NBYTES."""
        return self.broadcasts + number % BROADCASTS * _BROADCAST_NBYTES

    def exchanges(self, nbytes: int) -> list[int]:
        """Where the slots for one exchange lie that take turns, for messages of ``nbytes`` bytes.

        Successive turns take the two halves in turns, so a rank may write its slot while peers still read
        the one before, whatever the lengths of both. Longer messages go through all of a half: a rank writes
        a slot far quicker that the peers' caches have forgotten.

        Returns:
            As many offsets as a power of two.
        """
        step = max(ONE_SHOT_NBYTES, 1 << (nbytes - 1).bit_length())
        turns = EXCHANGE_NBYTES // step if nbytes >= _LONG_NBYTES else 1
        starts = [self.one_shot, self.one_shot + EXCHANGE_NBYTES]
        return [start + turn * step for turn in range(turns) for start in starts]

    def piece(self, peer: int, lane: int, number: int) -> int:
        """Where piece ``number`` to ``peer`` lies."""
        return self.pairs + ((peer * LANES + lane) * PIECES + number % PIECES) * PIECE_NBYTES
