"""Codecs that send few elements: the largest (top-k), random ones (random-k), all but zeros (sparse)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flagcx.arguments import is_number
from flagcx.compression.codec import Payload, Scratch, check_floats, check_steps, namespace
from flagcx.compression.select import estimate_threshold, is_crowded, largest, magnitudes, select
from flagcx.errors import ArgumentError

_WARM_FROM = 0.25
_WORDS_PACKED, _WIDEST_GAP, _EXPECTED_GAPS = 1.5, 1 << 16, 12
TOO_MANY, TOO_FEW = 1.25, 0.8
"""Shares of k beyond which a threshold does not fit."""


class _Selecting:
    """Base of codecs whose payload is indices and values."""

    __slots__ = ()
    name: ClassVar[str]

    def encode(self, x: Any) -> Payload:
        """Encodes an array (float32) as the indices and the values of the selected elements."""
        flat = check_floats(x).reshape(-1)
        indices = self._indices(flat)
        return Payload(self.name, flat.size, (indices, flat[indices]))

    def _indices(self, flat: Any) -> Any:
        """The places of the selected elements, in order."""
        raise NotImplementedError

    def decode(self, payload: Payload, out: Any = None) -> Any:
        """Decodes a payload into ``out`` (float32), or into a new array; elements not selected are zero."""
        indices, values = payload.parts
        if out is None:
            out = namespace(values).zeros(payload.count, values.dtype)
        else:
            out[...] = 0
        out.reshape(-1)[indices] = values
        return out


@dataclass(frozen=True, slots=True)
class TopK(_Selecting):
    """The largest elements, as indices and values.

    The threshold comes from a sample, so that about k elements reach it, and is used again as long as it
    fits; where many more elements reach it than k, the largest k of them are taken, and the least of these is
    the next threshold. Of the sum of all ranks the largest 4k are kept.

    Use it with ``Feedback``: without, most of a gradient is lost. Most elements then come late, so that a
    training needs a warm-up, and an optimizer with less momentum: at 1%, 0.7 in place of 0.9, and steps three
    times as large, for which (1 - momentum) is. The loss of three networks was then 1.00, 1.01 and 1.03 times
    that without compression after the same steps, and with 0.9 alone 0.86 to 1.32 times
    (``bench/convergence.py``).

    Attributes:
        density: k as a share of the elements, above 0 and at most 1.
        keep: Elements kept of the sum, as a multiple of k; 0 for all that any rank sent. A rank sends at
            most (2 + 2 keep) k (n-1)/n words.
        warmup_steps: Steps in which the density falls exponentially from 25% to its value.

    Example:
        >>> payload = TopK(density=0.5).encode(np.float32([1, -9, 0.1, 5]))
        >>> payload.parts[0].tolist(), payload.parts[1].tolist()
        ([1, 3], [-9.0, 5.0])

    Source: Lin et al., "Deep Gradient Compression" (2018): sampling (section 3.4), warm-up (section 3.3).
    """

    name: ClassVar[str] = "topk"
    lossless: ClassVar[bool] = False
    density: float = 0.01
    keep: float = 4.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_density(self.density)
        if not (is_number(self.keep) and (self.keep == 0 or self.keep >= 1)):
            raise ArgumentError(f"keep={self.keep!r} must be 0 (all) or 1 or more times k")
        check_steps(self.warmup_steps)

    def density_at(self, step: int) -> float:
        """The density in a step, counted from 1."""
        if step > self.warmup_steps or self.density >= _WARM_FROM:
            return self.density
        return float(_WARM_FROM * (self.density / _WARM_FROM) ** ((step - 1) / self.warmup_steps))

    def count(self, size: int, step: int) -> int:
        """k for an array of ``size`` elements."""
        return min(max(round(size * self.density_at(step)), 1), size)

    def _indices(self, flat: Any) -> Any:
        return self.find(flat, Scratch(), step=self.warmup_steps + 1)[0]

    def find(
        self,
        x: Any,
        scratch: Scratch,
        step: int,
        threshold: int | None = None,
        add: Any = None,
        out: Any = None,
    ) -> tuple[Any, int | None]:
        """Finds the elements of ``x`` to send in a step, or of ``x + add``, which is written into ``out``.

        Returns:
            Indices in order, and the threshold if the next step may use it again.
        """
        if not x.size:
            return namespace(x).empty(0, np.int32), None
        k, density = self.count(x.size, step), self.density_at(step)
        if threshold is not None and is_crowded(x, threshold, density, step, add):
            threshold = None
        used_again = threshold is not None
        if threshold is None:
            threshold = estimate_threshold(x, density, step, add)
        indices = select(x, threshold, scratch, add, out)
        x = x if add is None else out
        if used_again and len(indices) < TOO_FEW * k:
            threshold = estimate_threshold(x, density, step)
            indices = select(x, threshold, scratch)
        if len(indices) > TOO_MANY * k:
            values = x[indices]
            chosen = largest(values, k)
            indices, threshold = indices[chosen], int(magnitudes(values[chosen]).min())
        return indices, threshold if len(indices) >= TOO_FEW * k else None

    def ratio(self, count: int, ranks: int = 2) -> float:
        """At most (2 + 2 keep) k (n-1)/n words, over 2 (n-1)/n words for each element."""
        kept = min(self.keep, ranks) if self.keep else ranks
        return min((1 + kept) * self.density, 1.0)


@dataclass(frozen=True, slots=True)
class RandomK(_Selecting):
    """Elements drawn at random, the same on all ranks, so that only values travel.

    Each of k parts of equal length gives one element. Use it with ``Feedback``: then an element arrives about
    every ``1 / density`` steps, as the sum since the last time, and the step size must be as much smaller.
    With a step size for dense gradients, trainings diverge at 1%: to 10 and 900 times the loss, or NaN
    (``bench/convergence.py``).

    Attributes:
        density: k as a share of the elements, above 0 and at most 1.
        seed: Seed of the choice, together with the number of the step.
    """

    name: ClassVar[str] = "randomk"
    lossless: ClassVar[bool] = False
    density: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        _check_density(self.density)

    def places(self, size: int, step: int) -> np.ndarray:
        """The elements of a step, in order."""
        k = min(max(round(size * self.density), 1), size)
        if not size or k == size:
            return np.arange(size)
        part = size / k
        drawn = np.random.default_rng([self.seed, step]).random(k)
        return np.minimum(((np.arange(k) + drawn) * part).astype(np.int64), size - 1)

    def encode(self, x: Any, step: int = 1) -> Payload:
        """Encodes an array (float32) as the indices and the values of the elements of a step."""
        flat = check_floats(x).reshape(-1)
        indices = namespace(flat).asarray(self.places(flat.size, step))
        return Payload(self.name, flat.size, (indices, flat[indices]))

    def ratio(self, count: int, ranks: int = 2) -> float:
        """Only values are sent."""
        return self.density


@dataclass(frozen=True, slots=True)
class Sparse(_Selecting):
    """All elements that are not zero, as indices and values: for gradients that are sparse by nature.

    Nothing is lost. A sample shows whether an array is sparse; if it isn't, its all-reduce is the dense one.

    Attributes:
        most: The density above which the elements aren't even counted.
    """

    name: ClassVar[str] = "sparse"
    lossless: ClassVar[bool] = True
    most: float = 0.5

    def __post_init__(self) -> None:
        _check_density(self.most)

    def _indices(self, flat: Any) -> Any:
        return select(flat, 1, Scratch())

    def ratio(self, count: int, ranks: int = 2, density: float = 1.0) -> float:
        """The ratio for arrays in which a share of elements that other ranks don't know of isn't zero.

        Each element costs its value and the gap before it in two bytes, on its way to its owner; and so does
        each of the sum, on its way to all. Where ranks have the same elements, the sum has fewer.

        Args:
            count: Elements.
            ranks: Number of ranks.
            density: The share d of elements that aren't zero. The ratio is nearly 3/4 (n + 1) d if it is
                small.

        Example:
            >>> round(Sparse().ratio(1 << 20, ranks=4, density=0.01), 4)
            0.0371
        """
        if density > self.most:
            return 1.0
        summed = 1 - (1 - density) ** ranks
        words = _WORDS_PACKED if density * _WIDEST_GAP > _EXPECTED_GAPS else 2.0
        return min(words / 2 * (density + summed), 1.0)


def _check_density(density: float) -> None:
    if not (is_number(density) and 0 < density <= 1):
        raise ArgumentError(
            f"density={density!r} must be above 0 and at most 1 (0.01 keeps one in a hundred)"
        )
