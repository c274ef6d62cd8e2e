"""Communication hooks for ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from flagcx.errors import ArgumentError
from flagcx.interop.enhance import config_of, current
from flagcx.interop.no_dynamo import no_dynamo
from flagcx.interop.process_group import FlagcxProcessGroup
from flagcx.interop.tensors import is_plain


def ddp_hook(
    compression: Any = None,
    *,
    group: Any = None,
    residual: bool = True,
    momentum: float = 0.0,
    clip: float | None = None,
    **options: Any,
) -> Callable[[Any, Any], Any]:
    """Makes a hook that averages the buckets of gradients through flagcx, compressed if asked for.

    The process group need not be enhanced. The part of a bucket that compression loses is added to its next
    gradients (error feedback), unless ``residual`` is False.

    Args:
        compression: Name of a codec, such as "fp16", "int8", "topk" or "powersgd", a codec with its
            settings, a ``flagcx.compression.Feedback``, "auto", or None for none. The same on every rank.
        group: The process group of the model; the state given to ``register_comm_hook``, or else the
            default group, where it is None.
        residual: Whether errors are fed back; a ``Feedback`` has its own setting.
        momentum: Momentum that is applied before compression (momentum correction).
        clip: Largest norm of a bucket's gradients, before the lost part is added; None for any.
        options: Fields of ``fc.Config``, for a group that is not enhanced.

    Returns:
        The hook, for ``model.register_comm_hook(state, hook)``.

    Raises:
        ArgumentError: There is no such codec or option.

    Example:
        >>> model = DistributedDataParallel(network)                        # doctest: +SKIP
        >>> model.register_comm_hook(None, ddp_hook(compression="int8"))    # doctest: +SKIP
    """
    config_of(None, options)
    slots = _BucketSlots(_feedback(compression, residual, momentum, clip))
    groups = _Groups(group, options)

    # Without annotations: DDP compares them with its own types, and finds text here.
    def flagcx_hook(state, bucket):  # type: ignore[no-untyped-def]
        return _average(groups.group_for(state), slots, bucket)

    return no_dynamo(flagcx_hook)


def _feedback(compression: Any, residual: bool, momentum: float, clip: float | None) -> Any:
    if compression is None:
        if momentum or clip is not None:
            raise ArgumentError("momentum and clip belong to a compression, and compression is None")
        return None
    from flagcx.compression import Feedback, as_feedback

    if isinstance(compression, Feedback):
        return compression
    as_feedback(compression)  # raises if it is not known
    return Feedback(compression, momentum=momentum, residual=residual, clip=clip)


class _BucketSlots:
    """The compression memory of each bucket; dropped when DDP forms new buckets."""

    def __init__(self, feedback: Any) -> None:
        self._feedback = feedback
        self._layouts: dict[int, tuple] = {}

    def slot(self, bucket: Any) -> Any:
        """The memory of a bucket; None where nothing is compressed."""
        if self._feedback is None:
            return None
        index, shapes = bucket.index(), tuple(tuple(p.shape) for p in bucket.parameters())
        if self._layouts.get(index, shapes) != shapes:
            self._feedback.drop(index)
        self._layouts[index] = shapes
        return self._feedback.slot(index, shapes=list(shapes))


class _Groups:
    """flagcx's process groups for those that models use."""

    def __init__(self, group: Any, options: dict[str, Any]) -> None:
        self._group, self._options = group, options
        self._made: dict[Any, FlagcxProcessGroup] = {}

    def group_for(self, state: Any) -> FlagcxProcessGroup:
        """The group itself where it is enhanced; else one of flagcx's over the same ranks."""
        given = state if self._group is None and isinstance(state, dist.ProcessGroup) else self._group
        group = current(given)
        if isinstance(group, FlagcxProcessGroup):
            return group
        found = self._made.get(group)
        if found is None:
            store = c10d._world.pg_map[group][1]
            found = self._made[group] = FlagcxProcessGroup(group, store, config_of(None, self._options))
        return found


def _average(group: FlagcxProcessGroup, slots: _BucketSlots, bucket: Any) -> Any:
    """Averages a bucket's gradients over the ranks; the future has the buffer."""
    buffer = bucket.buffer()
    queue = group.queue_of([buffer])
    slot = slots.slot(bucket)
    if queue is None or not is_plain(buffer):
        return _averaged_by_torch(group, buffer)
    comm, array = queue.comm, queue.views.elements(buffer)
    if slot is None:
        return queue.run(lambda: comm.allreduce(array, "avg"), [buffer], False, buffer).get_future()
    work = queue.run(lambda: comm.allreduce(array, "avg", compression=slot), [buffer], False, buffer)
    return work.get_future()


def _averaged_by_torch(group: FlagcxProcessGroup, buffer: Any) -> Any:
    buffer.div_(group.size())
    future = group.original.allreduce([buffer]).get_future()
    return future.then(lambda done: done.value()[0])
