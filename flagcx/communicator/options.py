"""What type checkers know of calls: the kind of array that comes back, and the options of all calls."""

from __future__ import annotations

from collections.abc import Sequence
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
Sizes = Sequence[int] | None
"""Elements of every rank's array; None where the ranks are to tell each other."""


class _Options(TypedDict, total=False):
    """See ``Communicator``."""

    algorithm: str | None
    stream: Any


class Now(_Options, total=False):
    """The options of a call that is made when it returns."""

    async_op: Literal[False]


class Later(_Options):
    """Those of one that is started."""

    async_op: Literal[True]


class Either(_Options, total=False):
    """Those of a call of which only its run tells which it is."""

    async_op: bool
