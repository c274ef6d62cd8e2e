"""Collectives inside tasks of Dask: one rank on each worker of a client.

    from dask.distributed import Client
    from flagcx.interop import dask

    def total(x):
        comm = fc.init()  # the ranks of this run
        return float(comm.allreduce(np.full(1, x + comm.rank))[0])

    dask.run(Client(n_workers=4, threads_per_worker=1), total, args=(10,))  # [46.0, 46.0, 46.0, 46.0]

The workers may be reused: by Dask's own tasks, and by further runs. They meet by an address and a secret that
travel over Dask's connections; on one host arrays go through shared memory, between hosts by UCX.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flagcx._launch.failure import Failure, name_ranks
from flagcx.arguments import check_seconds
from flagcx.bootstrap.environment import host_name
from flagcx.bootstrap.meeting import Meeting, MetRank, met, open_meeting
from flagcx.config import Config, environment
from flagcx.errors import ArgumentError, LaunchError, MissingDependencyError

try:
    import distributed
except ImportError as error:
    raise MissingDependencyError(
        "flagcx.interop.dask needs Dask, which is not installed: pip install 'flagcx[dask]'"
    ) from error

if TYPE_CHECKING:
    from flagcx.bootstrap.store import StoreServer

_LOOK_S = 0.5
_GRACE_S = 5.0
"""How long the other ranks may go on after one has failed."""


def run(
    client: distributed.Client,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: Sequence[str] | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Calls a function on one rank on each worker, all at once, and returns the results.

    Inside the function ``fc.init()`` gives the communicator of these ranks, which is closed when the function
    has returned. Each rank is a task of its worker and takes one of its threads: a worker that is busy lets
    the others wait, at most as long as ``FLAGCX_INIT_TIMEOUT_S`` says. Tasks are neither retried nor moved.

    Args:
        client: The client.
        function: What every rank calls.
        args: Its positional arguments, the same on all ranks.
        kwargs: Its keyword arguments, the same on all ranks.
        workers: Addresses of the workers in the order of ranks; all of the client's, sorted, if None.
        timeout_s: Seconds after which ranks that still run are given up; None waits without limit.

    Returns:
        Each rank's result, in the order of ranks.

    Raises:
        LaunchError: A rank raised, its worker was lost, or it was too late. It has the number and the
            traceback of the first such rank.
        ArgumentError: The client has no workers, or none of such an address.

    Example:
        >>> run(client, total, args=(10,))  # doctest: +SKIP
        [46.0, 46.0, 46.0, 46.0]
    """
    check_seconds(timeout_s, "timeout_s")
    places = _places(client, workers)
    token = secrets.token_hex(8)
    hosts = set(client.run(host_name, workers=places).values())
    meeting = client.run(_open, token, len(places), len(hosts) == 1, workers=places[:1])[places[0]]
    futures = [
        client.submit(
            _be_rank,
            *(token, meeting, rank, function, tuple(args), dict(kwargs or {})),
            workers=[place],
            allow_other_workers=False,
            pure=False,
            retries=0,
            key=f"flagcx-{token}-rank-{rank}",
        )
        for rank, place in enumerate(places)
    ]
    try:
        return _results(client, futures, places, timeout_s)
    finally:
        client.cancel(futures, force=True)


def _places(client: Any, workers: Sequence[str] | None) -> list[str]:
    """The addresses of the ranks' workers."""
    known = sorted(client.nthreads())
    if not known:
        raise ArgumentError("the client has no workers; add some, or wait: client.wait_for_workers(n)")
    if workers is None:
        return known
    strangers = [one for one in workers if one not in known]
    if strangers or not workers or len(set(workers)) < len(workers):
        raise ArgumentError(
            f"workers={list(workers)!r} are not different workers of this client; they are {', '.join(known)}"
        )
    return list(workers)


class _Opened:
    """Stores that this process runs for runs in which it will be rank 0."""

    def __init__(self) -> None:
        self._servers: dict[str, StoreServer] = {}

    def put(self, token: str, server: StoreServer) -> None:
        self._servers[token] = server

    def take(self, token: str) -> StoreServer | None:
        return self._servers.pop(token, None)


_OPENED = _Opened()


def _open(token: str, size: int, one_host: bool) -> Meeting:
    """What rank 0's worker does before the tasks begin."""
    meeting, server = open_meeting(size, one_host, "dask")
    _OPENED.put(token, server)
    return meeting


def _be_rank(
    token: str,
    meeting: Meeting,
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[bool, Any]:
    """The task of a rank: (True, the result), or (False, its ``Failure``)."""
    try:
        limit_s = Config.from_environment(environment()).init_timeout_s
        with met(MetRank(meeting, rank, limit_s, _OPENED.take(token))) as here:
            return True, here.call(function, *args, **kwargs)
    except BaseException as error:
        return False, Failure.of(error, __file__)


def _results(client: Any, futures: list[Any], places: list[str], timeout_s: float | None) -> list[Any]:
    """Waits for all ranks; after one has failed or was lost, not for long."""
    begin, failed_at = time.monotonic(), math.inf
    while True:
        with contextlib.suppress(distributed.TimeoutError):
            distributed.wait(futures, timeout=_LOOK_S)
        now = time.monotonic()
        outcomes = {rank: _outcome(future) for rank, future in enumerate(futures) if future.done()}
        failures = {rank: value for rank, (fine, value) in outcomes.items() if not fine}
        running = [rank for rank in range(len(places)) if rank not in outcomes]
        here = client.nthreads() if running else {}
        lost = [rank for rank in running if places[rank] not in here]
        if failures or lost:
            failed_at = min(failed_at, now)
        if (failures or lost) and (len(running) == len(lost) or now - failed_at > _GRACE_S):
            raise _blame(failures, lost, places)
        if not running:
            return [outcomes[rank][1] for rank in range(len(places))]
        if timeout_s is not None and now - begin > timeout_s:
            raise LaunchError(
                f"{name_ranks(running)} given up: not done within {timeout_s:g} s; their workers: "
                f"{', '.join(places[rank] for rank in running)}; allow more by timeout_s",
                rank=running[0],
            )


def _outcome(future: Any) -> tuple[bool, Any]:
    """What came of a rank; an error of Dask's own is a failure too."""
    try:
        return future.result()
    except Exception as error:
        return False, Failure.of(error, __file__)


def _blame(failures: Mapping[int, Failure], lost: Sequence[int], places: Sequence[str]) -> LaunchError:
    """The error for the rank that failed first, and not because of another one."""
    causes = {rank: failure for rank, failure in failures.items() if not failure.is_consequence}
    if lost and not causes:
        rank = lost[0]
        return LaunchError(
            f"rank {rank} was lost: its worker {places[rank]} has left the cluster (killed, out of memory or "
            f"closed); the scheduler's and the worker's logs may say why",
            rank=rank,
        )
    blamed = causes or failures
    rank = min(blamed, key=lambda rank: blamed[rank].at)
    return blamed[rank].launch_error(rank)
