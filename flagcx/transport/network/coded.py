"""The steps between hosts of an all-reduce whose messages are coded there, and nowhere else.

The owners of a stripe, one on each host, own a part of it each. They send each other their hosts' sums of the
others' parts; each adds up its own part, and sends that sum to all others. Both times what travels is coded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from flagcx.transport.base import Call
from flagcx.transport.network.crossing import Crossing, Groups
from flagcx.transport.network.flight import Flight
from flagcx.transport.network.message import Message, kind_of
from flagcx.transport.network.watch import Watch
from flagcx.transport.network.wire import COLLECTIVE_TAG, Wire
from flagcx.transport.scratch import Scratch

STEPS = 2
_GRAIN = 32
"""The length of parts is a multiple of this: codecs have blocks of numbers."""
_BYTES = np.dtype(np.uint8)


class CodedCrossing(Crossing):
    """These steps, of a piece.

    Args:
        wire, watch, call, scratch, words: As ``Crossing`` takes them; the call has a coder.
        groups: The ranks of each host.
    """

    def __init__(
        self, wire: Wire, watch: Watch, call: Call, scratch: Scratch, words: str, groups: Groups
    ) -> None:
        super().__init__(wire, watch, call, scratch, words)
        assert call.coder is not None
        self._host = next(number for number, group in enumerate(groups) if call.rank in group)
        lane, self._hosts = groups[self._host].index(call.rank), len(groups)
        self._coder = call.coder(self._host, self._hosts)
        self._width = -(-(self.stripe.stop - self.stripe.start) // self._hosts // _GRAIN) * _GRAIN
        self._nbytes = nbytes = self._coder.wire_nbytes(self._width)
        kind = kind_of(words, nbytes)
        owns = self.stripe.stop > self.stripe.start
        peers = [group[lane] for group in groups] if owns else []
        others = (number for number in range(len(peers)) if number != self._host)
        self._others = [(number, Message(peers[number], kind, nbytes, _BYTES)) for number in others]

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that they need beside the piece."""
        return (3 * self._hosts + 1) * self._nbytes

    def begin(self, step: int, arrays: Sequence[np.ndarray], start: int) -> Flight:
        """Begins a step of the piece that begins at ``start``."""
        coded, arrived, reduced, gathered = self._buffers(arrays)
        if step == 0:
            self._coder.encode(start + self.stripe.start, arrays[0][self.stripe], self._width, coded)
        lands = gathered if step else arrived
        sends = [(message, reduced if step else self._block(coded, at)) for at, message in self._others]
        receives = [(message, self._block(lands, at)) for at, message in self._others]
        return self._wire.begin(sends, receives, COLLECTIVE_TAG, self._words, self._watch.calls)

    def end(self, step: int, flight: Flight, arrays: Sequence[np.ndarray], start: int) -> None:
        """Waits for a step's messages, and adds up, or decodes the sums."""
        _, arrived, reduced, gathered = self._buffers(arrays)
        numbers = arrays[0][self.stripe]
        self._wire.end(flight)
        if step == 0:
            self._coder.reduce(start + self.stripe.start, numbers, self._width, arrived, reduced)
        else:
            self._block(gathered, self._host)[...] = reduced
            self._coder.decode(numbers, self._width, gathered)

    def _buffers(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        each = self._hosts * self._nbytes
        whole = arrays[2].view(np.uint8)
        starts = 0, each, 2 * each, 2 * each + self._nbytes, 3 * each + self._nbytes
        return [whole[start:stop] for start, stop in pairwise(starts)]

    def _block(self, array: np.ndarray, host: int) -> np.ndarray:
        return array[host * self._nbytes : (host + 1) * self._nbytes]
