"""The time of a training step whose gradients are reduced in buckets while they are computed."""

from __future__ import annotations

from collections.abc import Callable

LEAST_BUCKET_NBYTES, MOST_BUCKET_NBYTES = 64 << 10, 1 << 30
SIZE_TOLERANCE = 1.01
"""Of sizes within this factor of the best, the largest is taken: fewer calls disturb less."""
HOST_CALL_US, DEVICE_CALL_US = 500.0, 20.0
"""The cost of a call beside a computation, apart from its all-reduce: threads that wake on busy cores, or
kernels that pack and unpack."""


def step_us(
    total_nbytes: float, bucket_nbytes: float, time_us: Callable[[float], float], compute_us: float
) -> float:
    """Time of a step with buckets of one size.

    The k buckets become full one after the other while the gradients are computed, the last at the end of it.
    Each is reduced after those before it. Either the computation lasts longer, and only the last bucket is
    left at its end; or the all-reduces do, and only the first bucket's gradients are computed before them::

        computation  |--1--|--2--|--3--|            |--1--|--2--|--3--|
        all-reduces        |1|   |2|   |3|                |---1---|---2---|---3---|

    Args:
        total_nbytes: Bytes of all gradients.
        bucket_nbytes: Bytes of a bucket.
        time_us: Time of the all-reduce of so many bytes, in us.
        compute_us: Time in which the gradients are computed, in us.

    Example:
        >>> step_us(100, 25, lambda nbytes: nbytes, compute_us=100)
        125.0
    """
    buckets = max(round(total_nbytes / bucket_nbytes), 1)
    one = time_us(total_nbytes / buckets)
    return max(compute_us + one, compute_us / buckets + buckets * one)


def best_bucket_nbytes(
    total_nbytes: int, time_us: Callable[[float], float], compute_us: float | None = None
) -> int:
    """The largest bucket size with which a step takes hardly longer than with the best.

    Small buckets leave little to do at the end of the computation, large ones pay for fewer calls.

    Args:
        total_nbytes: Bytes of all gradients.
        time_us: Time of the all-reduce of so many bytes, in us.
        compute_us: Time in which the gradients are computed, in us; as long as the all-reduce of all of them
            if it is not known.

    Returns:
        A power of two from 64 KiB on.

    Example:
        >>> best_bucket_nbytes(64 << 20, lambda nbytes: 50 + nbytes / 125) >> 10
        1024
    """
    compute_us = time_us(total_nbytes) if compute_us is None else compute_us
    sizes = [LEAST_BUCKET_NBYTES]
    while sizes[-1] < min(total_nbytes, MOST_BUCKET_NBYTES):
        sizes.append(2 * sizes[-1])
    steps = [step_us(total_nbytes, size, time_us, compute_us) for size in sizes]
    return max(size for size, step in zip(sizes, steps, strict=True) if step <= SIZE_TOLERANCE * min(steps))
