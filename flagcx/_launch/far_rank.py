"""What a launcher on another host runs for each of its ranks here: starts the rank, and ends it when told.

The first line of standard input is the card: the command, the directory and the environment. Every byte after
it is the number of a signal for the rank and the processes that it started, or with ``ALONE`` for the rank
alone. When the input ends, the launcher is gone, and so is the rank. The exit code is that of the rank;
128 + n where signal n ended it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flagcx._launch.process_groups import end_with_launcher, sweep
from flagcx.config import environment
from flagcx.descriptors import occupy_standard_streams

ALONE = 128
_NO_START = 127


@dataclass(frozen=True, slots=True)
class Card:
    """How to start a rank.

    Attributes:
        command: Its command line.
        directory: Where it runs.
        environ: Variables, which replace and add to those of this host.
    """

    command: Sequence[str]
    directory: str
    environ: dict[str, str]

    def line(self) -> bytes:
        """The card as one line."""
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> int:
    """Runs the rank; returns its exit code."""
    card, signals = _read()
    occupy_standard_streams()
    own, held = os.pipe()
    try:
        process = subprocess.Popen(
            card.command,
            cwd=card.directory,
            env=environment() | card.environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[own],
            preexec_fn=lambda: end_with_launcher(own),
        )
    except OSError as error:
        print(f"host {socket.gethostname()} cannot start a rank: {error}", file=sys.stderr)
        return _NO_START
    try:
        _serve(process, signals)
        sweep([process.pid])
    finally:
        os.close(held)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _read() -> tuple[Card, bytes]:
    """The card, and the signals that have come with it."""
    told = b""
    while b"\n" not in told:
        more = os.read(0, 1 << 16)
        if not more:
            raise SystemExit(f"host {socket.gethostname()} was told nothing of the rank to start")
        told += more
    line, _, rest = told.partition(b"\n")
    return Card(**json.loads(line)), rest


def _serve(process: subprocess.Popen, signals: bytes) -> None:
    """Passes signals on until the rank has ended; a launcher that is gone has it killed."""
    ended = os.pidfd_open(process.pid)
    try:
        while True:
            for number in signals:
                with contextlib.suppress(ProcessLookupError):
                    (os.kill if number & ALONE else os.killpg)(process.pid, number % ALONE)
            ready, _, _ = select.select([0, ended], [], [])
            if ended in ready:
                process.wait()
                return
            signals = os.read(0, 1 << 10) or bytes([signal.SIGKILL])
    finally:
        os.close(ended)


if __name__ == "__main__":
    sys.exit(main())
