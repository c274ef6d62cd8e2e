"""The end of a step that was left in the middle: all ranks run the buckets that any of them has started."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flagcx.errors import CommunicationError
from flagcx.gradients.buckets import Bucket

if TYPE_CHECKING:
    from flagcx.communicator import Communicator
    from flagcx.executor.host import Executor

_COUNT = struct.Struct("<q")


def abandon(
    comm: Communicator,
    buckets: Sequence[Bucket],
    started: int,
    start: Callable[[Bucket], None],
    timeout_s: float,
) -> None:
    """Brings all ranks to the same place in the order of buckets. All of them must call it.

    Args:
        comm: The communicator.
        buckets: The buckets, in the order in which they are started.
        started: How many of them this rank has started.
        start: Starts a bucket whose gradients are not complete.
        timeout_s: How long to wait for the other ranks, in seconds.

    Raises:
        CommunicationError: A rank did not come, or died.
    """
    if comm.size > 1 and comm._store is not None and any(bucket.overlap for bucket in buckets):
        counts = comm._store.exchange("abandoned step", _COUNT.pack(started), timeout_s)
        most = max(_COUNT.unpack(count)[0] for count in counts)
        for bucket in buckets[started:most]:
            start(bucket)
    for bucket in buckets:
        bucket.drop()
        bucket.wait()


def end(rank: int, executors: Sequence[Executor], why: str) -> None:
    """Ends the communicator of a step that cannot end well, and tells the peers."""
    error = CommunicationError(why, peer=rank)
    for executor in {id(executor): executor for executor in executors}.values():
        executor.broke(error)
