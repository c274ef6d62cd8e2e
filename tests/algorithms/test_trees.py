"""The trees are trees, and the two of the double binary tree complement each other."""

from __future__ import annotations

from functools import partial

import pytest

from flagcx.algorithms import double_binary_tree as double
from flagcx.algorithms.chain import chain_links
from flagcx.algorithms.pipeline import Links
from flagcx.algorithms.tree import tree_height, tree_links

SIZES = (*range(1, 40), 64, 100, 127, 128, 129)


def assert_tree(links_of, size: int, root: int, height: int) -> None:
    """Every rank but the root is its parent's child, one level further down; all hang on the root."""
    links: list[Links] = [links_of(rank) for rank in range(size)]
    assert links[root].parent is None and links[root].depth == 0
    for rank, link in enumerate(links):
        for child in link.children:
            assert links[child].parent == rank
            assert links[child].depth == link.depth + 1
    assert sum(len(link.children) for link in links) == size - 1
    assert max(link.depth for link in links) == height
    assert max(len(link.children) for link in links) <= 2


def inner(links_of, size: int) -> set[int]:
    return {rank for rank in range(size) if links_of(rank).children}


@pytest.mark.parametrize("size", SIZES)
def test_binary_tree(size):
    for root in {0, size // 2, size - 1}:
        assert_tree(partial(tree_links, size, root), size, root, tree_height(size))


@pytest.mark.parametrize("size", SIZES)
def test_chain(size):
    assert_tree(partial(chain_links, size, size // 3), size, size // 3, size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_no_rank_is_an_inner_one_of_both_trees_of_an_allreduce_but_rank_0(size):
    first, second = (partial(double.allreduce_links, size, which) for which in (0, 1))
    roots = (0, 0) if size == 1 else (0, size - 1 if size % 2 == 0 else 1)
    for links_of, root in zip((first, second), roots, strict=True):
        assert_tree(links_of, size, root, double.tree_height(size))
    both = inner(first, size) & inner(second, size)
    assert both == ({0} if size % 2 and size > 1 else set())


@pytest.mark.parametrize("size", SIZES)
def test_no_rank_is_an_inner_one_of_both_trees_but_the_root(size):
    for root in {0, size // 2, size - 1}:
        first, second = (partial(double.rooted_links, size, root, which) for which in (0, 1))
        for links_of in (first, second):
            assert_tree(links_of, size, root, double.tree_height(size))
        assert inner(first, size) & inner(second, size) == ({root} if size > 1 else set())


def test_first_tree_is_the_one_drawn():
    parents = [double.place_links(8, place).parent for place in range(8)]
    assert parents == [None, 2, 4, 2, 0, 6, 4, 6]
    assert double.place_links(8, 0).children == (4,)
    assert double.place_links(8, 6).children == (5, 7)
    assert double.place_links(7, 6) == Links(parent=4, children=(5,), depth=2)
