"""NumPy's floating-point errors inside a call: they end no call, and warnings name the caller's line.

Each rank adds up other elements. So an overflow that raised on one rank alone, as the caller's ``np.seterr``
may ask for, would leave the other ranks behind in the call.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextvars import Context
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np

_MODES = MappingProxyType({"overflow": "over", "divide by zero": "divide", "invalid value": "invalid"})
SAME_MODE = (
    "where every rank adds up for itself, such numbers come out different on ranks that do and ranks that do "
    "not. Load the same libraries on all ranks (one that was built with -ffast-math sets the mode) before "
    "fc.init(), or set it alike, as torch.set_flush_denormal(False) does"
)
_OURS = str(Path(__file__).parents[1])


class FloatErrors:
    """Floating-point errors in the calls of one executor.

    Attributes:
        run: Calls a function with arguments, and notes errors instead of raising them or warning.
        noted: The kinds of errors that were noted since the last ``warn``.
    """

    def __init__(self) -> None:
        self.noted: set[str] = set()
        self.run: Callable[..., Any] = self._run
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # NumPy's modes belong to a context, not a thread
            context = Context()
            context.run(np.seterrcall, self._note)
            context.run(partial(np.seterr, all="call", under="ignore"))
            self.run = context.run

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        with np.errstate(all="call", under="ignore", call=self._note):
            return function(*args)

    def _note(self, kind: str, _: int) -> None:
        self.noted.add(kind)

    def warn(self) -> None:
        """Warns of what was noted, at the line that called flagcx, unless its ``np.seterr`` ignores it."""
        kinds, modes = sorted(self.noted), dict(np.geterr())
        self.noted.clear()
        depth = _depth_of_caller(sys._getframe(1))
        for kind in kinds:
            if modes[_MODES.get(kind, "under")] != "ignore" and depth:
                message = f"{kind} encountered in a reduction over the ranks"
                warnings.warn(message, RuntimeWarning, stacklevel=depth + 1)


def _depth_of_caller(frame: FrameType | None) -> int:
    """How many frames up the caller of flagcx is; 0 where there is none, as on a thread of flagcx's own."""
    depth = 1
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, depth = frame.f_back, depth + 1
    return 0 if frame is None or frame.f_globals.get("__name__") == "concurrent.futures.thread" else depth


def warn_of_mode(rank: int, flushes: bool) -> bool:
    """Warns of a rank that treats subnormal numbers in another way than before; returns ``flushes``."""
    does = "flushes" if flushes else "no longer flushes"
    what = f"rank {rank} {does} subnormal numbers to zero since its communicator was made"
    warnings.warn(f"{what}: {SAME_MODE}", RuntimeWarning, stacklevel=3)
    return flushes
