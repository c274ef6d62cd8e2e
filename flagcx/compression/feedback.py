"""Error feedback: the part of a gradient that a codec lost is added to the next gradient.

A codec alone drops the part that it rounds off or leaves out. With a residual that part arrives later: the
rank keeps e + g - C(e + g) and adds it to its next gradient. Training then comes as far as without
compression, even with codecs that keep one number in a hundred.

Top-k and random-k send most elements late. Deep Gradient Compression gathers momentum before elements are
chosen, and clears that of an element which is sent, so that old gradients don't push it on. But what is
cleared is lost: elements that are sent often lose up to nine tenths of their step (at 0.9), and a
convolutional network came to 2.5 times the dense loss in the same steps. Here an element takes along all that
momentum would still have added to it, and is chosen by that sum, so that nothing of a gradient is lost
(``bench/convergence.py``).

Source: Karimireddy et al., "Error Feedback Fixes SignSGD" (2019); momentum correction, factor masking and
clipping: Lin et al., "Deep Gradient Compression" (2018), sections 3.1 to 3.3.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from flagcx.compression.catalogue import codec_of
from flagcx.compression.slot import Slot
from flagcx.errors import ArgumentError


class Feedback:
    """Error feedback for any codec: a slot of memory for each array that is compressed.

    Args:
        codec: A codec, or its name.
        momentum: Momentum correction: each rank adds momentum to its gradients *before* they are compressed;
            the optimizer then uses none of its own, and a weight decay that it adds to gradients must be
            1 / (1 - momentum) times as large. 0 for none.
        residual: Whether lost parts are added to the next gradient. Without it a slot still keeps the
            codec's own state, such as the warm start of PowerSGD.
        clip: Largest norm of the sum of gradients; each rank clips its own at ``clip / sqrt(ranks)``. None
            for no clipping.

    Attributes:
        codec: The codec.
        momentum: The momentum.

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
            shapes: Shapes of the parameters that lie end to end in it, for codecs that work on matrices; the
                array's own shape if None.

        Raises:
            ArgumentError: The slot was made for other shapes.
        """
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = Slot(self.codec, key, shapes, **self._options)
        elif shapes is not None:
            found.check_shapes(shapes)
        return found

    def __getitem__(self, key: Hashable) -> Slot:
        return self.slot(key)

    def drop(self, key: Hashable) -> None:
        """Removes the memory of one array."""
        self._slots.pop(key, None)

    def reset(self) -> None:
        """Clears all memory, as at the start of a training. Call it on all ranks."""
        for slot in self._slots.values():
            slot.reset()

    def __repr__(self) -> str:
        return f"Feedback({self.codec!r}, {len(self._slots)} slots)"


def as_feedback(compression: Any) -> Feedback | None:
    """Error feedback for a caller's ``compression=``, for a training loop that compresses many arrays.

    Args:
        compression: None, a name, a codec, or a ``Feedback``, which is returned as it is.

    Raises:
        ArgumentError: It is none of these.
    """
    if compression is None or isinstance(compression, Feedback):
        return compression
    if isinstance(compression, Slot):
        raise ArgumentError(
            f"compression={compression!r} remembers one array; for many, give the Feedback that it is from"
        )
    return Feedback(codec_of(compression))
