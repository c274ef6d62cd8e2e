"""Groups of ranks that a measurement has alive at once: how each library is started, told and ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any

import environments

HERE = Path(__file__).resolve().parent
Command = list[str]


class GroupFailed(Exception):
    """A group of ranks died, went silent or reported an error; the message says which and how."""


@dataclass(frozen=True)
class Implementation:
    """A library that is measured.

    Attributes:
        name: As the tables call it.
        environment: Its entry in ``environments.REQUIREMENTS``; None where it runs in our own Python.
        commands: (bin folder, ranks, the controller's address, a folder for its files) -> the commands
            that start the ranks.
    """

    name: str
    environment: str | None
    commands: Callable[[Path, int, str, Path], Sequence[Command]]


def _gloo(bin_folder: Path, ranks: int, address: str, folder: Path) -> list[Command]:
    rank_command = [str(bin_folder / "python"), str(HERE / "peer_gloo.py"), address]
    return [[*rank_command, str(rank), str(ranks), str(folder / "store")] for rank in range(ranks)]


def _open_mpi(bin_folder: Path, ranks: int, address: str, folder: Path) -> list[Command]:
    # Open MPI refuses to run as root, or more ranks than cores, unless it's told that this is meant.
    flags = ["--allow-run-as-root", "--oversubscribe"]
    rank_command = [str(bin_folder / "python"), str(HERE / "peer_mpi.py"), address]
    return [[str(bin_folder / "mpirun"), *flags, "-n", str(ranks), *rank_command]]


def _mpich(bin_folder: Path, ranks: int, address: str, folder: Path) -> list[Command]:
    rank_command = [str(bin_folder / "python"), str(HERE / "peer_mpi.py"), address]
    return [[str(bin_folder / "mpirun"), "-n", str(ranks), *rank_command]]


def _flagcx(memory: str) -> Callable[[Path, int, str, Path], list[Command]]:
    def commands(bin_folder: Path, ranks: int, address: str, folder: Path) -> list[Command]:
        command_line = [sys.executable, "-c", "from flagcx.cli import main; main()", "run", "-n", str(ranks)]
        return [[*command_line, str(HERE / "peer_flagcx.py"), address, memory]]

    return commands


OURS, OURS_SYMMETRIC = "flagcx", "flagcx.empty"
"""flagcx with ordinary NumPy arrays, and with those of ``comm.empty``."""

IMPLEMENTATIONS: Mapping[str, Implementation] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Implementation(OURS, None, _flagcx("ordinary")),
            Implementation(OURS_SYMMETRIC, None, _flagcx("symmetric")),
            Implementation("gloo", "gloo", _gloo),
            Implementation("openmpi", "openmpi", _open_mpi),
            Implementation("mpich", "mpich", _mpich),
        )
    }
)


class Group:
    """The ranks of one implementation, alive and waiting for orders.

    Attributes:
        name: The implementation's name.
        versions: What is measured, as rank 0 reports it.
        startup_s: Seconds from the first process's start to the end of the last rank's first all-reduce.
    """

    def __init__(
        self,
        implementation: Implementation,
        ranks: int,
        timeout_s: float = 60.0,
        startup_timeout_s: float = 60.0,
    ) -> None:
        """Starts the ranks and waits until each has finished its first all-reduce.

        Args:
            implementation: What to start.
            ranks: How many.
            timeout_s: The longest that the answer to an order may take, in seconds.
            startup_timeout_s: The longest that the start may take, in seconds.

        Raises:
            environments.PeerMissing: The peer's environment can't be made.
            GroupFailed: The ranks don't come up.
        """
        self.name = implementation.name
        self._timeout_s = timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._streams: list[Any] = []
        self._hellos: list[dict[str, Any]] = []
        name = implementation.environment
        bin_folder = environments.ensure(name, environments.REQUIREMENTS[name]) if name else HERE
        self._folder = Path(tempfile.mkdtemp(prefix="compare-"))
        with ExitStack() as on_error:
            on_error.callback(self.close)
            start = time.monotonic()
            self._start(implementation, bin_folder, ranks, startup_timeout_s)
            self.startup_s = time.monotonic() - start
            on_error.pop_all()
        self.versions: dict[str, str] = self._hellos[0]["versions"]

    def _start(
        self, implementation: Implementation, bin_folder: Path, ranks: int, startup_timeout_s: float
    ) -> None:
        address = str(self._folder / "controller")
        with socket.socket(socket.AF_UNIX) as listener, (self._folder / "log").open("wb") as log:
            listener.bind(address)
            listener.listen(ranks)
            for command in implementation.commands(bin_folder, ranks, address, self._folder):
                self._processes.append(self._run(command, log, _rank_environment(implementation)))
            self._accept(listener, ranks, startup_timeout_s)
        self._hellos = sorted((self._answer(stream) for stream in self._streams), key=lambda h: h["rank"])

    def _run(
        self, command: Command, log: IO[bytes], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise GroupFailed(f"{self.name}: cannot be started: {error}") from error

    def _accept(self, listener: socket.socket, ranks: int, startup_timeout_s: float) -> None:
        listener.settimeout(0.2)
        deadline = time.monotonic() + startup_timeout_s
        while len(self._streams) < ranks:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(self._timeout_s)
                self._streams.append(connection.makefile("rw", encoding="utf-8"))
                connection.close()  # the stream keeps the socket open
                continue
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                reason = f"ended with {ended[0]}" if ended else f"did not come up in {startup_timeout_s:g} s"
                raise GroupFailed(f"{self.name}: {reason}: {self._last_words()}")

    def order(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Has every rank carry out a method of ``harness.Measurement``.

        Args:
            do: The method's name.
            **arguments: Its arguments.

        Returns:
            Each rank's answer.

        Raises:
            GroupFailed: A rank died, was silent for too long or reported an error.
        """
        try:
            for stream in self._streams:
                print(json.dumps({"do": do, **arguments}), file=stream, flush=True)
        except OSError as error:
            raise GroupFailed(f"{self.name}: a rank is gone: {self._last_words()}") from error
        return [self._answer(stream) for stream in self._streams]

    def _answer(self, stream: Any) -> dict[str, Any]:
        try:
            line = stream.readline()
        except OSError as error:
            raise GroupFailed(f"{self.name}: no answer in {self._timeout_s:g} s") from error
        if not line:
            raise GroupFailed(f"{self.name}: a rank died: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise GroupFailed(f"{self.name}: {answer['error'].strip().splitlines()[-1]}")
        return answer

    def _last_words(self) -> str:
        lines = (self._folder / "log").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def close(self, patience_s: float = 10.0) -> list[str]:
        """Ends the ranks, by force where they don't end by themselves.

        Args:
            patience_s: How long the ranks have to end by themselves, in seconds.

        Returns:
            Files in /dev/shm that the group left behind; they are removed.
        """
        for stream in self._streams:
            with suppress(OSError, ValueError):
                print(json.dumps({"do": "stop"}), file=stream, flush=True)
        if not self._streams:
            patience_s = 0.0
        for ask_to_end, seconds in ((None, patience_s), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            if self._wait(seconds, ask_to_end):
                break
        for stream in self._streams:
            with suppress(OSError):
                stream.close()
        self._streams.clear()
        left = [path for hello in self._hellos for path in hello["files"] if Path(path).exists()]
        for path in set(left):
            Path(path).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        return sorted(set(left))

    def _wait(self, seconds: float, ask_to_end: signal.Signals | None) -> bool:
        """Sends a signal to the processes that are alive and waits; returns whether all have ended."""
        alive = [process for process in self._processes if process.poll() is None]
        deadline = time.monotonic() + seconds
        for process in alive:
            if ask_to_end is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, ask_to_end)
        for process in alive:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return all(process.poll() is not None for process in self._processes)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Group({self.name!r}, ranks={len(self._hellos)})"


def _rank_environment(implementation: Implementation) -> dict[str, str]:
    """The environment of the ranks: one thread each; this checkout on the path of our own ranks alone."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    if implementation.environment is None:
        environment["PYTHONPATH"] = str(HERE.parent)
    return environment
