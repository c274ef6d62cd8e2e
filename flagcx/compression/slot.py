"""The memory of one compressed array between calls."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from flagcx.arguments import on_device
from flagcx.compression.codec import Scratch, captures, clear_nonfinite, namespace
from flagcx.errors import ArgumentError


class Slot:
    """The memory of one array's compressed all-reduces; ``Feedback`` makes one for each array.

    Attributes:
        codec: The codec.
        shapes: Shapes of the parameters that lie end to end in the array; None for that of the array itself.
        residual: The part of this rank's gradients that is not sent yet (float32, one dimension), or None.
        velocity: The momentum of this rank's gradients, or None.
        step: Calls so far; the same on every rank.
        memory: State of the codec's all-reduce, by name.
        plans: The plans of calls with this slot.
        lasting: Whether the slot belongs to one array. Otherwise all arrays of one length share it, and it
            keeps nothing that depends on an array's content.
    """

    def __init__(
        self,
        codec: Any,
        key: Hashable = None,
        shapes: Sequence[tuple[int, ...]] | None = None,
        momentum: float = 0.0,
        residual: bool = True,
        clip: float | None = None,
        lasting: bool = True,
    ) -> None:
        self.codec, self.key, self.lasting = codec, key, lasting
        self.shapes = None if shapes is None else tuple(tuple(shape) for shape in shapes)
        self._momentum, self._keeps, self._clip = momentum, residual, clip
        self.plans: dict[tuple, Any] = {}
        self.reset()

    def reset(self) -> None:
        """Clears the memory, as at the start of a training. Call it on all ranks."""
        self.residual: Any = None
        self.velocity: Any = None
        self.step = 0
        self.memory: dict[str, Any] = {}
        self._count: int | None = None
        self._shape: tuple[int, ...] | None = None

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raises ArgumentError where the slot is not one for parameters of these shapes."""
        given = tuple(tuple(shape) for shape in shapes)
        if given != self.shapes:
            known = "no shapes" if self.shapes is None else f"the shapes {_short(self.shapes)}"
            raise ArgumentError(
                f"the slot {self.key!r} of this Feedback was made for {known}, and is asked for with "
                f"{_short(given)}; use another key, or feedback.drop({self.key!r}) first"
            )

    def begin(self, x: Any, shape: tuple[int, ...] | None = None) -> None:
        """Counts a call with ``x``; the first call allocates the residual and the velocity.

        Args:
            x: The array, in one dimension.
            shape: The caller's, if it matters to the codec.

        Raises:
            ArgumentError: Earlier calls had another number of elements or another shape, or the slot is new
                inside a capture.
        """
        if self._count is None:
            total = x.size if self.shapes is None else sum(map(math.prod, self.shapes))
            if total != x.size:
                raise ArgumentError(
                    f"the shapes of slot {self.key!r} have {total} elements together, but its array has "
                    f"{x.size}"
                )
            keeps = self._keeps and not self.codec.lossless
            if (keeps or self._momentum) and on_device(x) and captures(x):
                raise ArgumentError(
                    f"the slot {self.key!r} of this Feedback is new: a graph that captures its first call "
                    f"would clear its memory in every replay; make one call before the capture"
                )
            self._count, self._shape = x.size, shape
            xp = namespace(x)
            if keeps:
                self.residual = xp.zeros(x.size, np.float32)
            if self._momentum:
                self.velocity = xp.zeros(x.size, x.dtype)
        elif self._count != x.size:
            raise ArgumentError(
                f"the slot {self.key!r} of this Feedback remembers an array of {self._count} elements, and "
                f"got one of {x.size}; use a slot for each array: compression=feedback[key]"
            )
        elif self._shape != shape and self.shapes is None:
            raise ArgumentError(
                f"the slot {self.key!r} of this Feedback remembers the matrix of an array of shape "
                f"{self._shape}, and got an array of shape {shape}; use a slot for each array, or reshape it"
            )
        self.step += 1

    def source(self, x: Any, scratch: Scratch, ranks: int) -> Any:
        """This step's contribution before the residual: clipped, and with momentum.

        Args:
            x: The gradient; it is not written.
            scratch: Holds the clipped gradient.
            ranks: Number of ranks; each clips at ``clip / sqrt(ranks)``.
        """
        if self._clip is not None:
            norm, limit = _norm(x), self._clip / math.sqrt(ranks)
            if limit < norm < math.inf:
                clipped = scratch.get(f"clipped {x.dtype.itemsize}", x.size, x.dtype, x)
                namespace(x).multiply(x, x.dtype.type(limit / norm), out=clipped)
                x = clipped
        if self.velocity is None:
            return x
        self.velocity *= self.velocity.dtype.type(self._momentum)
        self.velocity += x
        return self.velocity

    def total(self, x: Any, scratch: Scratch, ranks: int) -> Any:
        """This step's contribution with the residual, which then holds it; see ``source``."""
        source = self.source(x, scratch, ranks)
        if self.residual is None:
            return source
        self.residual += source
        return self.residual

    def ahead(self, kept: Any, scratch: Scratch) -> Any:
        """What is kept, with all that momentum would still add to it: m + m^2 + ... of the velocity.

        It is 1 / (1 - m) of the gradients since ``sent`` cleared an element, which without compression would
        move the parameters as far, only later.
        """
        whole = scratch.get("ahead", kept.size, np.float32, kept)
        namespace(kept).multiply(self.velocity, np.float32(self._momentum / (1 - self._momentum)), out=whole)
        whole += kept
        return whole

    def sent(self, indices: Any) -> None:
        """Clears the elements that were sent, in the residual and in the momentum that led to it."""
        for kept in (self.residual, self.velocity):
            if kept is not None:
                kept[indices] = 0

    def sent_all(self) -> None:
        """Clears the residual, since all of it was sent. Momentum goes on: none of it was late."""
        if self.residual is not None:
            self.residual[...] = 0
        self.heal_velocity()

    def heal(self) -> None:
        """Clears what is infinite or NaN after a step that had such numbers: they would stay for ever."""
        if self.residual is not None:
            clear_nonfinite(self.residual)
        self.heal_velocity()

    def heal_velocity(self) -> None:
        """Does so in the momentum alone."""
        if self.velocity is not None:
            clear_nonfinite(self.velocity)

    @property
    def keeps(self) -> bool:
        """Whether lost parts of a lossy codec are kept for the next call."""
        return self._keeps

    def __repr__(self) -> str:
        count = "nothing yet" if self._count is None else f"{self._count} elements"
        return f"<flagcx.compression.Slot {self.key!r} of {self.codec}, {count}, {self.step} steps>"


def _short(shapes: Sequence[tuple[int, ...]]) -> str:
    more = f" and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    return ", ".join(map(str, shapes[:4])) + more


def _norm(x: Any) -> float:
    """The norm of an array whose squares may be out of range."""
    norm = math.sqrt(float(namespace(x).vdot(x, x)))
    if math.isinf(norm):
        wide = x.astype(np.float64)
        norm = math.sqrt(float(namespace(x).vdot(wide, wide)))
    return norm
