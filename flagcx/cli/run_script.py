"""What ``flagcx run`` does once its options are read. Nothing heavy is imported: the ranks wait for it."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence

from flagcx._launch.elastic import ElasticRanks
from flagcx._launch.failure import Exit, name_ranks
from flagcx._launch.far_ranks import SSH, FarHost, FarRanks, parse_hosts
from flagcx._launch.ranks import Command, Ranks
from flagcx._launch.share_gpu import sharing
from flagcx._launch.signals import Ended, passed_on
from flagcx._launch.terminal import Terminal
from flagcx.bootstrap.environment import identify
from flagcx.config import environment
from flagcx.errors import LaunchError

_TIMED_OUT = 124
_MOST_CODE_NBYTES = 128 << 10  # what Linux takes as one argument of a command
_RULE = "=" * 24
_INTERPRETER = re.compile(r"python[\d.]*")


def run_plainly(arguments: Sequence[str]) -> int | None:
    """Runs ``run [-n N] [-m] SCRIPT ...``, which is what is asked for nearly always.

    Args:
        arguments: Those of the command line.

    Returns:
        The exit code; None, and nothing is done, where other options stand there, or an error.
    """
    words = [*arguments]
    if not words or words.pop(0) != "run":
        return None
    ranks, module = 0, False
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "-m" and not module:
            module = True
        elif option == "-n" and not ranks and words and words[0].isdecimal():
            ranks = int(words.pop(0))
        else:
            return None
    return run_script(words[0], words[1:], ranks, module) if words else None


def run_script(
    script: str,
    arguments: Sequence[str],
    ranks: int = 0,
    module: bool = False,
    timeout_s: float = 0.0,
    prefix: bool = True,
    share_gpu: bool = False,
    kill_after_s: float | None = None,
    elastic: Mapping[str, int] | None = None,
    hosts: str = "",
    agent: str = SSH,
    code: bool = False,
) -> int:
    """Runs a script as ``flagcx run`` does, whose options its arguments are.

    ``elastic`` holds ``min_ranks`` and ``max_restarts`` of ``ElasticRanks``; None for a job that ends with
    the first rank that fails. Of ``hosts``, as in "a:4,b:4", each gets its ranks by way of the agent. With
    ``code``, the script is the text of a program; "-" is one that stands on stdin.

    Returns:
        The exit code for the shell: 0; or that of the rank that failed first, 128 + n if signal n killed it;
        124 after the time-out; 130 after Ctrl-C.

    Raises:
        LaunchError: The ranks cannot be started.
    """
    program = _program(script, module, code)
    far = parse_hosts(hosts) if hosts else ()
    size = sum(host.ranks for host in far) or ranks or len(os.sched_getaffinity(0))
    command = Command((sys.executable, *program, *arguments))
    environ = environment()
    _refuse_if_started(environ)
    if kill_after_s is not None:
        environ["FLAGCX_KILL_AFTER_S"] = str(kill_after_s)
    terminal = Terminal(size, prefix)
    if elastic is not None and elastic["min_ranks"] > size:
        raise LaunchError(f"--min-ranks {elastic['min_ranks']} is more than the {size} ranks of -n", rank=0)
    with (
        sharing(environ, share_gpu) as variables,
        _ranks(far, agent, [command] * size, variables, terminal, elastic) as job,
    ):
        try:
            # Handlers come after the start: the ranks must not inherit a signal that is ignored.
            job.start()
            with passed_on(job, lambda: terminal.resize(job), lambda: terminal.resume(job)):
                terminal.serve(job)
                late = job.wait(timeout_s or None)
        except KeyboardInterrupt:
            terminal.interrupted = True
            job.end(signal.SIGINT)
            terminal.say("interrupted; all ranks have ended")
            return 128 + signal.SIGINT
        except Ended as error:
            job.end(signal.SIGTERM)
            return 128 + error.number
        finally:
            terminal.close()
        if late:
            terminal.say(f"{name_ranks(late)} ended: not done after {timeout_s:g} s (--timeout)")
            return _TIMED_OUT
        failed = job.first_failure()
        if failed is None:
            return 0
        terminal.say(_describe(failed, job))
        return failed.code if failed.code > 0 else 128 - failed.code


def _ranks(
    far: Sequence[FarHost],
    agent: str,
    commands: Sequence[Command],
    environ: Mapping[str, str],
    terminal: Terminal,
    elastic: Mapping[str, int] | None,
) -> Ranks:
    if far:
        return FarRanks(far, agent, commands[0], environ, terminal)
    if elastic is not None:
        return ElasticRanks(commands, environ, terminal, **elastic)
    return Ranks(commands, environ, terminal)


def _program(script: str, module: bool, code: bool) -> tuple[str, ...]:
    """What Python is told to run on each rank."""
    if module and code:
        raise LaunchError(
            "-m and -c exclude each other: what follows is a module, or a program's text", rank=0
        )
    if module:
        return "-m", script
    if script == "-" and not code:
        script, code = sys.stdin.read(), True
    if not code:
        _check_script(script)
        return (script,)
    if len(script.encode()) >= _MOST_CODE_NBYTES:
        raise LaunchError(
            f"a program of {len(script.encode()):,} bytes is too long to be handed to ranks, expected less "
            f"than {_MOST_CODE_NBYTES:,}; save it to a file",
            rank=0,
        )
    return "-c", script


def _check_script(script: str) -> None:
    is_program = os.path.isfile(script) and os.access(script, os.X_OK)
    if _INTERPRETER.fullmatch(os.path.basename(script)) and (is_program or not os.path.exists(script)):
        raise LaunchError(
            f"{script!r} is a Python interpreter, which flagcx run starts itself; leave it out: "
            f"flagcx run -n 2 script.py",
            rank=0,
        )
    if not os.path.exists(script):
        raise LaunchError(f"there is no script {script!r}; to run a module, put -m before its name", rank=0)


def _refuse_if_started(environ: Mapping[str, str]) -> None:
    """Raises where another launcher has started several of this command, each of which would be a job."""
    outer = identify(environ)
    by_hand = outer.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ
    if outer.size > 1 and outer.launcher != "flagcx" and not by_hand:
        raise LaunchError(
            f"{outer.launcher} started this as rank {outer.rank} of {outer.size}; each flagcx run would be a "
            f"job of its own, {outer.size} that know nothing of each other: leave flagcx run out, and have "
            f"{outer.launcher} start the script, as in mpirun -n 2 python script.py",
            rank=outer.rank,
        )


def _describe(failed: Exit, job: Ranks) -> str:
    where = job.where(failed.rank)
    heading = f"rank {failed.rank} of {job.size}{where} failed first: {failed.describe()}"
    traceback, words = job.tails[failed.rank].traceback(), job.tails[failed.rank].last_words()
    if not words:
        return heading
    what = "Its traceback" if traceback else "The end of its error output"
    return f"{heading}\n{_RULE} {what} (rank {failed.rank}) {_RULE}\n{words.rstrip()}"
