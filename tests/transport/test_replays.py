"""Graphs of launches that come back, on a fake of CuPy's streams."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from flagcx.transport.peer_memory import replays
from flagcx.transport.peer_memory.replays import Graphs, Replays


class Stream(contextlib.nullcontext):
    """Its graphs are the lists of what was enqueued while it captured."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.enqueued: list | None = None

    def begin_capture(self) -> None:
        assert self.enqueued is None
        self.enqueued = []

    def end_capture(self) -> list:
        graph, self.enqueued = self.enqueued, None
        return graph


@pytest.fixture
def graphs() -> Graphs:
    return Graphs(SimpleNamespace(cuda=SimpleNamespace(Stream=Stream)))


def test_the_third_launch_with_the_same_arrays_has_a_graph(graphs):
    plan, other = Replays(graphs), Replays(graphs)
    for key in ((1, 2), (1, 3)):
        found = [plan.find(key, lambda stream, key=key: stream.enqueued.append(key)) for _ in range(4)]
        assert found == [None, None, [key], [key]] and found[2] is found[3]
    assert other.find((1, 2), lambda stream: None) is None, "each plan has graphs of its own"


def test_graphs_are_few(graphs, monkeypatch):
    monkeypatch.setattr(replays, "_MOST", 20)
    first, second = Replays(graphs), Replays(graphs)

    def made(plan: Replays, key: int) -> object:
        return [plan.find(key, lambda stream: stream.enqueued.append(key)) for _ in range(3)][-1]

    monkeypatch.setattr(replays, "_MOST_EACH", 16)
    monkeypatch.setattr(replays, "_PATIENCE", 100)
    assert [made(first, key) for key in range(18)] == [*([key] for key in range(16)), None, None]
    assert [made(second, key) for key in range(10)] == [[key] for key in range(10)]
    assert len(first._found) + len(second._found) == 20, "of all plans: the oldest go"
    assert first.find(15, lambda stream: None) == [15]
    third = Replays(graphs)
    for key in (*range(16), *range(100, 140)):
        made(third, key)
    assert third._found and min(third._found) >= 100, "in the end it takes the arrays of today"
    graphs.close()
    assert not first._found and not second._found


def test_a_capture_that_fails_is_ended(graphs):
    plan = Replays(graphs)

    def fail(stream: Stream) -> None:
        raise ValueError("no launch")

    plan.find(1, fail)
    plan.find(1, fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no launch"):
            plan.find(1, fail)
    assert graphs._stream.enqueued is None
