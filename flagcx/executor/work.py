"""An operation that was started and may still run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

from flagcx.arguments import is_number
from flagcx.daemon import stay_if_process_ends
from flagcx.errors import ArgumentError, PeerTimeoutError
from flagcx.executor.float_errors import FloatErrors

_FOREVER_S = 1e8
T = TypeVar("T")


def seconds(timeout_s: float | None) -> float | None:
    """A time to wait, as ``Future.result`` takes it.

    Raises:
        ArgumentError: It is no number of seconds from 0 up, nor None.
    """
    if timeout_s is None:
        return None
    if is_number(timeout_s) and timeout_s >= 0:
        return min(float(timeout_s), _FOREVER_S)
    raise ArgumentError(f"timeout_s must be a number of seconds from 0 up, or None, got {timeout_s!r}")


class Work(Generic[T]):
    """What a call with ``async_op=True`` returns.

    Until ``wait`` has returned, the arrays of the call belong to it: they are neither to be read nor written.

    Example:
        >>> work = comm.allreduce(x, async_op=True)  # doctest: +SKIP
        >>> compute_something_else()                 # doctest: +SKIP
        >>> x = work.wait()                          # doctest: +SKIP
    """

    def __init__(
        self,
        future: Future,
        what: str,
        hurry: Callable[[], None] | None = None,
        told: Callable[[], object] | None = None,
        float_errors: FloatErrors | None = None,
    ) -> None:
        self._future, self._what, self._hurry, self._told = future, what, hurry, told
        self._float_errors = float_errors

    def done(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> T:
        """Waits for the operation, and returns what the call without ``async_op`` would.

        Args:
            timeout_s: How long to wait, in seconds; without end by default, since the operation has a
                time-out of its own.

        Raises:
            ArgumentError: ``timeout_s`` is no time.
            PeerTimeoutError: It still runs; ``wait`` may be called again.
            FlagcxError: Whatever error the operation ended with.
        """
        limit_s = seconds(timeout_s)
        if self._hurry is not None and not self._future.done():
            self._hurry()
        try:
            value = self._future.result(limit_s)
        except BaseException as error:
            if timeout_s is not None and isinstance(error, FutureTimeout) and not self._future.done():
                raise PeerTimeoutError(f"{self._what} still runs after {timeout_s} s; wait again") from None
            if self._told is not None and self._future.done():
                self._told()
            stay_if_process_ends()
            raise
        if self._float_errors is not None and self._float_errors.noted:
            self._float_errors.warn()
        return value

    def __repr__(self) -> str:
        return f"<Work {self._what}, {'done' if self.done() else 'running'}>"
