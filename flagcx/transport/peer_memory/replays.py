"""CUDA graphs of launches that come back with the same arrays.

To launch a graph of one kernel takes the host less than half the time that the kernel's own launch does: 1.7
instead of 4.4 us on an H200 that two ranks share.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from flagcx.kernels.cuda import RELAXED, capture_mode

_URGENT = -5  # see flagcx.transport.nccl.plans
_CAPTURE_AT = 3
_MOST_EACH, _MOST_SEEN = 64, 256
_PATIENCE = 2000
"""Launches without a graph of a plan that has the most, before it begins anew with the arrays of today."""
_MOST = 512


class Graphs:
    """What makes the graphs of one communicator, and bounds their number.

    Args:
        cupy: The CuPy module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy, self._stream = cupy, None
        self._made: deque[tuple[weakref.ref[Replays], Hashable]] = deque()

    def make(self, owner: Replays, key: Hashable, enqueue: Callable[[Any], None]) -> Any:
        """Captures what a function enqueues on a stream; the oldest graph goes where there are too many."""
        stream = self._stream = self._stream or self._cupy.cuda.Stream(non_blocking=True, priority=_URGENT)
        with capture_mode(RELAXED), stream:  # another thread may capture, and restrict all
            stream.begin_capture()
            try:
                enqueue(stream)
            except BaseException:
                with contextlib.suppress(Exception):
                    stream.end_capture()  # The first error is the one to raise.
                raise
            graph = stream.end_capture()
        self._made.append((weakref.ref(owner), key))
        if len(self._made) > _MOST:
            self._drop_oldest()
        return graph

    def _drop_oldest(self) -> None:
        reference, key = self._made.popleft()
        if (owner := reference()) is not None:
            owner.drop(key)

    def close(self) -> None:
        """Gives all graphs back."""
        while self._made:
            self._drop_oldest()
        self._stream = None


class Replays:
    """The graphs of one plan.

    Args:
        graphs: What makes them.
    """

    __slots__ = ("__weakref__", "_found", "_graphs", "_missed", "_seen")

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._found: dict[Hashable, Any] = {}
        self._missed = 0
        self._seen: dict[Hashable, int] = {}

    def find(self, key: Hashable, enqueue: Callable[[Any], None]) -> Any:
        """The graph of a launch, captured when it comes for the third time; None before that.

        Args:
            key: All that the launch depends on.
            enqueue: Enqueues it on a stream.
        """
        graph = self._found.get(key)
        if graph is not None:
            return graph
        if len(self._found) >= _MOST_EACH:  # to make graphs in turn takes longer than to do without
            self._missed += 1
            if self._missed < _PATIENCE:
                return None
            self._found.clear()
            self._seen.clear()
            self._missed = 0
        seen = self._seen.get(key, 0) + 1
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] = seen
        if seen < _CAPTURE_AT:
            return None
        graph = self._found[key] = self._graphs.make(self, key, enqueue)
        return graph

    def drop(self, key: Hashable) -> None:
        """Gives a graph back, if it is still there."""
        self._found.pop(key, None)
        self._seen.pop(key, None)
