"""Runs a function on several ranks, for tests, whose processes are started once and serve all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import cloudpickle

import flagcx as fc
from flagcx import world
from flagcx._launch.job import job_environment
from flagcx._launch.no_aslr import without_aslr
from flagcx.bootstrap.store import StoreServer
from flagcx.errors import AbortedError, CommunicationError, PeerDiedError, PeerTimeoutError

GRACE_S = 3.0
CONSEQUENCES = (AbortedError, CommunicationError, PeerDiedError, PeerTimeoutError)


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 300, fresh: bool = False
) -> list[Any]:
    """Calls ``function(*args)`` on every rank; raises the first rank's error.

    Every call is a job of its own: the ranks get this process's environment, meet in a new store, and close
    what ``fc.init()`` has made when the function has returned.

    Args:
        function: What every rank calls.
        ranks: Number of ranks.
        args: Its positional arguments.
        timeout_s: Fail after so many seconds.
        fresh: Start processes for this call alone, for a function that leaves its process in another state
            than it found it (its modules, its cores, its threads), or that looks at this state.
    """
    if not fresh:
        return _started().call(function, ranks, args, timeout_s)
    try:
        return fc.launch(function, ranks, args, timeout_s=timeout_s)
    except fc.LaunchError as error:
        raise AssertionError(str(error)) from None


def end_ranks() -> None:
    """Ends the processes that ``run_ranks`` has started."""
    _started().close()


@lru_cache(maxsize=1)
def _started() -> StartedRanks:
    return StartedRanks()


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank is to do: a pickled (function, args), and the surroundings it is called in."""

    call: bytes
    environ: Mapping[str, str]
    directory: str
    path: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it: a pickled result, or the traceback of an error that other ranks caused or not."""

    at: float
    result: bytes = b""
    error: str = ""
    consequence: bool = False


class StartedRanks:
    """Processes that wait for functions to call. Job after job uses the first of them as its ranks.

    After a failure all of them are replaced: a rank may wait for one that has given up.
    """

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []

    def call(self, function: Callable[..., Any], size: int, args: tuple[Any, ...], timeout_s: float) -> list:
        """Calls a function on ``size`` ranks. Returns what each returned; raises AssertionError."""
        call = cloudpickle.dumps((function, args))
        with without_aslr(size):
            self._ranks += [_Rank() for _ in range(len(self._ranks), size)]
        try:
            with contextlib.ExitStack() as stack:
                environ = job_environment(os.environ, size)
                if size > 1:
                    server = stack.enter_context(StoreServer(size))
                    environ["FLAGCX_STORE_ADDRESS"] = server.address
                    environ["FLAGCX_STORE_KEY"] = server.authkey.hex()
                for rank in range(size):
                    own = environ | {"FLAGCX_RANK": str(rank), "FLAGCX_LOCAL_RANK": str(rank)}
                    self._ranks[rank].begin(Task(call, own, os.getcwd(), list(sys.path)))
                return self._results(size, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes. The next call starts others."""
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()

    def _results(self, size: int, timeout_s: float) -> list[Any]:
        outcomes, waiting = self._outcomes(size, timeout_s)
        for rank in range(size):
            self._ranks[rank].show_output(rank)
        failed = sorted((o.consequence, o.at, rank) for rank, o in outcomes.items() if o.error)
        if failed:
            rank = failed[0][-1]
            raise AssertionError(f"rank {rank} of {size} failed\n\n{outcomes[rank].error}")
        if waiting:
            raise AssertionError(f"ranks {waiting} of {size} did not end within {timeout_s:g} s")
        return [pickle.loads(outcomes[rank].result) for rank in range(size)]

    def _outcomes(self, size: int, timeout_s: float) -> tuple[dict[int, Outcome], list[int]]:
        """Waits for all outcomes; after an error of one rank, for those that come soon."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        waiting = {self._ranks[rank].connection: rank for rank in range(size)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                outcomes[rank] = self._ranks[rank].outcome()
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes, sorted(waiting.values())


class _Rank:
    """One of the processes. What it prints goes to a file, from which the test that runs prints it."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        start = f"from tests.ranks import serve; serve({theirs.fileno()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; {start}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._shown = 0

    def begin(self, task: Task) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end shows as the outcome
            self.connection.send_bytes(pickle.dumps(task))

    def outcome(self) -> Outcome:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            return Outcome(time.monotonic(), error=f"its process ended with {self._process.wait()}")

    def show_output(self, rank: int) -> None:
        """Prints what the rank has printed since the last time."""
        text = os.pread(self._output.fileno(), 1 << 24, self._shown)
        self._shown += len(text)
        for line in text.decode(errors="replace").splitlines():
            print(f"[{rank}] {line}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._output.close()


def serve(descriptor: int) -> None:
    """What a process does: the tasks that come, until the test session ends."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError):
        while True:
            outcome = _do(pickle.loads(connection.recv_bytes()))
            connection.send_bytes(pickle.dumps(outcome))


def _do(task: Task) -> Outcome:
    os.environ.clear()
    os.environ.update(task.environ)
    os.chdir(task.directory)
    sys.path[:] = task.path
    try:
        function, args = pickle.loads(task.call)
        result = cloudpickle.dumps(function(*args))
        world._WORLD.close()
        gc.collect()  # arrays in cycles would give back their shared memory in the middle of a later test
        gc.freeze()  # what is left, mostly modules, is not walked again at the end of each task
    except BaseException as error:
        text = traceback.format_exc()
        return Outcome(time.monotonic(), error=text, consequence=isinstance(error, CONSEQUENCES))
    return Outcome(time.monotonic(), result)
