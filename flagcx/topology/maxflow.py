"""Maximum flow, for cuts in small graphs of links (Dinic's algorithm)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

_EPSILON = 1e-9


class FlowNetwork:
    """A directed network whose flows can be asked for.

    Example:
        >>> network = FlowNetwork()
        >>> network.add("a", "b", 3.0)
        >>> network.add("b", "c", 2.0)
        >>> value, side = network.min_cut("a", "c")
        >>> value, sorted(side)
        (2.0, ['a', 'b'])
    """

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {}
        self._out: list[list[int]] = []
        self._to: list[int] = []
        self._room: list[float] = []

    def add(self, a: Hashable, b: Hashable, capacity: float, back: float = 0.0) -> None:
        """Adds an arc from ``a`` to ``b``, and one back."""
        first, second = self._node(a), self._node(b)
        self._out[first].append(len(self._to))
        self._out[second].append(len(self._to) + 1)
        self._to += [second, first]
        self._room += [capacity, back]

    def min_cut(self, source: Hashable, sink: Hashable) -> tuple[float, set[Hashable]]:
        """The value of the least cut, and the nodes on the source's side of the smallest such cut.

        The network keeps its capacities: it can be asked again.
        """
        room = self._room[:]
        start, end = self._node(source), self._node(sink)
        flow = 0.0
        while (level := self._levels(start, end, room)) is not None:
            following = [0] * len(self._out)
            while (pushed := self._push(start, end, room, level, following)) > 0:
                flow += pushed
        reached = self._reached(start, room)
        return flow, {node for node, number in self._number.items() if number in reached}

    def _node(self, name: Hashable) -> int:
        number = self._number.setdefault(name, len(self._number))
        if number == len(self._out):
            self._out.append([])
        return number

    def _levels(self, start: int, end: int, room: list[float]) -> list[int] | None:
        level = [-1] * len(self._out)
        level[start] = 0
        queue = deque([start])
        while queue:
            here = queue.popleft()
            for arc in self._out[here]:
                there = self._to[arc]
                if room[arc] > _EPSILON and level[there] < 0:
                    level[there] = level[here] + 1
                    queue.append(there)
        return level if level[end] >= 0 else None

    def _push(self, start: int, end: int, room: list[float], level: list[int], following: list[int]) -> float:
        """Sends what one path of the level graph can take; 0 when there is none left."""
        path: list[int] = []
        here = start
        while here != end:
            arcs = self._out[here]
            while following[here] < len(arcs):
                arc = arcs[following[here]]
                if room[arc] > _EPSILON and level[self._to[arc]] == level[here] + 1:
                    break
                following[here] += 1
            if following[here] < len(arcs):
                path.append(arcs[following[here]])
                here = self._to[path[-1]]
            elif path:
                here = self._to[path.pop() ^ 1]
                following[here] += 1
            else:
                return 0.0
        amount = min(room[arc] for arc in path)
        for arc in path:
            room[arc] -= amount
            room[arc ^ 1] += amount
        return amount

    def _reached(self, start: int, room: list[float]) -> set[int]:
        seen, stack = {start}, [start]
        while stack:
            for arc in self._out[stack.pop()]:
                if room[arc] > _EPSILON and self._to[arc] not in seen:
                    seen.add(self._to[arc])
                    stack.append(self._to[arc])
        return seen
