"""The processes of a job's ranks on this host: start them, pass on their output, end every one of them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flagcx._launch.failure import Exit, is_consequence, name_ranks
from flagcx._launch.interrupts import held_back
from flagcx._launch.job import check_size, job_environment
from flagcx._launch.no_aslr import without_aslr
from flagcx._launch.output import RankOutput, Tail
from flagcx._launch.process_groups import (
    end_with_launcher,
    is_stopped,
    open_pidfd,
    own_group,
    reporting_children,
    sweep,
)
from flagcx.bootstrap.clock import TICK_S, ActiveClock
from flagcx.bootstrap.store_server import StoreServer
from flagcx.config import Config
from flagcx.errors import LaunchError
from flagcx.limits import described

_GRACE_S = 3.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Command:
    """How to start one rank.

    Attributes:
        arguments: The command line.
        pass_fds: Descriptors that the process inherits.
        guards_itself: The program calls ``end_with_launcher`` itself, on the descriptor whose number is
            appended to the command line. (Otherwise the launcher calls it between fork and exec, for which
            it must have no second thread.)
    """

    arguments: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()
    guards_itself: bool = False


class Ranks:
    """The processes of all ranks of a job. A context manager: on leaving it, every process has ended.

    Args:
        commands: How to start each rank.
        environ: The environment of all. Its ``FLAGCX_KILL_AFTER_S`` says how long ranks that are told to
            end have until they are killed.
        output: Where their output goes.
        grace_s: How long the other ranks may go on after one has failed, in seconds: enough for them to
            notice and to report it.

    Attributes:
        exits: The exits of the ranks that have ended, in the order in which they ended.
        tails: The last lines of each rank's stderr.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        environ: Mapping[str, str],
        output: RankOutput,
        grace_s: float = _GRACE_S,
    ) -> None:
        self.size = len(commands)
        self.tails = [Tail() for _ in commands]
        self.selector = selectors.DefaultSelector()
        self._commands = commands
        self._environ = environ
        self._output = output
        self._grace_s = grace_s
        self._server: StoreServer | None = None
        self._processes: list[subprocess.Popen] = []
        self._guards: list[int] = []
        self._pidfds: list[int | None] = []
        self._open: dict[int, tuple[int, int]] = {}
        self._kill_after_s = Config.from_environment(environ).kill_after_s
        self._settings = contextlib.ExitStack()
        self._clock = ActiveClock()
        self._stopped_since: float | None = None
        self._woken: set[int] = set()
        self.exits: dict[int, Exit] = {}
        self._signalled: set[int] = set()
        self._planned: list[tuple[float, int]] = []

    def start(self) -> None:
        """Starts every rank, and the store, whose thread begins when all ranks are on their way.

        Raises:
            LaunchError: The system cannot start another process.
            ArgumentError: There are far more ranks than cores.
        """
        with held_back():
            self._prepare()
        for rank in range(self.size):
            with held_back():
                self._start_rank(rank, self._streams(rank))
        if self._server is not None:
            with held_back():
                self._server.start()

    def _prepare(self) -> None:
        """Makes what the ranks share: their environment, and the store, if there are several."""
        self._settings.enter_context(reporting_children())
        if advice := self._advice():
            self._output.say(advice)
        environ = job_environment(self._environ, self.size)
        if self.size > 1:
            self._server = self._make_server()
            self._hear_of_failures(self._server)
            environ["FLAGCX_STORE_ADDRESS"] = self._server.address
            environ["FLAGCX_STORE_KEY"] = self._server.authkey.hex()
        self._environ = environ

    def wait(self, timeout_s: float | None = None) -> tuple[int, ...]:
        """Passes on output until all ranks have ended.

        Ranks that still run ``grace_s`` after the first failure, or after ``timeout_s``, are ended.

        Returns:
            The ranks that were still running after ``timeout_s``.
        """
        deadline = None if timeout_s is None else self._clock.now() + timeout_s
        late: tuple[int, ...] = ()
        while len(self.exits) < len(self._processes):
            self._turn(self._patience(deadline))
            if deadline is not None and self._clock.now() >= deadline:
                deadline, late = None, self.running()
                self._plan(signal.SIGTERM, 0.0)
        self._drain()
        if self._server is not None:
            with held_back():  # for a moment: interrupted, a wait for a thread raises RuntimeError
                self._server.settle()
        return late

    def end(self, number: int = signal.SIGTERM) -> None:
        """Sends all ranks a signal and waits for their end; ranks that ignore it are killed."""
        self._plan(number, 0.0)
        self.wait()

    def running(self) -> tuple[int, ...]:
        """The ranks whose processes have not ended."""
        return tuple(rank for rank in range(len(self._processes)) if rank not in self.exits)

    def signal_rank(self, rank: int, number: int, children: bool = True) -> None:
        """Sends a signal to a rank that still runs, and to the processes that it started if ``children``."""
        if rank in self.running():
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if children else os.kill)(self._processes[rank].pid, number)

    def signal_all(self, number: int, children: bool = True) -> None:
        """Sends a signal to all ranks that still run; see ``signal_rank``."""
        for rank in self.running():
            self.signal_rank(rank, number, children)

    def read_from(self, rank: int, stream: int, descriptor: int) -> None:
        """Takes a descriptor's bytes as a rank's output until it ends, then closes it."""
        os.set_blocking(descriptor, False)
        self._open[descriptor] = (rank, stream)
        self.selector.register(descriptor, selectors.EVENT_READ, lambda: self._read(descriptor))

    def close(self) -> None:
        """Kills the ranks that still run, and closes everything."""
        with held_back():
            self._close()

    def _close(self) -> None:
        self.signal_all(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        sweep([process.pid for process in self._processes])
        self._processes.clear()
        if self._server is not None:
            self._server.close()
        for descriptor in [*self._open, *self._guards, *self._pidfds]:
            if descriptor is not None:
                os.close(descriptor)
        for held in (self._open, self._guards, self._pidfds):
            held.clear()
        self.selector.close()
        self._settings.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Ranks size={self.size} running={len(self.running())}>"

    def where(self, rank: int) -> str:
        """Where a rank runs, in words that follow the rank; empty for this host."""
        return ""

    def _advice(self) -> str:
        return check_size(self.size)

    def _make_server(self) -> StoreServer:
        return StoreServer(self.size)

    def _streams(self, rank: int) -> Mapping[str, Any]:
        return self._output.streams(rank)

    def _hear_of_failures(self, server: StoreServer) -> None:
        """Has ``_react_to_failure`` called for ranks that fail and whose processes live on."""
        told, told_end = deque[int](), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._settings.callback(os.close, told_end)

        def tell(rank: int) -> None:
            told.append(rank)
            os.eventfd_write(told_end, 1)

        def hear() -> None:
            os.eventfd_read(told_end)
            while told:
                rank = told.popleft()
                if rank in self.running() and not self._planned:
                    self._react_to_failure(rank)

        server.on_failure = tell
        self.selector.register(told_end, selectors.EVENT_READ, hear)

    def _start_rank(self, rank: int, streams: Mapping[str, Any], **variables: str) -> None:
        environ = {**self._environ, "FLAGCX_RANK": str(rank), "FLAGCX_LOCAL_RANK": str(rank), **variables}
        pipe, held = os.pipe()
        self._guards[rank : rank + 1] = [held]  # in the place of that of a process that has ended
        try:
            with without_aslr(self.size):
                process = self._popen(rank, environ, pipe, {**streams, **own_group(reads=rank == 0)})
        except OSError as error:
            why = f"rank {rank} of {self.size} cannot be started: {described(error)}"
            raise LaunchError(why, rank=rank) from error
        finally:
            os.close(pipe)
        self._processes[rank : rank + 1] = [process]
        pidfd = open_pidfd(process.pid)
        self._pidfds[rank : rank + 1] = [pidfd]
        if pidfd is not None:
            self.selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(rank))
        for stream, source in ((1, process.stdout), (2, process.stderr)):
            if source is not None:
                self.read_from(rank, stream, os.dup(source.fileno()))
                source.close()

    def _popen(
        self, rank: int, environ: Mapping[str, str], pipe: int, options: Mapping[str, Any]
    ) -> subprocess.Popen:
        """Starts the process of a rank; ``pipe`` is that of ``end_with_launcher``."""
        command = self._commands[rank]
        return subprocess.Popen(
            [*command.arguments, str(pipe)] if command.guards_itself else command.arguments,
            env=environ,
            pass_fds=[pipe, *command.pass_fds],
            **options,
            preexec_fn=None if command.guards_itself else lambda: end_with_launcher(pipe),
        )

    def _read(self, descriptor: int) -> bool:
        """Takes the bytes that are there. Returns whether there may be more."""
        rank, stream = self._open[descriptor]
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:  # A terminal whose other end is closed.
            data = b""
        if not data:
            self._finish(descriptor)
            return False
        if stream == 2:
            self.tails[rank].feed(data)
        self._output.receive(rank, stream, data)
        return True

    def _finish(self, descriptor: int) -> None:
        with held_back():
            rank, stream = self._open.pop(descriptor)
            self.selector.unregister(descriptor)
            os.close(descriptor)
        if stream == 2:
            self.tails[rank].finish()
        self._output.finish(rank, stream)

    def _drain(self, rank: int | None = None) -> None:
        """Takes the rest of a rank's output, or of all. (What a rank left running may keep a stream open.)"""
        for descriptor in [one for one, (owner, _) in self._open.items() if rank in (None, owner)]:
            while self._read(descriptor):
                pass
            if descriptor in self._open:
                self._finish(descriptor)

    def _turn(self, timeout_s: float | None) -> None:
        for key, _ in self.selector.select(timeout_s):
            key.data()
        for rank in self.running():
            if self._pidfds[rank] is None:
                self._reap(rank)
        while self._planned and self._planned[0][0] <= self._clock.now():
            _, number = self._planned.pop(0)
            self._signalled.update(self.running())
            self.signal_all(number)
            self.signal_all(signal.SIGCONT)  # A stopped process would not heed it.
        if self._may_be_stopped():
            self._wake_stopped(self._clock.now())

    def _patience(self, deadline: float | None) -> float | None:
        now = self._clock.now()
        ends = [moment for moment, _ in self._planned[:1]] + ([] if deadline is None else [deadline])
        lengths = [end - now for end in ends]
        if None in self._pidfds:
            lengths.append(_POLL_S)
        if self._may_be_stopped():
            lengths.append(TICK_S)
        return min(max(0.0, min(lengths)), TICK_S) if lengths else None

    def _may_be_stopped(self) -> bool:
        """Whether a rank that stands still would be noticed by no other rank."""
        return bool(self.exits) and not self._planned and len(self.exits) < len(self._processes)

    def _wake_stopped(self, now: float) -> None:
        """Wakes ranks that are stopped (SIGSTOP) when all others have ended; ends those that stop again."""
        running = self.running()
        if not all(is_stopped(self._processes[rank].pid) for rank in running):
            self._stopped_since = None
            return
        if self._stopped_since is None:
            self._stopped_since = now
        if now - self._stopped_since >= self._kill_after_s:
            again = self._woken.intersection(running)
            self._woken.update(running)
            self._output.say(
                f"{name_ranks(running)} stopped by a signal, and all other ranks have ended; "
                f"{'ended' if again else 'continued'}"
            )
            self._stopped_since = None
            if again:
                self._plan(signal.SIGTERM, 0.0)
            self.signal_all(signal.SIGCONT)

    def _reap(self, rank: int) -> None:
        with held_back():
            code = self._processes[rank].poll()
            if code is None:
                return
            pidfd = self._pidfds[rank]
            if pidfd is not None:
                self.selector.unregister(pidfd)
            ended = self.exits[rank] = self._exit_of(rank, code)
        self._react(ended)

    def _exit_of(self, rank: int, code: int) -> Exit:
        return Exit(rank, code, rank in self._signalled)

    def _react(self, ended: Exit) -> None:
        """Tells the store of a rank's end; after a failure the others will be ended too."""
        if self._server is not None:
            how = "" if ended.code == 0 else f"its process ended: {ended.describe()}"
            self._server.rank_ended(ended.rank, how)
        if ended.code != 0 and not self._planned:
            self._plan(signal.SIGTERM, self._grace_s)

    def _react_to_failure(self, rank: int) -> None:
        """Ends the job although a thread keeps the process of a rank alive whose main thread has failed."""
        self._plan(signal.SIGTERM, self._grace_s)

    def _plan(self, number: int, after_s: float) -> None:
        """Plans a signal to all ranks, then SIGKILL to those that ignore it."""
        moment = self._clock.now() + after_s
        self._planned = [(moment, number), (moment + self._kill_after_s, signal.SIGKILL)]

    def first_failure(self) -> Exit | None:
        """The exit to blame, if any: the first whose rank failed by itself and blames no other rank."""
        failed = [ended for ended in self.exits.values() if ended.code != 0]
        own = [ended for ended in failed if not ended.after_signal]
        # A rank that was told to end may have failed before, and still have been writing its traceback.
        told = [ended for ended in failed if ended.after_signal and self.tails[ended.rank].traceback()]
        blaming = set() if self._server is None else self._server.blaming
        causes = [
            ended
            for ended in own + told
            if ended.rank not in blaming and not is_consequence(self.tails[ended.rank].traceback())
        ]
        first = next(iter(causes + own + failed), None)
        if first in told and first.code in (-signal.SIGTERM, -signal.SIGKILL):
            return replace(first, code=1)  # an exception ended it, but for a thread that went on
        return first
