"""Runs a function on several ranks of this host, from a notebook or any other Python program.

``flagcx run`` does the same for scripts; both rest on ``flagcx._launch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flagcx.config import environment
from flagcx.errors import ArgumentError


def launch(
    function: Callable[..., Any],
    ranks: int = 4,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    share_gpu: bool = False,
) -> list[Any]:
    """Calls a function on several ranks at once, each in a fresh Python process, and returns the results.

    Inside the function ``fc.init()`` gives the rank's communicator. The function travels by value: one
    that was defined in a notebook's cell or is a lambda works too. What the ranks print appears here with
    the rank before it. An interrupt (Ctrl-C, or the notebook's stop button) ends all ranks.

    Args:
        function: What every rank calls.
        ranks: How many ranks there are, at least 1.
        args: Its positional arguments, the same on all ranks.
        kwargs: Its keyword arguments, the same on all ranks.
        timeout_s: End the ranks after so many seconds; None waits for as long as it takes.
        share_gpu: Whether several ranks may use one GPU, as with ``flagcx run --share-gpu``.

    Returns:
        What each rank returned, in the order of the ranks.

    Raises:
        LaunchError: A rank raised, was killed or was too late; the first one's number and traceback are
            in it, and the exception itself is its ``__cause__`` where it can be pickled.
        ArgumentError: The call is wrong, or the function cannot be pickled.

    Example:
        >>> def total():
        ...     comm = fc.init()
        ...     return float(comm.allreduce(np.ones(1) * comm.rank)[0])
        >>> fc.launch(total, ranks=4)                               # doctest: +SKIP
        [6.0, 6.0, 6.0, 6.0]
    """
    if not callable(function):
        raise ArgumentError(f"launch needs a function to call, got {type(function).__name__}")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ArgumentError(f"ranks must be an integer from 1 up, got {ranks!r}")
    if timeout_s is not None and not timeout_s > 0:
        raise ArgumentError(f"timeout_s must be above 0 seconds or None, got {timeout_s!r}")
    from flagcx._launch.remote_call import RemoteCall  # Not needed by those who only import flagcx.
    from flagcx._launch.share_gpu import sharing

    with (
        sharing(environment(), share_gpu) as environ,
        RemoteCall(function, tuple(args), dict(kwargs or {}), ranks, environ) as call,
    ):
        return call.results(timeout_s)
