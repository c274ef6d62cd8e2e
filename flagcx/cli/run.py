"""``flagcx run``: a script on several ranks of this host or of others, watched from one terminal.

It puts the rank before each line of output, shows the traceback of the first rank that failed last, ends
all ranks, and returns that rank's exit code. Ranks that are told to end have ten seconds for a checkpoint
(``--kill-after``). SIGUSR1 and SIGUSR2 go to the ranks, Ctrl-Z and ``fg`` stop and continue all, ``nohup``
works, and a full disk under its output ends no job.
"""

from __future__ import annotations

import math

import typer

from flagcx._launch.far_ranks import SSH
from flagcx.cli.run_script import run_script

_OF_ONE_HOST = ("ranks", "share_gpu", "elastic")


def _count(text: str | int) -> int:
    if str(text).isdecimal():
        return int(text)
    hint = ": flagcx run takes -n, not -np" if text == "p" else ""
    raise typer.BadParameter(f"{text!r} is not a number of ranks{hint}; write flagcx run -n 2 script.py")


def run(
    context: typer.Context,
    script: str = typer.Argument(
        ..., help="The script, after -m the module, after -c the program; its own arguments follow. -: stdin."
    ),
    ranks: int = typer.Option(
        0, "-n", "--ranks", parser=_count, metavar="INTEGER", help="How many ranks; 0: one for each core."
    ),
    module: bool = typer.Option(False, "-m", "--module", help="SCRIPT is the name of a module."),
    code: bool = typer.Option(False, "-c", help="SCRIPT is the text of a program."),
    timeout: float = typer.Option(
        0.0, "--timeout", min=0.0, help="End the ranks after so many seconds; 0: never."
    ),
    kill_after: float = typer.Option(
        None,
        min=0.0,
        help="How long ranks that are told to end (SIGTERM, Ctrl-C) have before they are killed, in seconds; "
        "10, or FLAGCX_KILL_AFTER_S.",
    ),
    prefix: bool = typer.Option(
        True, "--prefix/--no-prefix", help="Put the rank before each line of output."
    ),
    share_gpu: bool = typer.Option(False, "--share-gpu", help="Let several ranks use one GPU."),
    elastic: bool = typer.Option(
        False,
        "--elastic",
        help="Start a lost rank again, with FLAGCX_RESTARTS set; fc.init() makes a communicator with it.",
    ),
    min_ranks: int = typer.Option(
        1, min=1, help="With --elastic: with how many ranks the job goes on where no restart is left."
    ),
    max_restarts: int = typer.Option(
        3, min=0, help="With --elastic: how many times ranks are started again, all together."
    ),
    hosts: str = typer.Option(
        "",
        "--hosts",
        help="Start the ranks on these hosts, as in a:4,b:4, with the same Python and directory.",
    ),
    agent: str = typer.Option(
        SSH, "--agent", help="With --hosts: a command that is given a host and a command line for it."
    ),
) -> None:
    """Run a Python script, or a module, on several ranks of this host, or with --hosts of several hosts.

    Lines of output have their rank before them. If a rank fails, all are ended, its traceback is shown
    last, and its exit code is returned.
    """
    asked = [name for name in ("min_ranks", "max_restarts") if _is_given(context, name)]
    if asked and not elastic:
        raise typer.BadParameter(f"--{asked[0].replace('_', '-')} has no meaning without --elastic; add it")
    if math.isnan(timeout):
        raise typer.BadParameter("--timeout nan is no number of seconds")
    if hosts and (refused := [name for name in _OF_ONE_HOST if _is_given(context, name)]):
        name = refused[0].replace("_", "-")
        raise typer.BadParameter(f"--{name} has no meaning with --hosts; leave it out")
    if not hosts and _is_given(context, "agent"):
        raise typer.BadParameter("--agent has no meaning without --hosts; add the hosts")
    bounds = {"min_ranks": min_ranks, "max_restarts": max_restarts} if elastic else None
    raise SystemExit(
        run_script(
            script,
            context.args,
            ranks,
            module=module,
            code=code,
            timeout_s=timeout,
            kill_after_s=kill_after,
            prefix=prefix,
            share_gpu=share_gpu,
            elastic=bounds,
            hosts=hosts,
            agent=agent,
        )
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
