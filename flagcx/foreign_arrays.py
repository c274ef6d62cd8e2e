"""Arrays of other libraries: taken as NumPy's over the same memory, and results in the caller's kind.

No library is imported: an array that is given has been made by one that is there already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from flagcx.dtypes import DTYPES
from flagcx.errors import ArrayError

_IMMUTABLE = ("jax", "jaxlib")
_CARRIERS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Torch's dtypes that NumPy and DLPack lack, and the integers as which they are exchanged."""


def library_of(array: Any) -> str:
    """The package that an array's class comes from, such as "numpy", "torch" or "jaxlib"."""
    return type(array).__module__.partition(".")[0]


def is_immutable(array: Any) -> bool:
    """Whether nothing may write to an array of this kind: its results are new arrays."""
    return array.__class__ is not np.ndarray and library_of(array) in _IMMUTABLE


def any_immutable(arrays: Iterable[Any]) -> bool:
    """Whether one of many arrays is immutable, of which most are of one class."""
    return any(kind.__module__.partition(".")[0] in _IMMUTABLE for kind in set(map(type, arrays)))


def host_view(array: Any, what: str, writable: bool) -> np.ndarray:
    """An array of the host, of any library, as NumPy's over the same memory.

    Args:
        array: NumPy's own, a subclass, or one with ``__array_interface__``, ``__array__`` or DLPack.
        what: What it is called in messages.
        writable: Whether it will be written.

    Raises:
        ArrayError: It is no array, masked, or cannot be viewed.
    """
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            raise ArrayError(
                f"{what} is a masked array, whose mask would not be sent; pass {what}.filled(value) with a "
                f"value that changes nothing, such as 0 for a sum"
            )
        return array.view(np.ndarray)
    library = library_of(array)
    if writable and library in _IMMUTABLE:
        raise ArrayError(
            f"{what} is a JAX array, which nothing may write to; leave out= out, as in y = "
            f"comm.allreduce(x), which returns a new one, or pass a NumPy array"
        )
    offers = hasattr(array, "__array_interface__") or hasattr(array, "__dlpack__")
    if offers and not isinstance(array, np.generic):
        view = _shared(array, what, library, writable)
        if view.dtype != object:
            return view
    raise ArrayError(
        f"{what} is a {_kind(array)}; expected an array: NumPy's, CuPy's, or one that offers "
        f"__array_interface__, __cuda_array_interface__ or DLPack. {_instead(array, what)}"
    )


def _shared(array: Any, what: str, library: str, writable: bool) -> np.ndarray:
    """A foreign array of the host as NumPy's, in the same memory."""
    try:
        return _of_torch(array, writable) if library == "torch" else np.asarray(array)
    except Exception as error:  # each library has its own
        raise ArrayError(
            f"{what} is a {_kind(array)} that NumPy cannot take as it is ({_first_line(error)}); "
            f"{_remedy(library, what)}"
        ) from error


def _of_torch(tensor: Any, writable: bool) -> np.ndarray:
    plain, carrier, dtype = as_carried(tensor)
    if writable:
        tell_of_writes(tensor)
    view = plain if carrier is None else plain.view(carrier)
    return view.numpy() if dtype is None else view.numpy().view(dtype)


def as_carried(tensor: Any) -> tuple[Any, Any, np.dtype | None]:
    """A torch tensor without its gradient, and the integers as which it is exchanged, if it must be.

    Returns:
        A tensor over the same memory; torch's integer dtype and NumPy's dtype of its elements, or None twice.
    """
    name = str(tensor.dtype).rpartition(".")[2]
    if name not in _CARRIERS:
        return tensor.detach(), None, None
    dtype = next(known.numpy for known in DTYPES.values() if known.name == name)
    return tensor.detach(), getattr(sys.modules["torch"], _CARRIERS[name]), dtype


def tell_of_writes(tensor: Any) -> None:
    """Has autograd refuse a backward pass that would need what a torch tensor held before it is written."""
    if not tensor.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(tensor)


def in_kind(like: Any, result: Any) -> Any:
    """A new result as an array of the library of a caller's array, over the same memory.

    Args:
        like: The caller's array.
        result: A NumPy or CuPy array of flagcx's own; None where this rank has none.
    """
    if like.__class__ is np.ndarray or result is None or library_of(like) != "torch":
        return result
    torch = sys.modules["torch"]
    name = result.dtype.name
    carrier = {**_CARRIERS, "bool": "uint8"}.get(name)
    plain = result if carrier is None else result.view(carrier)
    tensor = torch.from_numpy(plain) if isinstance(result, np.ndarray) else torch.from_dlpack(plain)
    return tensor if carrier is None else tensor.view(getattr(torch, name))


def in_immutable_kind(like: Any, result: Any) -> Any:
    """A result that is complete as an immutable array, on the device of a caller's.

    Args:
        like: The caller's JAX array.
        result: A NumPy or CuPy array that nothing else writes to, or None.
    """
    if result is None:
        return None
    jax = sys.modules["jax"]
    if not isinstance(result, np.ndarray):
        return jax.numpy.from_dlpack(result)
    devices = like.devices()
    return jax.device_put(result, next(iter(devices)) if len(devices) == 1 else None)


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _remedy(library: str, what: str) -> str:
    """What a caller can do about a foreign array that NumPy doesn't take."""
    if library in _IMMUTABLE:
        return "call flagcx outside of jax.jit, with an array that has its values"
    if library != "torch":
        return "pass a NumPy array that views its memory"
    return (
        f"pass a dense tensor in {what}'s place, or call torch.distributed after fc.enhance_process_group(), "
        f"which takes torch's tensors"
    )


def _instead(array: Any, what: str) -> str:
    """What may have been meant by something that is no array."""
    if type(array).__name__ == "InPlaceType":
        return "MPI.IN_PLACE is not needed: comm.allreduce(x) is in place, comm.allreduce(x, out=y) is not"
    if isinstance(array, (complex, float, int, np.generic)):
        return f"For a number: {what} = np.array({array}), of one element"
    return "For Python objects use the object forms, such as comm.broadcast_object"
