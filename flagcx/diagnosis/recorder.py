"""The flight recorder of a rank: after an error, or when asked, it adds the rank to the job's flight record.

A record has the rank's last calls, the stacks of its threads, its settings and versions. Recording costs
nothing until then: the calls are those that the profiler and the transports keep anyway. The rank that has an
error asks the other ranks of its host for theirs too, since a rank that hangs elsewhere has none.

A thread of each rank waits for that, and for SIGUSR2, at the end of a pipe. faulthandler's handler writes
into the pipe, whatever the main thread is doing. Where a signal ends the process (SIGSEGV), faulthandler
writes the stacks to the rank's page, which the next rank of the host keeps.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcx.bootstrap.observe import observe
from flagcx.bootstrap.rank_page import CommunicatorEntry, PeerStacks, RankPage, read_page
from flagcx.config import Config
from flagcx.daemon import Daemon
from flagcx.descriptors import close_own, identity_of, is_own, occupy_standard_streams
from flagcx.diagnosis import flight_record
from flagcx.diagnosis.processes import doing
from flagcx.diagnosis.stacks import stacks
from flagcx.diagnosis.state import noted_state, state_of
from flagcx.errors import AbortedError, BootstrapError, text_of
from flagcx.forks import abandon_in_children

logger = logging.getLogger("flagcx")

_ASK, _QUIT, REFRESH = b"?", b".", b"!"
_AGAIN_S, _CONSEQUENCE_S = 1.0, 30.0
"""An error, or one that follows from another rank's, is not recorded again within this time."""
_MOST_CALLS, _MOST_COMMUNICATORS, _MOST_TEXT = 32, 32, 20_000
_GATHER_MS, _END_S = 50, 2.0
_STORE_S, _CROWD = 1.0, 16

Card = Sequence[Any]
"""What a rank tells the others of itself: host, job, process, descriptors of its page and its pipe."""


class FlightRecorder:
    """The recorder of one rank.

    Args:
        page: The rank's page.
        config: The settings, which are recorded.
        directory: Where flight records are.
    """

    def __init__(self, page: RankPage, config: Config, directory: Path) -> None:
        self._page, self._config, self._directory = page, config, directory
        occupy_standard_streams()
        self._reading, self._writing = os.pipe()
        self._identity = identity_of(self._writing)  # of both ends
        os.set_blocking(self._writing, False)
        self._lock = threading.RLock()  # a handler of a signal may come to it again
        self._recorded_at = -_CONSEQUENCE_S
        self._peers: dict[int, Card] = {}
        self._neighbour: tuple[int, PeerStacks] | None = None
        self._path = directory
        self._thread: threading.Thread | None = None
        self._takes_signal = self._takes_faults = False
        abandon_in_children(self)

    @property
    def pipe(self) -> int:
        """The descriptor to which ranks write that ask for a record."""
        return self._writing

    def start(self, rank: int, job: str, cards: Mapping[int, Card]) -> None:
        """Begins to record.

        Args:
            rank: This rank.
            job: The name of the job.
            cards: The card of every rank that has joined.
        """
        host = cards[rank][0]
        self._path = self._directory / f"flagcx-{job}.json"
        self._peers = {q: card for q, card in cards.items() if card[0] == host and q != rank}
        after = sorted(self._peers, key=lambda q: (q < rank, q))
        if after:
            with contextlib.suppress(OSError, ValueError):
                peer = self._peers[after[0]]
                self._neighbour = after[0], PeerStacks(f"/proc/{peer[2]}/fd/{peer[3]}")
        self._thread = Daemon(self._serve, "flagcx-recorder")
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None  # the system has no thread left for it
            return
        if _is_default(signal.SIGUSR2):
            faulthandler.register(signal.SIGUSR2, self._writing, all_threads=False)
            self._takes_signal = True
        if not faulthandler.is_enabled() and self._page.descriptor >= 0:
            faulthandler.enable(self._page.descriptor)
            self._takes_faults = True
        self._page.record = self.record
        self._page.set(pipe=cards[rank][4:6])

    def record(self, error: BaseException) -> str:
        """Records this rank after an error, and asks the others of the host for their records.

        An error whose text says where the record is has been recorded.

        Returns:
            Where the record is, in a sentence; "" where there is none.
        """
        if self._thread is None:
            return ""
        least_s = _CONSEQUENCE_S if isinstance(error, AbortedError) else _AGAIN_S
        with self._lock:
            if self._hint() in text_of(error) or time.monotonic() - self._recorded_at < least_s:
                return self._hint()
            self._ask()
            return self._add(type(error).__name__, error)

    def close(self) -> None:
        """Ends the recorder."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._release_signals()
            if is_own(self._writing, self._identity):
                with contextlib.suppress(OSError):
                    os.write(self._writing, _QUIT)
            if thread is not threading.current_thread():
                thread.join(timeout=_END_S)
        if self._neighbour is not None:
            self._neighbour[1].close()
            self._neighbour = None
        self._close_pipe()

    def abandon(self) -> None:
        """Ends the recorder in a forked child, whose signals are no business of its parent's."""
        if self._thread is not None:
            self._thread = None
            self._release_signals()
        self._close_pipe()

    def _release_signals(self) -> None:
        """Gives the signals back, but for one whose handler the application has set meanwhile."""
        if self._takes_signal and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
            faulthandler.unregister(signal.SIGUSR2)
        if self._takes_faults:
            faulthandler.disable()
        self._takes_signal = self._takes_faults = False

    def _close_pipe(self) -> None:
        for descriptor in (self._reading, self._writing):
            close_own(descriptor, self._identity)
        self._reading = self._writing = -1

    # -- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Waits until a rank or ``flagcx status`` asks, or until faulthandler tells of SIGUSR2."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        while self._may_read():
            told = os.read(self._reading, 1 << 16)
            while poll.poll(_GATHER_MS) and self._may_read():
                told += os.read(self._reading, 1 << 16)
            if REFRESH in told:
                self._page.refresh()
            signalled = bool(told.strip(_ASK + _QUIT + REFRESH))
            if signalled or _ASK in told:
                with self._lock:
                    self._answer(signalled)

    def _may_read(self) -> bool:
        return self._thread is not None and is_own(self._reading, self._identity)

    def _answer(self, signalled: bool) -> None:
        if time.monotonic() - self._recorded_at < _AGAIN_S:
            return
        if signalled:
            self._ask()
        hint = self._add("SIGUSR2" if signalled else "asked", None)
        if signalled and hint:
            logger.warning("SIGUSR2: %s", hint)

    # -- what is recorded -------------------------------------------------------------------------

    def _ask(self) -> None:
        """Asks the other ranks of the host for their records."""
        if self._is_crowded():
            return
        for _, _, process, _, pipe, inode in self._peers.values():
            tell(process, pipe, inode, _ASK)

    def _is_crowded(self) -> bool:
        """Whether the host has many ranks, and one of them, which looks at all others, has just begun."""
        try:
            age_s = time.time() - self._path.stat().st_mtime
        except OSError:
            return False
        return len(self._peers) > _CROWD and age_s < _AGAIN_S

    def _add(self, reason: str, error: BaseException | None) -> str:
        self._recorded_at = time.monotonic()
        try:
            page = self._page.state()
            names = ("job", "size", "script", "launcher", "began", "hosts")
            job = {name: page[name] for name in names if name in page}
            flight_record.add(self._path, job, self._describe(page, reason, error))
        except Exception as problem:  # whatever it is, it must not hide the error that is recorded
            logger.warning("the flight record %s cannot be written: %s", self._path, problem)
            return ""
        return self._hint()

    def _hint(self) -> str:
        return f"the last calls and stacks of all ranks: flagcx doctor {self._path}"

    def _describe(self, page: dict[str, Any], reason: str, error: BaseException | None) -> dict[str, Any]:
        from flagcx.diagnosis.surroundings import surroundings

        entries = self._page.entries()[-_MOST_COMMUNICATORS:]
        described: dict[str, Any] = {
            "rank": page["rank"],
            "reason": reason,
            "error": text_of(error)[:_MOST_TEXT] if error is not None else "",
            "at": time.time(),
            "clock_ns": time.monotonic_ns(),
            "state": state_of(page, os.getpid(), doing(os.getpid())).to_dict(),
            "communicators": [_communicator(entry) for entry in entries],
            "threads": stacks(),
            "traceback": _traceback(error),
            **surroundings(self._config),
        }
        if reason != "asked" and not self._is_crowded():
            described["others"] = [*map(self._state_of, self._peers), *_states_elsewhere(page)]
        if self._neighbour is not None and (text := self._neighbour[1].text()):
            described["ended_by_signal"] = {str(self._neighbour[0]): text[:_MOST_TEXT]}
        return described

    def _state_of(self, rank: int) -> dict[str, Any]:
        """Where another rank of the host is, as seen from here: it may be stopped."""
        host, _, process, descriptor, *_ = self._peers[rank]
        page = read_page(f"/proc/{process}/fd/{descriptor}")
        if page is None or page.get("store") != self._page.state()["store"]:
            page = {"rank": rank, "host": host, "communicators": []}
            return state_of(page, process, doing(process)).to_dict()
        return state_of(page, process, doing(process)).to_dict()


def _states_elsewhere(page: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where the ranks of other hosts are, as far as the job's store knows."""
    hosts = page.get("hosts", {})
    others = [rank for rank, host in hosts.items() if host != page["host"]]
    if not others:
        return []
    address, key = page["place"]
    try:
        found = observe(address, bytes.fromhex(key), _STORE_S)
    except BootstrapError:
        return []  # the store ends with the job
    return [noted_state(rank, hosts[rank], found).to_dict() for rank in others]


def tell(process: int, pipe: int, inode: int, word: bytes) -> None:
    """Writes to the pipe of another rank's recorder, if it is there.

    Args:
        process: The rank's process.
        pipe: The descriptor of its pipe.
        inode: The number by which the system knows the pipe.
        word: What to tell it, such as ``REFRESH``.
    """
    occupy_standard_streams()
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{process}/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino == inode:
                os.write(descriptor, word)
        finally:
            os.close(descriptor)


def _communicator(entry: CommunicatorEntry) -> dict[str, Any]:
    described: dict[str, Any] = {"name": entry.fields["name"], "ranks": entry.fields["ranks"]}
    for name, source in entry.sources.items():
        value = source()
        described[name] = value[-_MOST_CALLS:] if isinstance(value, list) else value
    return described


def _traceback(error: BaseException | None) -> str:
    if error is None or error.__traceback__ is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))[-_MOST_TEXT:]


def _is_default(number: int) -> bool:
    """Whether a signal has the system's own effect: neither Python nor a library handles or ignores it."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            masks = dict(line.split(":", 1) for line in file if line.startswith(("SigCgt", "SigIgn")))
    except (OSError, ValueError):
        return False
    return bool(masks) and not any(int(mask, 16) >> (number - 1) & 1 for mask in masks.values())
