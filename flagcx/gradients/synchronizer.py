"""The synchronizer: all-reduces of gradients that become ready in any order, beside the computation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from flagcx.arguments import format_nbytes, is_number
from flagcx.errors import ArgumentError, CommunicatorError, FlagcxError
from flagcx.executor.host import Executor
from flagcx.gradients.abandon import abandon, end
from flagcx.gradients.apart import check_apart
from flagcx.gradients.bucket_size import agree_on_size, overlap_pays
from flagcx.gradients.buckets import Bucket, form_buckets, make_bucket
from flagcx.gradients.checkpoint import check_between, feedback_of, load, save
from flagcx.gradients.first_step import FirstStep, agree, never_ready
from flagcx.gradients.known import KnownGradients

if TYPE_CHECKING:
    from flagcx.communicator import Communicator
    from flagcx.transport.base import DeviceTransport


class GradientSynchronizer:
    """Sums or averages the gradients of all ranks, in buckets, while further gradients are computed.

    Call ``ready`` for each gradient as soon as it is complete, in any order; a full bucket is reduced at
    once, beside the computation. Call ``wait`` before the optimizer: the results are in the same arrays. Or
    let the optimizer begin with the first of them, by ``for name in sync.reduced():``. The first step records
    the order in which gradients become ready, and forms the buckets from that of rank 0.

    On a GPU buckets are packed, reduced and unpacked on the communicator's own stream, which has priority
    over the computation's; on the host on a thread that leaves the cores to NumPy. If data is moved by cores
    that are all busy, as through shared memory with a rank on each core, buckets are reduced in ``wait`` and
    ``reduced`` instead, since overlap would gain nothing.

    Large gradients are not packed but reduced in place, with the least work in memory from
    ``comm.empty(shape, dtype, device=...)``. Neither write nor read a gradient from ``ready`` until ``wait``.
    After the first step nothing is allocated.

    Args:
        comm: The communicator. All ranks make a synchronizer for gradients of the same names and shapes.
        parameters: The gradients by name, or a list of them, whose names are then 0, 1, ...: NumPy or CuPy
            arrays, or others that the communicator takes. Parameters will do, if ``ready`` is given the
            gradients.
        bucket_bytes: Size of a bucket. Chosen in the first step, by the measured speed of the all-reduce and
            the time that the gradients take to become ready, if None.
        compression: As ``Communicator.allreduce`` takes it; each bucket has error feedback of its own.
        average: Whether the average is taken; else the sum.
        overlap: Whether buckets are reduced beside the computation, as rank 0 sets it. None for everywhere
            but on hosts where that takes cores from the computation, see above.

    Attributes:
        bucket_nbytes: Size of a bucket in bytes; None before the first step, if it is to be chosen.
        reason: The reason for that size.

    Raises:
        ArgumentError: ``parameters`` are empty, or ``bucket_bytes`` is below 1.
        ArrayError: The communicator does not take one of the arrays.

    Example:
        >>> with fc.GradientSynchronizer(comm, gradients) as sync:  # doctest: +SKIP
        ...     for batch in batches:
        ...         for name in reversed(layers):
        ...             gradients[name][...] = backward(name)
        ...             sync.ready(name)
        ...         sync.wait()
        ...         optimizer_step()
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Mapping[Any, Any] | Sequence[Any],
        bucket_bytes: int | None = None,
        compression: Any = None,
        average: bool = True,
        overlap: bool | None = None,
    ) -> None:
        if bucket_bytes is not None and not (is_number(bucket_bytes) and bucket_bytes >= 1):
            raise ArgumentError(f"bucket_bytes={bucket_bytes!r} must be at least 1, or None")
        self._comm, self._op = comm, "avg" if average else "sum"
        self._known = known = KnownGradients(comm, parameters, self._op)
        self._numbers, self._executors, self._gradients = known.numbers, known.executors, known.gradients
        self._arrays = list(known.arrays)
        self._feedback = feedback_of(compression)
        self._overlap = overlap
        self._given = bucket_bytes, "given" if bucket_bytes is not None else ""
        self.bucket_nbytes, self.reason = self._given
        self._buckets: list[Bucket] = []
        self._home: list[Bucket] = []
        self._settled: Sequence[int] = ()
        self._is_ready = [False] * len(self._arrays)
        self._order: list[int] = []
        self._next, self._accumulating, self._closed = 0, False, False
        self._began = 0.0
        self._stream: Any = None

    # -- a step -----------------------------------------------------------------------------------

    def ready(self, name: Hashable, gradient: Any = None) -> None:
        """Says that a gradient is ready to be reduced.

        Args:
            name: Its name, or its number in the list.
            gradient: The array with the gradient, of the shape and dtype known; the one that the synchronizer
                was made with if None. The result will be in it.

        Raises:
            ArgumentError: There is no gradient of that name, or it has been made ready in this step already.
            ArrayError: It has another shape or dtype than it had.
        """
        number = self._numbers.get(name)
        if number is None:
            raise self._known.unknown(name)
        if self._closed:
            raise CommunicatorError("this GradientSynchronizer is closed; make a new one")
        if self._is_ready[number]:
            raise ArgumentError(
                f"the gradient {name!r} was made ready twice in one step; call sync.wait() once all are "
                f"ready, and use 'with sync.accumulate():' for backward passes that only add up"
            )
        array = self._known.take(number, gradient)
        self._is_ready[number] = True
        if self._accumulating:
            return
        self._arrays[number] = array
        if self._gradients[number].place == "device":
            self._follow_stream(self._executors[number])
        if not self._buckets:
            if not self._order:
                self._began = perf_counter()
            self._order.append(number)
            return
        bucket = self._home[number]
        bucket.left -= 1
        if not bucket.left:
            self._start_full()

    def _follow_stream(self, executor: Executor) -> None:
        """Makes the current stream wait for the one on which the previous gradient became ready.

        So all gradients of a bucket are complete where it is started, whatever their streams.
        """
        stream = self._comm.fusion_of(executor).packer.current_stream()
        if self._stream is not None:
            cast("DeviceTransport", executor.transport).order(self._stream, stream)
        self._stream = stream

    def _start_full(self) -> None:
        """Starts the buckets that are full; in one order on all ranks, so that none waits for another."""
        buckets = self._buckets
        while self._next < len(buckets) and not buckets[self._next].left:
            bucket = buckets[self._next]
            if self._comm.size > 1:
                bucket.start([self._arrays[number] for number in bucket.members])
            self._next += 1

    def wait(self) -> None:
        """Waits until all gradients are reduced, for the optimizer. All ranks must call it.

        On a GPU the current stream waits, and the host goes on.

        Raises:
            ArgumentError: A gradient was never made ready in this step. From the second step on the peers
                get an error too, since they wait for it, and the communicator cannot be used any more.
            CommunicationError: A peer died, came late or gave up.
        """
        for _ in self.reduced():
            pass

    def reduced(self) -> Iterator[Hashable]:
        """Waits as ``wait`` does, and yields the name of each gradient as soon as it is reduced.

        So the optimizer overlaps with the buckets that are still under way. Leaving the loop early waits for
        all of them. Inside ``accumulate`` it yields nothing.

        Yields:
            The names of the gradients, bucket by bucket. On a GPU the result is in the array for work that is
            enqueued on the current stream from then on.

        Raises:
            ArgumentError, CommunicationError: As ``wait``.

        Example:
            >>> for name in sync.reduced():  # doctest: +SKIP
            ...     parameters[name] -= rate * gradients[name]
        """
        if self._closed:
            raise CommunicatorError("this GradientSynchronizer is closed; make a new one")
        if self._accumulating:
            self._is_ready = [False] * len(self._is_ready)
            return
        if not self._buckets:
            self._settle()
        elif self._next < len(self._buckets):
            self._give_up()
        for bucket in self._buckets:
            if not bucket.overlap:
                bucket.wait()
        waiting = iter(self._buckets)
        try:
            for bucket in waiting:
                bucket.wait()
                for number in bucket.members:
                    yield self._gradients[number].name
        except GeneratorExit:
            for bucket in waiting:
                bucket.wait()
            self._begin_again()
            raise
        self._begin_again()

    def _begin_again(self, undo: bool = False) -> None:
        if self._feedback is not None:
            self._feedback.end_step(undo, self)
        for bucket in self._buckets:
            bucket.begin_again()
        self._is_ready = [False] * len(self._is_ready)
        self._order, self._next = [], 0

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Communicates nothing inside a ``with`` block, for backward passes that only add to the gradients.

        ``ready`` and ``wait`` may be called there as everywhere.

        Example:
            >>> with sync.accumulate():  # doctest: +SKIP
            ...     backward(first_half)
            >>> backward(second_half)    # doctest: +SKIP
            >>> sync.wait()              # doctest: +SKIP
        """
        if self._order or self._next or any(self._is_ready):
            raise ArgumentError(
                f"sync.accumulate() in the middle of a step: {sum(self._is_ready)} of {len(self._gradients)} "
                f"gradients are ready; call sync.wait() before"
            )
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before
            self._is_ready = [False] * len(self._is_ready)

    def _missing(self) -> list[Hashable]:
        return [g.name for g, ready in zip(self._gradients, self._is_ready, strict=True) if not ready]

    def _give_up(self) -> None:
        """Ends a step that cannot end well: the peers wait for a gradient that will not come."""
        if not any(self._is_ready):
            raise ArgumentError(
                f"rank {self._comm.rank} waits for its gradients, but made none of them ready since the last "
                f"step; call sync.ready(name) for each, and sync.wait() once after that"
            )
        message = never_ready(self._missing(), self._comm.rank)
        if self._comm.size > 1:
            end(self._comm.rank, self._executors, message)
        self._begin_again()
        raise ArgumentError(message)

    def abandon(self) -> None:
        """Leaves a step in the middle; the next ``ready`` begins another one. All ranks must call it.

        Buckets that no rank has started are not reduced, and those that some rank has are reduced on all
        ranks. So the gradients hold nothing of use; error feedback is as before the step. A ``with`` block
        that is left by an exception does the same.

        Raises:
            CommunicationError: A rank has not come in time, or died.

        Example:
            >>> if not comm.allreduce(np.isfinite(loss), "land"):  # doctest: +SKIP
            ...     sync.abandon()
        """
        if self._closed:
            raise CommunicatorError("this GradientSynchronizer is closed; make a new one")
        self._abandon(self._comm.config.timeout_s)

    def _abandon(self, timeout_s: float) -> None:
        abandon(self._comm, self._buckets, self._next, self._start_incomplete, timeout_s)
        self._begin_again(undo=True)

    def _start_incomplete(self, bucket: Bucket) -> None:
        """Starts a bucket that another rank has started, with zeros in place of what is not ready."""
        for number in bucket.members:
            if not self._is_ready[number]:
                self._arrays[number][...] = 0
        bucket.start([self._arrays[number] for number in bucket.members])

    def state_dict(self) -> dict[str, Any]:
        """What a training needs to be continued with the same bits: the buckets, and this rank's feedback.

        Every rank saves its own, between two steps. See ``flagcx.compression.Feedback.state_dict``.
        """
        check_between(self._is_ready, "state_dict")
        return save(self._gradients, self._settled, self.bucket_nbytes, self._feedback)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` gave, on all ranks, between two steps. See
        ``flagcx.compression.Feedback.load_state_dict``.

        Raises:
            ArgumentError: It is the state of other gradients, or of another compression.
        """
        check_between(self._is_ready, "load_state_dict")
        self._settled, bucket_nbytes = load(state, self._gradients, self._feedback)
        self._release()
        settled = bucket_nbytes, "as in the checkpoint"
        self.bucket_nbytes, self.reason = settled if self._settled else self._given

    # -- the first step ---------------------------------------------------------------------------

    def _settle(self) -> None:
        """Forms the buckets, as rank 0 has seen the gradients become ready, and starts them all."""
        comm = self._comm
        backward_us = (perf_counter() - self._began) * 1e6
        order = self._settled or self._order
        facts = self._gradients, self._missing(), order, self.bucket_nbytes, self._overlap
        try:
            check_apart([gradient.name for gradient in self._gradients], self._arrays)
            steps = agree(comm, FirstStep(*facts, os.sched_getaffinity(0)))
        except ArgumentError:
            self._begin_again()
            raise
        self._settled = steps[0].order
        order, overlap, self.bucket_nbytes = steps[0].order, steps[0].overlap, steps[0].bucket_nbytes
        cores_of_ranks = [step.cores for step in steps]
        overlaps = [
            overlap_pays(executor, cores_of_ranks) if overlap is None else overlap
            for executor in self._executors
        ]
        if self.bucket_nbytes is None:
            facts_of_size = self._gradients, self._executors, overlaps, backward_us
            self.bucket_nbytes, self.reason = agree_on_size(comm, *facts_of_size)
        self._home = [None] * len(self._gradients)  # type: ignore[list-item]
        for members in form_buckets(order, self._gradients, self.bucket_nbytes):
            first = [self._arrays[number] for number in members]
            executor = self._executors[members[0]]
            bucket = make_bucket(
                comm, executor, members, first, self._op, self._feedback, overlaps[members[0]]
            )
            self._buckets.append(bucket)
            for number in members:
                self._home[number] = bucket
            bucket.left = 0
        self._start_full()

    # -- the end ----------------------------------------------------------------------------------

    @property
    def buckets(self) -> list[tuple[Hashable, ...]]:
        """The names of each bucket's gradients, in the order of reduction; empty before the first step."""
        return [tuple(self._gradients[number].name for number in b.members) for b in self._buckets]

    def close(self) -> None:
        """Waits for the buckets under way, and releases their memory."""
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        for bucket in self._buckets:
            with contextlib.suppress(FlagcxError):
                bucket.finish()
            if bucket.packing is not None:
                bucket.packing.close()
        self._buckets, self._home = [], []

    def __enter__(self) -> GradientSynchronizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and not self._closed and not any(e.over for e in self._executors):
            self._leave(error)
        self.close()

    def _leave(self, error: BaseException | None) -> None:
        """Abandons the step; the peers hear of it if they do not come, too."""
        config, rank = self._comm.config, self._comm.rank
        try:
            self._abandon(min(config.explain_wait_s, config.timeout_s))
        except FlagcxError:
            why = f"left its GradientSynchronizer in the middle of a step: {type(error).__name__}: {error}"
            end(rank, self._executors, f"rank {rank} {why}")

    def __repr__(self) -> str:
        comm, total = self._comm, sum(gradient.nbytes for gradient in self._gradients)
        text = f"rank {comm.rank} of {comm.size}, {len(self._gradients)} gradients of {format_nbytes(total)}"
        if self._buckets:
            text += f" in {len(self._buckets)} buckets of up to {format_nbytes(self.bucket_nbytes or 0)}"
        if self._feedback is not None:
            text += f", {self._feedback.codec.name}"
        return f"<flagcx.GradientSynchronizer {text}{', closed' if self._closed else ''}>"
