"""What a rank finds that maps the segments of its peers after some of them have given up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flagcx.config import Config
from flagcx.errors import AbortedError, FlagcxError, ResourceError
from flagcx.transport.shared_memory import arena as arenas
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.segment import Segment

_LIMIT_S = 20.0


class _Ranks:
    """Ranks as threads: rank 1 fails to map when the first ones have mapped all, the last maps after that.

    Args:
        size: Number of ranks.
        last: The ranks that map last, one after the other, each when those before it have failed.
    """

    def __init__(self, size: int, last: tuple[int, ...]) -> None:
        self.size, self._last, self._cards = size, last, [b""] * size
        self._barrier, self._rank = threading.Barrier(size), threading.local()
        self.mapped = [threading.Event() for _ in range(size)]
        self.failed = [threading.Event() for _ in range(size)]
        self._attach = Segment.attach

    def attach(self, handle) -> Segment:
        """Stands for ``Segment.attach``."""
        rank = self._rank.number
        if rank == 1:
            for q in range(self.size):
                assert q == 1 or q in self._last or self.mapped[q].wait(_LIMIT_S)
            raise ResourceError("no descriptor is left")
        if rank in self._last:
            before = self._last[: self._last.index(rank)]
            assert all(
                self.failed[q].wait(_LIMIT_S) for q in range(self.size) if q in before or q not in self._last
            )
        return self._attach(handle)

    def join(self, rank: int) -> FlagcxError:
        """What comes of a rank."""
        self._rank.number = rank

        def exchange(card: bytes) -> list[bytes]:
            self._cards[rank] = card
            self._barrier.wait(_LIMIT_S)
            return list(self._cards)

        try:
            with pytest.raises(FlagcxError) as failure:
                Arena(rank, self.size, exchange, Config())
            return failure.value
        finally:
            self.failed[rank].set()


@pytest.mark.parametrize(("size", "last"), [(3, (2,)), (3, (0,)), (4, (0, 2)), (4, (3, 0))])
def test_a_rank_that_comes_late_blames_the_rank_that_failed_first(monkeypatch, size, last):
    ranks = _Ranks(size, last)
    stay, agree = Arena._stay_for_the_late, Arena._agree_on_cross_memory

    def told(self, *args):
        ranks.mapped[self.rank].set()
        return agree(self, *args)

    def stays(self):
        ranks.failed[self.rank].set()
        stay(self)

    monkeypatch.setattr(arenas, "_TELL_S", 0.0)
    monkeypatch.setattr(Segment, "attach", ranks.attach)
    monkeypatch.setattr(Arena, "_agree_on_cross_memory", told)
    monkeypatch.setattr(Arena, "_stay_for_the_late", stays)
    with ThreadPoolExecutor(size) as pool:
        errors = list(pool.map(ranks.join, range(size)))
    assert isinstance(errors.pop(1), ResourceError)
    for error in errors:
        assert isinstance(error, AbortedError) and error.peer == 1, error
        assert str(error).startswith(("rank 1 failed during init", "rank 1 gave up: no descriptor")), error
