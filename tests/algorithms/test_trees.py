"""The trees are trees, and the two of the double binary tree complement each other."""

from __future__ import annotations

from functools import partial

import pytest

from flagcx.algorithms import double_binary_tree as double
from flagcx.algorithms.chain import chain_position
from flagcx.algorithms.pipeline import TreePosition
from flagcx.algorithms.tree import tree_height, tree_position
from flagcx.schedule.compose import doublings

SIZES = (*range(1, 40), 64, 100, 127, 128, 129)


def assert_tree(tree, size: int, root: int, height: int) -> None:
    """Every rank but the root is its parent's child, one level further down; all hang on the root."""
    positions: list[TreePosition] = [tree(rank) for rank in range(size)]
    assert positions[root].parent is None and positions[root].depth == 0
    for rank, position in enumerate(positions):
        for child in position.children:
            assert positions[child].parent == rank
            assert positions[child].depth == position.depth + 1
    assert sum(len(position.children) for position in positions) == size - 1
    assert max(position.depth for position in positions) == height
    assert max(len(position.children) for position in positions) <= 2


def inner(tree, size: int) -> set[int]:
    return {rank for rank in range(size) if tree(rank).children}


@pytest.mark.parametrize("size", SIZES)
def test_binary_tree(size):
    for root in {0, size // 2, size - 1}:
        assert_tree(partial(tree_position, size, root), size, root, tree_height(size))


@pytest.mark.parametrize("size", SIZES)
def test_chain(size):
    assert_tree(partial(chain_position, size, size // 3), size, size // 3, size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_no_rank_is_an_inner_one_of_both_trees_of_an_allreduce_but_rank_0(size):
    first, second = (partial(double.allreduce_tree, size, which) for which in (0, 1))
    roots = (0, 0) if size == 1 else (0, size - 1 if size % 2 == 0 else 1)
    for tree, root in zip((first, second), roots, strict=True):
        assert_tree(tree, size, root, doublings(size))
    both = inner(first, size) & inner(second, size)
    assert both == ({0} if size % 2 and size > 1 else set())


@pytest.mark.parametrize("size", SIZES)
def test_no_rank_is_an_inner_one_of_both_trees_but_the_root(size):
    for root in {0, size // 2, size - 1}:
        first, second = (partial(double.rooted_tree, size, root, which) for which in (0, 1))
        for tree in (first, second):
            assert_tree(tree, size, root, doublings(size))
        assert inner(first, size) & inner(second, size) == ({root} if size > 1 else set())


def test_first_tree_is_the_one_drawn():
    parents = [double.first_tree(8, place).parent for place in range(8)]
    assert parents == [None, 2, 4, 2, 0, 6, 4, 6]
    assert double.first_tree(8, 0).children == (4,)
    assert double.first_tree(8, 6).children == (5, 7)
    assert double.first_tree(7, 6) == TreePosition(parent=4, children=(5,), depth=2)
