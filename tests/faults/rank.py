"""What a rank of the fault suite does: it makes its calls, logs their ends, and harms itself at a moment."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy.random  # noqa: F401 - which NumPy imports late, and a rank without memory cannot

import flagcx as fc
from tests.communicator.kills import Kill, arm
from tests.faults import calls, gpu_calls
from tests.faults.plan import Plan

_SHOT = struct.Struct("<didi")


class Injected(Exception):
    """The exception that a rank raises as its fault."""


class Log:
    """A file of JSON lines, each written at once with the time, which outlives a ``kill -9``."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, event: str, **more: Any) -> None:
        line = json.dumps({"event": event, "time": time.monotonic(), "pid": os.getpid(), **more}) + "\n"
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def descriptors() -> list[str]:
    """What the descriptors of this process refer to."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


class Sniper:
    """A child, forked before the rank joins, that strikes its parent from outside after a time."""

    def __init__(self, log: Log, device: str) -> None:
        ours, self._orders = os.pipe()
        target = os.pidfd_open(os.getpid())  # its number may be another's when the shot comes
        if os.fork():
            os.close(ours)
            os.close(target)
            return
        os.close(self._orders)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while order := os.read(ours, _SHOT.size):
            delay_s, number, pause_s, told = _SHOT.unpack(order)
            time.sleep(delay_s)
            if told:
                log("fault")
            if not number:
                os.system(f"ip link set {device} down")
                continue
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(target, number)
                if pause_s:
                    time.sleep(pause_s)
                    signal.pidfd_send_signal(target, signal.SIGCONT)
        os._exit(0)

    def shoot(self, number: int, delay_s: float, pause_s: float = 0.0, told: bool = True) -> None:
        """Sends this process a signal later, and SIGCONT after a pause; for 0 cuts the host's link."""
        os.write(self._orders, _SHOT.pack(delay_s, number, pause_s, told))


class Striker:
    """Does to this rank what the plan says, when it says.

    Args:
        plan: The plan.
        log: Of the rank.
        struck: Whether this rank is the victim.
    """

    def __init__(self, plan: Plan, log: Log, struck: bool) -> None:
        self._plan, self._log, self._struck = plan, log, struck
        needs = struck and plan.transport != "threads"
        self._sniper = Sniper(log, f"{os.uname().nodename}v") if needs else None

    @contextlib.contextmanager
    def around(self, phase: str | int) -> Iterator[None]:
        """Goes around a phase of the job, in which the fault may happen."""
        plan = self._plan
        here = self._struck and plan.phase == phase
        if here and plan.moment == "before":
            self._act()
        elif here and plan.moment == "inside":
            self._act_later()
        elif here and plan.moment == "at":
            arm(plan.kill, self._act)
        yield
        if here and plan.moment == "after":
            self._act()

    def _act(self) -> None:
        act = _ACTS.get(self._plan.fault)
        if act is not None:
            self._log("fault")
            act(self)

    def _act_later(self) -> None:
        fault, delay_s = self._plan.fault, self._plan.delay_s
        if fault in ("kill", "stop", "term", "pause", "cut link") and self._sniper:
            self._sniper.shoot(_SIGNALS[fault], delay_s, _PAUSE_S if fault == "pause" else 0.0)
        elif fault in _ACTS:
            signal.signal(signal.SIGALRM, lambda *_: self._act())
            signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-6))

    def pause(self) -> None:
        """Stops this process for a while."""
        assert self._sniper
        self._sniper.shoot(signal.SIGSTOP, 0.0, _PAUSE_S, told=False)

    def cut(self) -> None:
        """Cuts the link of this rank's host."""
        assert self._sniper
        self._sniper.shoot(0, 0.0, told=False)


def _raise(error: BaseException) -> None:
    raise error


def _no_descriptors() -> None:
    room = max(map(int, os.listdir("/proc/self/fd"))) + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, room))


def _no_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), used + (1 << 20)))


_PAUSE_S = 0.3
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "pause": signal.SIGSTOP,
    "cut link": 0,
}
_ACTS: dict[str, Callable[[Striker], object]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "term": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "exception": lambda _: _raise(Injected("an injected fault")),
    "exit": lambda _: _raise(SystemExit(0)),
    "descriptors": lambda _: _no_descriptors(),
    "memory": lambda _: _no_memory(),
    "slow": lambda _: time.sleep(0.3),
    "dead store": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "pause": Striker.pause,
    "cut link": Striker.cut,
}


def work(plan: Plan, rank: int, log: Log) -> None:
    """Makes the calls of a plan, and logs how each ends.

    Args:
        plan: The plan.
        rank: Of this process or thread.
        log: The rank's.
    """
    make = gpu_calls.make if plan.on_gpu else calls.make
    striker = Striker(plan, log, rank == plan.victim)
    log("start", descriptors=descriptors())
    phase: str | int = "init"
    comm = None
    try:
        with striker.around("init"):
            log("begin", phase=phase)
            comm = fc.init(timeout_s=plan.timeout_s, init_timeout_s=plan.init_timeout_s)
        log("fine", phase=phase)
        for phase in range(plan.calls):
            with striker.around(phase):
                log("begin", phase=phase)
                make(comm, plan.seed, phase)
            log("fine", phase=phase)
        phase = "close"
        with striker.around(phase):
            log("begin", phase=phase)
            comm.close()
        log("fine", phase=phase)
    except fc.FlagcxError as error:
        peer = getattr(error, "peer", getattr(error, "rank", None))
        log("error", phase=phase, kind=type(error).__name__, peer=peer, text=str(error)[:600])
    except AssertionError as error:
        log("wrong", phase=phase, text=str(error)[:600])
    except BaseException as error:
        log("raised", phase=phase, kind=type(error).__name__, text=str(error)[:600])
        raise
    if comm is not None and phase != "close":
        _see_that_it_is_over(comm, log)
    gc.collect()  # an error that wait() raised refers, by its frames, to the handle, which keeps it
    log("end", descriptors=descriptors())


def _see_that_it_is_over(comm: fc.Communicator, log: Log) -> None:
    """After an error a further call must raise at once, and ``close`` return."""
    begin = time.monotonic()
    try:
        comm.barrier()
    except fc.FlagcxError as error:
        log("after", kind=type(error).__name__, text=str(error)[:300], seconds=time.monotonic() - begin)
    else:
        log("after", kind="", text="", seconds=time.monotonic() - begin)
    try:
        comm.close()
    except fc.FlagcxError as error:
        log("close", kind=type(error).__name__, text=str(error)[:300])


def read_plan(text: str) -> Plan:
    """A plan from its JSON."""
    *first, kill, store = json.loads(text)
    return Plan(*first, Kill(*kill), store)


if __name__ == "__main__":
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
    work(read_plan(sys.argv[1]), number, Log(Path(sys.argv[2]) / f"rank{number}"))
