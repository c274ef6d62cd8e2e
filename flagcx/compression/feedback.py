"""Error feedback: what a codec took from one gradient is added to the next.

A codec alone loses what it rounds or leaves out. With a residual nothing is lost, only late: the rank keeps
e + g - C(e + g) and adds it to its next gradient. Training then comes as far as without compression, also
with codecs that keep one number in a hundred.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD" (2019); momentum correction, factor masking and
clipping: Lin et al., "Deep Gradient Compression" (2018), sections 3.1 to 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from flagcx.arguments import on_device
from flagcx.compression.codec import Scratch, captures, namespace
from flagcx.errors import ArgumentError


class Slot:
    """What one array's compressed all-reduces remember. Made by ``Feedback``; one for each array.

    Attributes:
        codec: The codec.
        shapes: Shapes of the parameters that lie end to end in the array, or None.
        residual: What this rank has not sent yet (float32, one dimension), or None.
        velocity: The momentum of this rank's gradients, or None.
        step: Calls so far; the same on every rank.
        memory: What the codec itself remembers, by name.
        plans: What has been made ready for calls with it.
        lasting: Whether it is always one array's; else calls with any array of one length share it, and only
            what is of no array is remembered.
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
        """Forgets everything, as at the start of a training. Do it on all ranks."""
        self.residual: Any = None
        self.velocity: Any = None
        self.step = 0
        self.memory: dict[str, Any] = {}
        self._count: int | None = None

    def begin(self, x: Any) -> None:
        """Counts a call with ``x``, and makes the arrays at the first.

        Raises:
            ArgumentError: The slot has held an array of another number of elements, or is new inside a
                capture.
        """
        if self._count is None:
            self._check_shapes(x.size)
            keeps = self._keeps and not self.codec.lossless
            if (keeps or self._momentum) and on_device(x) and captures(x):
                raise ArgumentError(
                    f"the slot {self.key!r} of this Feedback is new: a graph that captures its first call "
                    f"would clear its memory in every replay; make one call before the capture"
                )
            self._count = x.size
            xp = namespace(x)
            if keeps:
                self.residual = xp.zeros(x.size, np.float32)
            if self._momentum:
                self.velocity = xp.zeros(x.size, np.float32)
        elif self._count != x.size:
            raise ArgumentError(
                f"the slot {self.key!r} of this Feedback remembers an array of {self._count} elements, and "
                f"got one of {x.size}; use a slot for each array: compression=feedback[key]"
            )
        self.step += 1

    def _check_shapes(self, count: int) -> None:
        if self.shapes is None:
            return
        total = sum(math.prod(shape) for shape in self.shapes)
        if total != count:
            raise ArgumentError(
                f"the shapes of slot {self.key!r} have {total} elements together, but its array has {count}"
            )

    def source(self, x: Any, scratch: Scratch, ranks: int) -> Any:
        """This step's contribution before the residual: clipped, and with momentum.

        Args:
            x: The gradient; stays as it is.
            scratch: For the clipped gradient.
            ranks: Number of ranks; each clips at ``clip / sqrt(ranks)``.
        """
        if self._clip is not None:
            norm = float(math.sqrt(float(namespace(x).vdot(x, x))))
            limit = self._clip / math.sqrt(ranks)
            if norm > limit:
                clipped = scratch.get("clipped", x.size, np.float32, x)
                clipped[...] = x
                clipped *= np.float32(limit / norm)
                x = clipped
        if self.velocity is None:
            return x
        self.velocity *= np.float32(self._momentum)
        self.velocity += x
        return self.velocity

    def sent(self, indices: Any) -> None:
        """Clears what a sparse codec has sent: the residual, and the momentum that led to it."""
        if self.residual is not None:
            self.residual[indices] = 0
        if self.velocity is not None:
            self.velocity[indices] = 0

    def __repr__(self) -> str:
        count = "nothing yet" if self._count is None else f"{self._count} elements"
        return f"<flagcx.compression.Slot {self.key!r} of {self.codec}, {count}, {self.step} steps>"


class Feedback:
    """Error feedback for any codec: a slot of memory for each array that is compressed.

    Args:
        codec: A codec, or its name.
        momentum: Momentum correction: gradients gather momentum on each rank *before* they are compressed;
            the optimizer then uses none of its own. 0 for none.
        residual: Whether what was lost is added to the next gradient. Without it a slot still remembers
            what the codec needs, such as the warm start of PowerSGD.
        clip: Largest norm of the sum of gradients; each rank clips its own at ``clip / sqrt(ranks)``. None
            for no clipping.

    Attributes:
        codec: The codec.
        momentum: See above.

    Raises:
        ArgumentError: No codec has that name, or a number is out of range.

    Example:
        >>> feedback = Feedback("int4")
        >>> for name, gradient in gradients.items():                                # doctest: +SKIP
        ...     comm.allreduce(gradient, "avg", compression=feedback[name])
    """

    def __init__(
        self, codec: Any, *, momentum: float = 0.0, residual: bool = True, clip: float | None = None
    ) -> None:
        from flagcx.compression.catalogue import codec_of

        if not 0 <= momentum < 1:
            raise ArgumentError(f"momentum={momentum!r} must be from 0 to below 1")
        if clip is not None and not clip > 0:
            raise ArgumentError(f"clip={clip!r} must be above 0, or None")
        self.codec = codec_of(codec)
        self.momentum = momentum
        self._options: dict[str, Any] = {"momentum": momentum, "residual": residual, "clip": clip}
        self._slots: dict[Hashable, Slot] = {}

    def slot(self, key: Hashable = None, shapes: Sequence[tuple[int, ...]] | None = None) -> Slot:
        """The memory of one array.

        Args:
            key: Names the array: anything hashable, the same on every rank.
            shapes: Shapes of the parameters that lie end to end in it, for codecs that work on matrices.
        """
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = Slot(self.codec, key, shapes, **self._options)
        return found

    def __getitem__(self, key: Hashable) -> Slot:
        return self.slot(key)

    def drop(self, key: Hashable) -> None:
        """Forgets the memory of one array."""
        self._slots.pop(key, None)

    def reset(self) -> None:
        """Forgets all memory, as at the start of a training. Do it on all ranks."""
        for slot in self._slots.values():
            slot.reset()

    def __repr__(self) -> str:
        return f"Feedback({self.codec!r}, {len(self._slots)} slots)"
