"""The first step of a synchronizer: the ranks agree on the gradients, their order and the settings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flagcx.errors import ArgumentError
from flagcx.gradients.buckets import Gradient

if TYPE_CHECKING:
    from flagcx.communicator import Communicator


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of one rank.

    Attributes:
        gradients: The gradients.
        missing: Names of those that did not become ready.
        order: Numbers of the others, in the order in which they became ready.
        bucket_nbytes: Size of buckets in bytes, or None.
        overlap: Whether buckets are reduced beside the computation, or None.
        cores: The cores that the rank may use.
    """

    gradients: Sequence[Gradient]
    missing: Sequence[Hashable]
    order: Sequence[int]
    bucket_nbytes: int | None
    overlap: bool | None
    cores: set[int]


def agree(comm: Communicator, own: FirstStep) -> list[FirstStep]:
    """Exchanges the first steps of all ranks; rank 0's order and settings hold for all.

    Raises:
        ArgumentError: Ranks have different gradients, or one never made a gradient ready.
    """
    steps = comm.allgather_object(own)
    mine = steps[0].gradients
    for rank, step in enumerate(steps):
        if step.gradients != mine:
            pairs = zip(mine, step.gradients, strict=False)
            differing = next((f"{a} on rank 0, {b} on rank {rank}" for a, b in pairs if a != b), None)
            found = differing or f"{len(mine)} on rank 0, {len(step.gradients)} on rank {rank}"
            raise ArgumentError(
                f"ranks have different gradients: {found}; expected the same on all, in the same order"
            )
    for rank, step in enumerate(steps):
        if step.missing:
            raise ArgumentError(never_ready(step.missing, rank))
    return steps


def never_ready(missing: Sequence[Hashable], rank: int) -> str:
    """The message about a rank that waits without having made some gradients ready."""
    shown = ", ".join(map(repr, missing[:4])) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return (
        f"rank {rank} waits for its gradients, but never made {shown} ready in this step; call "
        f"sync.ready(name) for each, also for one that is zero"
    )
