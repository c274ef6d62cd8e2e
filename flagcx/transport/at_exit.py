"""What a rank tells the others as its process ends, while it is still in the job's store."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable


def call_at_exit(method: Callable[[], object]) -> Callable[[], None]:
    """Calls a method as the process ends, unless its object is gone, or an exception ends the process.

    That comes before the process leaves the store, since it was registered later.

    Returns:
        What ``atexit.unregister`` takes.
    """
    kept = weakref.WeakMethod(method)

    def call() -> None:
        found = kept()
        if found is not None and not hasattr(sys, "last_value"):
            found()

    return atexit.register(call)
