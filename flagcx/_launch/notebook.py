"""Runs a function on several ranks of this host, from a notebook or any other Python program.

``flagcx run`` does the same for scripts; both rest on ``flagcx._launch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from flagcx.arguments import check_integer, check_seconds
from flagcx.config import environment
from flagcx.errors import ArgumentError
from flagcx.limits import explained

T = TypeVar("T")


def launch(
    function: Callable[..., T],
    ranks: int = 4,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    share_gpu: bool = False,
    threads: bool = False,
) -> list[T]:
    """Calls a function on several ranks at once, each in a fresh Python process, and returns the results.

    Inside the function ``fc.init()`` gives the rank's communicator. The function is sent by value, so a
    lambda or a function of a notebook's cell works too. The ranks' output appears here, each line with its
    rank before it. An interrupt (Ctrl-C, or the notebook's stop button) ends all ranks.

    Args:
        function: The function that every rank calls.
        ranks: How many ranks there are, at least 1.
        args: Its positional arguments, the same on all ranks.
        kwargs: Its keyword arguments, the same on all ranks.
        timeout_s: Seconds after which ranks that still run are ended; None waits without limit.
        share_gpu: Whether several ranks may use one GPU, as with ``flagcx run --share-gpu``.
        threads: Whether the ranks are threads of this process in place of processes: they start at once,
            share the arguments and the variables of the function's closure, so nothing is pickled, but
            their Python code runs in turns. A late rank is not killed; it ends with its next call of flagcx.

    Returns:
        Each rank's result, in the order of the ranks.

    Raises:
        LaunchError: A rank raised, was killed or was too late. It has the number and the traceback of the
            first such rank, whose exception is its ``__cause__`` where that can be pickled.
        ArgumentError: The call is wrong, or the function cannot be pickled.
        ResourceError: This process may open no more descriptors.

    Example:
        >>> def total():
        ...     comm = fc.init()
        ...     return float(comm.allreduce(np.ones(1) * comm.rank)[0])
        >>> fc.launch(total, ranks=4)                               # doctest: +SKIP
        [6.0, 6.0, 6.0, 6.0]
    """
    if not callable(function):
        raise ArgumentError(f"launch needs a function to call, got {type(function).__name__}")
    ranks = check_integer(ranks, "ranks", 1)
    check_seconds(timeout_s, "timeout_s")
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise ArgumentError(f"args must be the arguments of one call, such as args=(10,), got {args!r:.80}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(f"kwargs must be a dict of names and values, got {kwargs!r:.80}")
    if threads and share_gpu:
        raise ArgumentError("share_gpu=True is for ranks that are processes; leave threads=True out")
    call = function, tuple(args), dict(kwargs or {})
    with explained(f"{ranks} ranks cannot be started"):
        if threads:
            from flagcx._launch.thread_ranks import call_in_threads

            return call_in_threads(function, ranks, call[1], call[2], timeout_s)
        from flagcx._launch.remote_call import call_on_ranks  # not on import, which must be quick
        from flagcx._launch.share_gpu import sharing

        with sharing(environment(), share_gpu) as environ:
            return call_on_ranks(*call, ranks, environ, timeout_s)
