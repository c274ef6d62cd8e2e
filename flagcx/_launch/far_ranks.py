"""The ranks of a job on several hosts, each started through an agent such as ssh, and watched from here.

The agent is a command that is given a host and a command line for it. It passes on input, output and the exit
code. For each rank it runs ``far_rank`` there, which hears by its input what to start, with the key of the
job's store, and what signals to pass on. The store is served here; the ranks reach it by TCP.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flagcx._launch import far_rank
from flagcx._launch.failure import Exit
from flagcx._launch.output import RankOutput
from flagcx._launch.process_groups import end_with_launcher
from flagcx._launch.ranks import Command, Ranks
from flagcx.bootstrap.sockets import own_addresses
from flagcx.bootstrap.store_server import StoreServer
from flagcx.errors import ArgumentError

SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=5"
_KEPT_AT_HOME = (
    *("HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "TMUX"),
    *("USER", "DISPLAY", "_"),
)
_KEPT_PREFIXES = ("SSH_", "XDG_", "DBUS_")
_SIGNALS = 128


@dataclass(frozen=True, slots=True)
class FarHost:
    """A host, and how many ranks it gets.

    Example:
        >>> parse_hosts("a:4,b")
        (FarHost(name='a', ranks=4), FarHost(name='b', ranks=1))
    """

    name: str
    ranks: int


def parse_hosts(text: str) -> tuple[FarHost, ...]:
    """Reads "a:4,b:4", hosts with numbers of ranks; one rank where there is no number.

    Raises:
        ArgumentError: It says something else.
    """
    found = []
    for part in text.split(","):
        name, _, count = (part if ":" in part else f"{part}:1").strip().rpartition(":")
        if not name or name.startswith("-") or not count.isdecimal() or int(count) < 1:
            raise ArgumentError(
                f"--hosts {text!r}: {part!r} is no host with a number of ranks; expected a list like a:4,b:4"
            )
        found.append(FarHost(name, int(count)))
    twice = sorted({one.name for one in found if [host.name for host in found].count(one.name) > 1})
    if twice:
        raise ArgumentError(f"--hosts {text!r} names {', '.join(twice)} twice; give each host all its ranks")
    return tuple(found)


class FarRanks(Ranks):
    """The processes of a job's ranks on several hosts. Rank 0 is the first of the first host.

    Args:
        hosts: The hosts, and how many ranks each has.
        agent: The agent's command line, to which the host and the command are added.
        command: What every rank runs.
        environ: The environment of all, less what belongs to this host.
        output: Where their output goes.
    """

    def __init__(
        self,
        hosts: Sequence[FarHost],
        agent: str,
        command: Command,
        environ: Mapping[str, str],
        output: RankOutput,
    ) -> None:
        self._agent, self._inputs = shlex.split(agent), list[int]()
        self._places = [(host, place) for host in hosts for place in range(host.ranks)]
        super().__init__([command] * len(self._places), _portable(environ), output)

    def where(self, rank: int) -> str:
        """The host of a rank, in words that follow the rank."""
        return f" on {self._places[rank][0].name}"

    def signal_rank(self, rank: int, number: int, children: bool = True) -> None:
        """Sends a signal to a rank that still runs, and to what it started; see ``Ranks.signal_rank``.

        SIGKILL ends the agent too, whose host may not answer; without an agent no rank lives on.
        """
        if rank in self.running():
            with contextlib.suppress(OSError):
                os.write(self._inputs[rank], bytes([number if children else number | far_rank.ALONE]))
            if number == signal.SIGKILL:
                super().signal_rank(rank, number)

    def _close(self) -> None:
        super()._close()
        for descriptor in self._inputs:
            os.close(descriptor)
        self._inputs.clear()

    def _advice(self) -> str:
        return ""  # how many cores the hosts have is not known here

    def _make_server(self) -> StoreServer:
        return StoreServer(self.size, "0.0.0.0:0")

    def _streams(self, rank: int) -> Mapping[str, Any]:
        return RankOutput.streams(self._output, rank)

    def _popen(
        self, rank: int, environ: Mapping[str, str], pipe: int, options: Mapping[str, Any]
    ) -> subprocess.Popen:
        host, place = self._places[rank]
        own = {"FLAGCX_LOCAL_RANK": str(place), "FLAGCX_LOCAL_SIZE": str(host.ranks)}
        if self._server is not None:
            port = self._server.address.rpartition(":")[2]
            own["FLAGCX_STORE_ADDRESS"] = f"tcp:{_address_for(host.name)}:{port}"
        card = far_rank.Card(self._commands[rank].arguments, os.getcwd(), {**environ, **own})
        path = environ.get("PYTHONPATH", "")
        far = [*(["env", f"PYTHONPATH={path}"] if path else []), sys.executable, "-m", far_rank.__name__]
        process = subprocess.Popen(
            [*self._agent, host.name, shlex.join(far)],
            pass_fds=[pipe],
            **{**options, "stdin": subprocess.PIPE},
            preexec_fn=lambda: end_with_launcher(pipe),
        )
        assert process.stdin is not None
        self._inputs[rank : rank + 1] = [os.dup(process.stdin.fileno())]
        with contextlib.suppress(OSError):  # the agent has failed, which its exit code tells
            process.stdin.write(card.line())
            process.stdin.flush()
        with contextlib.suppress(OSError):
            process.stdin.close()
        return process

    def _exit_of(self, rank: int, code: int) -> Exit:
        """The exit of a rank, whose agent says 128 + n where signal n ended it."""
        ended = super()._exit_of(rank, code)
        by_signal = _SIGNALS < code < _SIGNALS + signal.NSIG
        return replace(ended, code=_SIGNALS - code) if by_signal else ended


def _portable(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what is true of this host or session alone."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _KEPT_AT_HOME and not name.startswith(_KEPT_PREFIXES)
    }


def _address_for(host: str) -> str:
    """The address of this host that another one reaches it by."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; the system chooses the interface
        return str(probe.getsockname()[0])
    return own_addresses()[0]
