"""Communication hooks for ``DistributedDataParallel``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
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
    gradients (error feedback), unless ``residual`` is False. A step with infinity or NaN in one bucket on any
    rank, which a GradScaler skips, leaves the error feedback of all buckets as it was. The part that was lost
    keeps the scale of its step, so a scaler should change its scale seldom.

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
        The hook, for ``model.register_comm_hook(state, hook)``. ``hook.state_dict()`` is what this rank's
        error feedback remembers, and ``hook.load_state_dict(state)`` takes it over; see
        ``flagcx.compression.Feedback``. DDP forms its buckets anew after the first backward pass: for the
        same bits as a training that went through, make one pass before parameters and states are loaded.

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

    flagcx_hook.state_dict = slots.state_dict  # type: ignore[attr-defined]
    flagcx_hook.load_state_dict = slots.load_state_dict  # type: ignore[attr-defined]
    return no_dynamo(flagcx_hook)


def _feedback(compression: Any, residual: bool, momentum: float, clip: float | None) -> Any:
    if compression is None:
        if momentum or clip is not None:
            raise ArgumentError("momentum and clip belong to a compression, and compression is None")
        return None
    from flagcx.compression import as_feedback

    return as_feedback(compression, momentum=momentum, residual=residual, clip=clip)


class _BucketSlots:
    """The compression memory of each bucket; dropped when DDP forms new buckets."""

    def __init__(self, feedback: Any) -> None:
        self._feedback = feedback
        self._layouts: dict[Any, tuple] = {}
        # The layout before, calls with it, and with the present one.
        self._before: dict[Any, tuple] = {}
        self._loaded: dict[int, tuple] = {}  # of loaded memory that no bucket has used yet

    def slot(self, bucket: Any) -> Any:
        """The memory of a bucket; None where nothing is compressed."""
        if self._feedback is None:
            return None
        index, shapes = bucket.index(), tuple(tuple(p.shape) for p in bucket.parameters())
        if index not in self._loaded:
            return self._of_layout(index, shapes)
        until_then = "until then", index
        if self._loaded[index] == shapes:
            del self._loaded[index]
            self._feedback.drop(until_then)
            return self._of_layout(index, shapes)
        if until_then not in self._layouts:
            warnings.warn(
                f"bucket {index} of DDP has other parameters than the one whose memory was loaded, which is "
                f"used once DDP has formed that one; make a backward pass before load_state_dict",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._of_layout(until_then, shapes)

    def __repr__(self) -> str:
        return f"<a hook of DDP with {self._feedback!r}>"

    def _of_layout(self, key: Any, shapes: tuple) -> Any:
        last, (before, others, calls) = self._layouts.get(key, shapes), self._before.get(key, (None, 0, 0))
        if last != shapes:
            if before == shapes and others == calls == 1:
                raise ArgumentError(
                    f"bucket {key} of this hook has the parameters of two models in turns, whose error "
                    f"feedback would be lost; make a hook for each of them by ddp_hook(...)"
                )
            self._feedback.drop(key)
            before, others, calls = last, calls, 0
        self._layouts[key], self._before[key] = shapes, (before, others, calls + 1)
        return self._feedback.slot(key, shapes)

    def end_step(self) -> None:
        """Takes the step back in all buckets if one of them had infinity or NaN."""
        self._feedback.end_step(user=self)

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers; empty where nothing is compressed."""
        return {} if self._feedback is None else self._feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` gave, on all ranks, between two steps."""
        if self._feedback is None:
            if len(state):
                raise ArgumentError("the state is one of a hook with compression, and this one has none")
            return
        self._feedback.load_state_dict(state)
        slots = [slot for slot in self._feedback if slot.resumes]
        self._layouts = {slot.key: slot.shapes for slot in slots}
        self._loaded = {slot.key: slot.shapes for slot in slots if isinstance(slot.key, int)}


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
    last = bucket.is_last()

    def task() -> None:
        comm.allreduce(array, "avg", compression=slot)
        if last:
            slots.end_step()

    return queue.run(task, [buffer], False, buffer).get_future()


def _averaged_by_torch(group: FlagcxProcessGroup, buffer: Any) -> Any:
    buffer.div_(group.size())
    future = group.original.allreduce([buffer]).get_future()
    return future.then(lambda done: done.value()[0])
