"""Lists of NumPy arrays that come again are recognised, and never mistaken for others."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from flagcx.errors import ArrayError
from flagcx.fusion.cache import identities
from flagcx.fusion.known_lists import ArraysChanged, KnownList, KnownLists, ListPart


class Doubling:
    """A plan whose sum over the ranks is twice the message."""

    def run(self, sendbuf, recvbuf) -> None:
        np.multiply(sendbuf, 2, out=recvbuf)


def some_arrays() -> list[np.ndarray]:
    return [np.full(shape, i + 1.0, np.float32) for i, shape in enumerate([(3,), (2, 4), (), (1, 5)])]


def known_list(arrays: list[np.ndarray], *numbers: list[int]) -> KnownList:
    """A message for each list of numbers."""
    parts = []
    for some in numbers or ([*range(len(arrays))],):
        flat, views, at = np.empty(sum(arrays[i].size for i in some), np.float32), [], 0
        for i in some:
            views.append(flat[at : at + arrays[i].size].reshape(arrays[i].shape))
            at += arrays[i].size
        parts.append(ListPart(Doubling(), some, flat.dtype, flat, views))
    return KnownList(parts, [])


@pytest.mark.parametrize("numbers", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[3], [0, 1, 2]]])
def test_every_array_gets_its_own_result(numbers):
    arrays = some_arrays()
    known_list(arrays, *numbers).run(arrays, arrays)
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(array, np.full(array.shape, 2 * (i + 1.0)))


def test_a_single_array_travels_without_a_message():
    arrays = some_arrays()
    part = ListPart(Doubling(), [1], arrays[1].dtype)
    KnownList([part], []).run(arrays, arrays)
    assert arrays[1].max() == 4 and arrays[0].max() == 1
    arrays[1].dtype = np.int32
    with pytest.raises(ArraysChanged):
        KnownList([part], []).run(arrays, arrays)


@pytest.mark.parametrize("change", ["dtype", "flags", "strides"])
def test_single_arrays_are_looked_at_before_anything_is_sent(change):
    arrays = [np.ones(4, np.float32), np.ones(3, np.float32)]
    known = KnownList([ListPart(Doubling(), [i], array.dtype) for i, array in enumerate(arrays)], [])
    if change == "flags":
        arrays[1].flags.writeable = False
    elif change == "dtype":
        arrays[1].dtype = np.int32
    else:
        arrays[1] = arrays[1][::-1]
    with pytest.raises(ArraysChanged) as changed:
        known.run(arrays, arrays)
    assert changed.value.left == [0, 1] and arrays[0].max() == 1


def test_another_dtype_is_found_before_anything_is_sent():
    arrays = some_arrays()
    known = known_list(arrays)
    arrays[1].dtype = np.int32
    before = arrays[1].copy()
    with pytest.raises(ArraysChanged) as changed:
        known.run(arrays, arrays)
    assert changed.value.left == [0, 1, 2, 3]
    np.testing.assert_array_equal(arrays[1], before)


def test_what_is_left_after_another_dtype_later_in_the_list():
    arrays = some_arrays()
    known = known_list(arrays, [0, 2], [1, 3])
    arrays[3].dtype = np.int32
    with pytest.raises(ArraysChanged) as changed:
        known.run(arrays, arrays)
    assert changed.value.left == [1, 3] and [a.max() for a in arrays[:3]] == [2, 2, 6]


def test_arrays_of_other_shapes_are_filled_all_the_same():
    arrays = some_arrays()
    known = known_list(arrays)
    arrays[1].shape, arrays[1][...] = (4, 2), np.arange(8).reshape(4, 2)
    arrays[3].shape = (5, 1)
    known.run(arrays, arrays)
    np.testing.assert_array_equal(arrays[1], 2 * np.arange(8).reshape(4, 2))
    assert [array.max() for array in arrays] == [2, 14, 6, 8]


def test_an_array_of_a_known_list_cannot_be_resized():
    lists, arrays = KnownLists(), some_arrays()
    for _ in range(2):
        lists.note(("names",), arrays, lambda: known_list(arrays))
    with pytest.raises(ValueError, match="cannot resize"):
        arrays[0].resize(8, refcheck=False)


def test_a_read_only_array_is_named_and_all_others_get_their_results():
    arrays = some_arrays()
    known = known_list(arrays, [0, 1, 2], [3])
    arrays[1].flags.writeable = False
    with pytest.raises(ArrayError, match=r"of shape \(2, 4\) is read-only"):
        known.run(arrays, arrays)
    assert [array.max() for array in arrays] == [2, 2, 6, 8]


def test_a_list_is_known_from_its_second_time_on_and_as_long_as_its_arrays_live():
    lists, arrays = KnownLists(), some_arrays()
    names = ("sum", identities(arrays))
    made = []

    def make() -> KnownList:
        made.append(known_list(arrays))
        return made[-1]

    lists.note(names, arrays, make)
    assert lists.find(names) is None and not made
    lists.note(names, arrays, make)
    assert lists.find(names) is made[0]
    assert lists.find(("max", names[1])) is None
    assert lists.find((["no key"],)) is None
    del make
    arrays.pop()
    gc.collect()
    assert lists.find(names) is None


def test_few_lists_are_kept():
    lists, kept = KnownLists(), []
    for _ in range(40):
        arrays = some_arrays()
        kept.append(arrays)
        names = ("sum", identities(arrays))
        for _ in range(2):
            lists.note(names, arrays, lambda: known_list(some_arrays()))
    found = [lists.find(("sum", identities(arrays))) is not None for arrays in kept]
    assert found == [False] * 8 + [True] * 32
