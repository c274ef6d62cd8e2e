"""Checks what callers pass, and says clearly what is wrong with it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import numpy as np

from flagcx.errors import ArgumentError, ArrayError, RankError
from flagcx.foreign_arrays import host_view

_MOST_WORK = 10_000
_DLPACK_CUDA = (2, 13)  # Memory of a GPU, and managed memory.


def on_device(array) -> bool:
    """Whether an array lives on a GPU. Imports nothing."""
    kind = type(array)
    if kind is np.ndarray:
        return False
    if hasattr(kind, "__dlpack_device__"):
        try:
            return array.__dlpack_device__()[0] in _DLPACK_CUDA
        except Exception:  # of an array without memory, which is refused as one of the host
            return False
    return hasattr(kind, "__cuda_array_interface__")


def host_array(array, what: str, *, writable: bool) -> np.ndarray:
    """Takes an array of the host, of any strides, without a copy.

    Args:
        array: A NumPy array, or anything with ``__array_interface__``, ``__array__`` or DLPack that
            shares its memory (a torch or JAX array on the CPU, bfloat16, fp8 and parameters included).
        what: What the array is called in messages.
        writable: Whether it will be written.

    Raises:
        ArrayError: It is no array, masked, of a foreign byte order, or read-only and to be written.
    """
    view = array if type(array) is np.ndarray else host_view(array, what, writable)
    if not view.dtype.isnative:
        raise ArrayError(
            f"{what} has the foreign byte order {view.dtype.str}; convert it with "
            f".astype({what}.dtype.newbyteorder('='))"
        )
    if writable and not view.flags.writeable:
        raise ArrayError(
            f"{what} is read-only and would be written; pass out=, or a copy that can be written"
        )
    return view


def result_array(out, what: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Checks an ``out=`` array, or makes one.

    Raises:
        ArrayError: It has another dtype or number of elements, or cannot be written in place.
    """
    if out is None:
        return np.empty(shape, dtype)
    view = host_array(out, what, writable=True)
    check_result(view, what, shape, dtype)
    return view


def check_result(view: Any, what: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises ArrayError where a NumPy or CuPy array for a result has another dtype or number of elements."""
    if view.dtype != dtype:
        raise ArrayError(f"{what} has dtype {view.dtype}, expected {dtype}")
    count = math.prod(shape)
    if view.size != count:
        raise ArrayError(
            f"{what} has {view.size} elements (shape {view.shape}), expected {count}: shape {shape}"
        )


def check_shape(shape) -> tuple[int, ...]:
    """Checks the shape of an array that is to be made.

    Args:
        shape: Lengths of the axes, or the number of elements of an array with one axis.

    Raises:
        ArgumentError: It is no shape of an array.

    Example:
        >>> check_shape(3), check_shape((2, 0))
        ((3,), (2, 0))
    """
    try:
        lengths = np.atleast_1d(shape).tolist()
        return np.empty(tuple(map(as_integer, lengths)), np.dtype([])).shape  # of elements without bytes
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"shape={shape!r} is no shape of an array ({error}); expected a number of elements from 0 up, or "
            f"a tuple of lengths such as (3, 4)"
        ) from None


def is_number(x: Any) -> bool:
    """Whether something is a real number, of Python or NumPy, and no truth value."""
    return isinstance(x, Real) and not isinstance(x, bool)


def as_integer(x: Any) -> int:
    """An integer of Python or NumPy as an ``int``.

    Raises:
        TypeError: It is none; a truth value is none either.

    Example:
        >>> as_integer(np.int64(3))
        3
    """
    if isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{x!r} is a truth value")
    return operator.index(x)


def check_integer(value: Any, what: str, least: int) -> int:
    """Checks a number of something.

    Raises:
        ArgumentError: It is no integer, or below ``least``.
    """
    try:
        number = as_integer(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ArgumentError(f"{what} must be an integer from {least} up, got {value!r}")
    return number


def check_seconds(value: Any, what: str) -> None:
    """Checks a limit of time that may be left out.

    Raises:
        ArgumentError: It is neither a number above 0 nor None.
    """
    if value is not None and not (is_number(value) and value > 0):
        raise ArgumentError(f"{what} must be a number of seconds above 0, or None, got {value!r}")


def format_nbytes(nbytes: float) -> str:
    """Bytes for people.

    Example:
        >>> format_nbytes(1536), format_nbytes(64 << 20)
        ('1.5 KiB', '64 MiB')
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.4g} {unit}"
    return f"{nbytes:.4g} B"


def check_rank(rank, size: int, what: str) -> int:
    """Checks a root or peer.

    Raises:
        RankError: It is not an integer from 0 to ``size - 1``.
    """
    try:
        value = as_integer(rank)
    except TypeError:
        if hasattr(rank, "__array_interface__") or hasattr(rank, "__dlpack__"):
            raise RankError(
                f"{what} is an array; expected a rank, 0 to {size - 1}. An array for the result is given by "
                f"name: out=y"
            ) from None
        raise RankError(f"{what}={rank!r} is not an integer; expected 0 to {size - 1}") from None
    if not 0 <= value < size:
        raise RankError(f"{what}={value} is not a rank of this communicator; expected 0 to {size - 1}")
    return value


def check_algorithm(algorithm: Any) -> None:
    """Checks that the name of an algorithm is one; the selector knows which there are.

    Raises:
        ArgumentError: It is neither a ``str`` nor None.
    """
    if not (algorithm is None or isinstance(algorithm, str)):
        raise ArgumentError(f"algorithm={algorithm!r} is no name of an algorithm, such as 'ring'")


def blocks_of(x: np.ndarray, size: int) -> tuple[int, tuple[int, ...]]:
    """Cuts the first axis of an array into one block a rank.

    Returns:
        Elements of one block, and its shape.

    Raises:
        ArrayError: The first axis is not a multiple of ``size``.
    """
    if x.ndim == 0 or x.shape[0] % size:
        raise ArrayError(
            f"x has shape {x.shape}; its first axis must be a multiple of {size}, one block a rank. "
            f"For blocks of different sizes use the v form"
        )
    shape = (x.shape[0] // size, *x.shape[1:])
    return int(np.prod(shape, dtype=np.int64)), shape


def check_counts(counts, size: int, what: str) -> tuple[int, ...]:
    """Checks a list of one element count a rank.

    Raises:
        ArgumentError: Of the wrong length, or with an entry that is no count.
    """
    try:
        values = tuple(as_integer(c) for c in counts) if not isinstance(counts, (str, bytes)) else None
    except TypeError:
        values = None
    if values is None:
        raise ArgumentError(f"{what}={counts!r} is not a list of {size} element counts") from None
    if len(values) != size or min(values, default=0) < 0:
        raise ArgumentError(f"{what}={list(values)} must have {size} entries, one a rank, none below 0")
    return values


def untangle(collective: str, rank: int, given: Any, result: Any, counts: Any = 0) -> tuple[Any, bool]:
    """Finds out how INPUT and OUTPUT lie to each other.

    Args:
        collective: Name of the collective.
        rank: This rank.
        given: INPUT, or None.
        result: OUTPUT, or None.
        counts: Elements of each rank's block where they differ; else any number.

    Returns:
        The INPUT to use, and whether the call is in place. Where the two overlap in any other way than
        the collective's own form in place, the INPUT is a copy.
    """
    if given is None or result is None:
        return given, False
    if given is result and collective != "alltoall":
        return given, True
    if not np.may_share_memory(given, result):
        return given, False
    if collective == "alltoall":
        return _copy(given), False
    at, to = _address(given), _address(result)
    block = min(given.nbytes, result.nbytes)
    before = rank * block if isinstance(counts, int) else sum(counts[:rank]) * given.itemsize
    if collective in ("allgather", "gather"):
        fits = at - to == before and given.nbytes < result.nbytes
    elif collective in ("reduce_scatter", "scatter"):
        fits = to - at == before and result.nbytes < given.nbytes
    else:
        fits = at == to and given.nbytes == result.nbytes
    return (given, True) if fits else (_copy(given), False)


def _copy(array: Any) -> Any:
    """A copy, also of a CuPy array of fp8, with which CuPy cannot compute."""
    return array.reshape(-1).view(np.uint8).copy().view(array.dtype).reshape(array.shape)


def _address(array: Any) -> int:
    """Where a NumPy or CuPy array begins."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.data.ptr


def are_apart(starts: Sequence[int], nbytes: Sequence[int]) -> bool:
    """Whether no range of bytes overlaps another."""
    begin, length = np.array(starts, np.int64), np.array(nbytes, np.int64)
    filled = length > 0
    order = np.argsort(begin[filled], kind="stable")
    begin, length = begin[filled][order], length[filled][order]
    return bool((begin[1:] >= begin[:-1] + length[:-1]).all())


def overlap(arrays: Sequence[Any]) -> bool:
    """Whether two arrays have an element in common, or may have one. All are of one kind."""
    return any(share_elements(arrays[i], arrays[j], if_hard=True) for i, j in near_pairs(arrays))


def share_elements(x: Any, y: Any, if_hard: bool) -> bool:
    """Whether two arrays have an element in common, whatever their strides; ``if_hard`` where it takes long.

    To find out may take years: integers that solve an equation are looked for.
    """
    try:
        return np.shares_memory(x, y, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return if_hard


def near_pairs(arrays: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The pairs of arrays, by their numbers, of which one begins in the extent of the other."""
    near: list[tuple[int, int]] = []
    for start, stop, i in sorted([(*extent_of(array), i) for i, array in enumerate(arrays) if array.size]):
        near = [(end, j) for end, j in near if end > start]
        yield from ((i, j) for _, j in near)
        near.append((stop, i))


def place_of(array: Any) -> tuple:
    """Where each element of an array lies; two arrays of one dtype for which it is equal are one."""
    return extent_of(array), array.shape, array.strides


def extent_of(array: Any) -> tuple[int, int]:
    """Addresses of the first byte of an array, and after its last."""
    start = _address(array)
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + array.itemsize


def check_place(rank: Any, size: Any, address: Any, key: Any) -> tuple[int, int]:
    """Checks the place that a program gives to a rank in ``fc.init``, and returns rank and size.

    Raises:
        ArgumentError: A part of it is missing, or is none.
    """
    from flagcx.bootstrap.key import read_key

    if rank is None or size is None:
        raise ArgumentError(f"init(rank={rank}, size={size}): give both, and address where size is above 1")
    size = check_integer(size, "size", 1)
    rank = check_rank(rank, size, "rank")
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if (size > 1 or address) and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ArgumentError(
            f"address={address!r} is not where rank 0 can be met; expected host:port, such as 127.0.0.1:29400"
        )
    if not isinstance(key, str):
        raise ArgumentError(f"key must be a str of hexadecimal digits, got {type(key).__name__}")
    if key:
        try:
            read_key(key)
        except ValueError as error:
            raise ArgumentError(f"key= {error}") from None
    return rank, size
