"""The names of the algorithms."""

from __future__ import annotations

import enum


class Algorithm(str, enum.Enum):
    """How a collective is carried out. The value is the name used everywhere else.

    A member equals its value, so ``fc.Algorithm.RING`` and ``"ring"`` mean the same.

    Example:
        >>> Algorithm("double_binary_tree") is Algorithm.DBT
        True
    """

    RING = "ring"
    """Once or twice round a ring, a block at a time. Least traffic, most steps: for large messages."""
    CHAIN = "chain"
    """Along a row of ranks in pieces. For the largest broadcasts and reductions."""
    TREE = "tree"
    """A binary tree, pipelined. For messages of middle size."""
    BINOMIAL = "binomial"
    """A binomial tree, the fewest steps from or to one rank. For small messages."""
    DOUBLE_BINARY_TREE = "double_binary_tree"
    """Two binary trees at once, each with half of the message: a tree's steps at full bandwidth."""
    DBT = DOUBLE_BINARY_TREE
    """Short for DOUBLE_BINARY_TREE."""
    RECURSIVE_DOUBLING = "recursive_doubling"
    """Partners at distances 1, 2, 4, ... exchange all they have. For small messages."""
    HALVING_DOUBLING = "halving_doubling"
    """Partners exchange halves, quarters, ...: a ring's traffic in logarithmic steps (powers of two)."""
    ONE_SHOT = "one_shot"
    """All send all to all and add up themselves. One step: for the smallest messages and few ranks."""
    TWO_SHOT = "two_shot"
    """Each rank adds up one block, then sends it to all. Two steps, least traffic, all links at once."""
    DIRECT = "direct"
    """Each message straight from its owner to who needs it, in one step."""
    BRUCK = "bruck"
    """Distances double, blocks travel together: logarithmic steps for any number of ranks."""
    PAIRWISE = "pairwise"
    """An alltoall in n-1 steps, each rank with one partner at a time. For large messages."""
    DISSEMINATION = "dissemination"
    """A barrier in logarithmic steps: each rank tells one 1, 2, 4, ... further on."""
    HIERARCHICAL = "hierarchical"
    """Within groups (hosts) first, then between groups on as many lanes as a group has ranks."""
    SCATTER_ALLGATHER = "scatter_allgather"
    """A broadcast as scatter and allgather: a long message leaves the root about twice in all."""
    REDUCE_SCATTER_GATHER = "reduce_scatter_gather"
    """A reduce as reduce_scatter and gather, for long messages."""
    NATIVE = "native"
    """The library's own collective (NCCL's or MPI's). It has no schedule."""

    def __str__(self) -> str:
        return self.value
