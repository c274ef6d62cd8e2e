"""What was worked out for arrays that came before is found again, and never for others."""

from __future__ import annotations

import gc
from collections import OrderedDict

import numpy as np
import pytest

from flagcx.fusion.cache import BindingCache, Bound, BoundPart, drop_oldest, identities


class Array:
    """Stands for an array; only its identity counts."""


class Places:
    def __init__(self) -> None:
        self.kept = True


class Plan:
    """Notes what it was run with."""

    def __init__(self) -> None:
        self.ran: list = []

    def run(self, given, result) -> None:
        self.ran.append((given, result))


class Packing:
    def __init__(self, log: list) -> None:
        self.flat, self._log = "message", log

    def pack_at(self, places) -> None:
        self._log.append(("pack", places))

    def unpack_at(self, places) -> None:
        self._log.append(("unpack", places))


def names_of(arrays) -> tuple:
    return ("sum",), identities(arrays)


@pytest.fixture
def bindings() -> BindingCache:
    return BindingCache()


def bring(bindings: BindingCache, arrays, memory: tuple, bound: Bound) -> str:
    """One step of a training with these arrays; says how they were recognised."""
    names, memory = names_of(arrays), (*memory, (0,) * len(arrays))
    if bindings.of_arrays(names) is not None:
        return "arrays"
    if bindings.in_memory(memory, names, arrays) is not None:
        return "memory"
    bindings.put(memory, names, bound)
    return "no"


def test_parts_run_in_order():
    log: list = []
    message, alone, places = Plan(), Plan(), Places()
    arrays = ["a", "b", "c"]
    Bound([BoundPart(message, -1, Packing(log), places), BoundPart(alone, 1)]).run(arrays, arrays)
    assert log == [("pack", places), ("unpack", places)]
    assert message.ran == [("message", "message")] and alone.ran == [("b", "b")]


def test_arrays_are_recognised_by_their_memory_then_by_themselves(bindings):
    arrays, bound = [Array() for _ in range(5)], Bound([])
    assert [bring(bindings, arrays, (1,), bound) for _ in range(4)] == ["no", "memory", "arrays", "arrays"]
    assert bindings.of_arrays(names_of(arrays)) is bound
    assert bindings.of_arrays(names_of(arrays[:4])) is None
    assert bindings.of_arrays((("max",), identities(arrays))) is None
    assert bindings.of_arrays(((["no key"],), ())) is None


def test_arrays_that_are_gone_are_not_recognised(bindings):
    arrays, bound = [Array() for _ in range(5)], Bound([])
    for _ in range(3):
        bring(bindings, arrays, (1,), bound)
    names = names_of(arrays)
    assert bindings.of_arrays(names) is bound
    arrays[3] = Array()
    gc.collect()
    assert bindings.of_arrays(names) is None
    assert bring(bindings, arrays, (1,), bound) == "memory"
    assert bring(bindings, arrays, (2,), Bound([])) == "no"


def test_arrays_that_never_last_are_no_longer_watched(bindings):
    bound, lasting = Bound([]), [Array()]
    bring(bindings, lasting, (1,), bound)
    for loss in range(2):
        arrays = [Array()]
        assert [bring(bindings, arrays, (1,), bound) for _ in range(3)][-1] == "arrays", loss
        arrays.clear()
    assert [bring(bindings, lasting, (1,), bound) for _ in range(3)] == ["memory"] * 3


def test_what_no_longer_holds_is_worked_out_anew(bindings):
    arrays, places = [Array()], Places()
    bound = Bound([BoundPart(Plan(), -1, Packing([]), places)])
    for _ in range(3):
        bring(bindings, arrays, (1,), bound)
    places.kept = False
    assert bring(bindings, arrays, (1,), Bound([])) == "no"
    assert bring(bindings, arrays, (1,), Bound([])) == "memory"


def test_arrays_are_told_apart_by_their_identity_alone():
    some = [np.array(3.0), np.zeros(0), np.zeros((2, 2)), [np.zeros(2)], None, np.array(object()), "text"]
    assert np.frombuffer(identities(some), np.uintp).tolist() == [*map(id, some)]
    assert identities([]) == b""


@pytest.mark.parametrize("kind", [identities, tuple])
def test_lists_of_many_arrays_leave_room_for_few(kind):
    some = [None] * 20_000
    kept = OrderedDict(((number, kind(some)), number) for number in range(5))
    assert drop_oldest(kept) and [*kept.values()] == [2, 3, 4]
    assert not drop_oldest(kept)


def test_the_oldest_lists_are_forgotten(bindings):
    many = [[Array()] for _ in range(100)]
    for i, arrays in enumerate(many):
        for _ in range(3):
            bring(bindings, arrays, (i,), Bound([]))
    assert bindings.of_arrays(names_of(many[0])) is None
    assert bindings.in_memory((0, (0,) * len(many[0])), names_of(many[0]), many[0]) is None
    assert bindings.of_arrays(names_of(many[-1])) is not None
    bindings.clear()
    assert bindings.of_arrays(names_of(many[-1])) is None
    assert bindings.in_memory((99, (0,) * len(many[-1])), names_of(many[-1]), many[-1]) is None


def test_lists_are_forgotten_when_they_have_too_many_arrays_together(bindings, monkeypatch):
    monkeypatch.setattr("flagcx.fusion.cache._MOST_ARRAYS", 20)
    arrays, bound = [Array() for _ in range(8)], Bound([])
    for memory in range(4):
        bring(bindings, arrays, (memory,), bound)
    kept = [bindings.in_memory((memory, (0,) * 8), (memory,), arrays) is bound for memory in range(4)]
    assert kept == [False, False, True, True]
    longest = [Array() for _ in range(30)]
    assert [bring(bindings, longest, (9,), bound) for _ in range(2)] == ["no", "memory"]
