"""What type checkers know of calls: the kind of array that comes back, and the options of all calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack  # of Python 3.11; type checkers know it everywhere

A = TypeVar("A")
"""The caller's array, or list of arrays."""
B = TypeVar("B")
"""The array given as ``out``."""
S = TypeVar("S", bound=np.generic)
"""The element type of a NumPy array, where a result has another shape than the caller's array."""
Now = Literal[False]
"""``async_op`` of a call that is made when it returns."""
Later = Literal[True]
"""``async_op`` of one that is started."""


class Options(TypedDict, total=False):
    """See ``Communicator``."""

    algorithm: str | None
    stream: Any
