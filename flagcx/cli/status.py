"""``flagcx status``: which rank of a running job is in which call, and which one keeps the others waiting."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from flagcx.errors import ArgumentError, BootstrapError

if TYPE_CHECKING:
    from flagcx.diagnosis.explain import Explanation
    from flagcx.diagnosis.jobs import Job
    from flagcx.diagnosis.state import RankState
    from flagcx.report import Report

_SHORT_S = 0.3
_COLUMNS = ("rank", "process", "it", "communicator", "call", "waits for", "waited")


def status(
    job: str = typer.Argument("", help="The begin of its name, or a process of it; all jobs if left out."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show where the ranks of a running job are, and which of them keeps the others waiting.

    Without JOB: the running jobs of this user on this host. Nothing in the job is disturbed; its ranks may
    hang, or be stopped.
    """
    from flagcx.diagnosis.jobs import find_jobs

    jobs = find_jobs()
    if not job:
        print(json.dumps([_describe(each) for each in jobs], indent=1) if as_json else _list(jobs))
        return
    chosen = [each for each in jobs if each.is_called(job)]
    if len(chosen) > 1:
        names = ", ".join(each.name for each in chosen)
        raise ArgumentError(
            f"{job!r} is the begin of the names of {len(chosen)} jobs: {names}; give more of it"
        )
    if not chosen:
        running = ", ".join(each.name for each in jobs)
        there = f"those that run are {running}" if jobs else "none of this user runs on this host"
        raise ArgumentError(f"no job is called {job!r}; {there}")
    _show(chosen[0], as_json)


def _list(jobs: Sequence[Job]) -> str:
    if not jobs:
        return "No job of this user runs on this host."
    return "\n".join([*map(_headline, jobs), "", "flagcx status JOB says where its ranks are."])


def _headline(job: Job) -> str:
    ranks = f"{job.size} rank{'' if job.size == 1 else 's'}"
    here = "" if len(job.ranks) == job.size else f" ({len(job.ranks)} seen here)"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.began))
    by = "" if job.launcher == "alone" else f", started by {job.launcher}"
    return f"{job.name}: {job.script}, {ranks}{here}{by}, since {since}"


def _describe(job: Job) -> dict:
    return {
        "job": job.name,
        "size": job.size,
        "script": job.script,
        "launcher": job.launcher,
        "began": job.began,
        "processes": {shown.page["rank"]: shown.process for shown in job.ranks},
    }


def _show(job: Job, as_json: bool) -> None:
    from rich.console import Console

    from flagcx.diagnosis.explain import explain

    states = [_settled(state) for state in job.states()]
    problem = ""
    try:
        states += job.states_elsewhere()
    except BootstrapError as error:
        problem = f"Ranks on other hosts cannot be seen: {error}."
    states.sort(key=lambda state: state.rank)
    found = explain(job.size, states, job.elsewhere)
    if problem:
        found.sentences.append(problem)
    if as_json:
        print(json.dumps(_to_dict(job, states, found), indent=1))
        return
    print(_headline(job), "", *found.sentences, sep="\n")
    table = report(states)
    Console().print(table) if sys.stdout.isatty() else print(table)


def _settled(state: RankState) -> RankState:
    """Where a rank is, less its short waits: a job at work is full of them, and no two are seen at once."""
    seen = (
        replace(p, waits_in="", waits_for=None, waited_s=0.0) if p.waited_s < _SHORT_S else p
        for p in state.progress
    )
    return replace(state, progress=tuple(seen))


def _to_dict(job: Job, states: Sequence[RankState], found: Explanation) -> dict:
    return _describe(job) | {
        "words": found.sentences,
        "culprits": found.culprits,
        "circles": found.circles,
        "ranks": [state.to_dict() for state in states],
    }


def report(states: Sequence[RankState]) -> Report:
    """A table of the ranks: one row for each communicator in which a rank waits, or for its last call."""
    from flagcx.report import Report

    rows = []
    for state in states:
        shown = [p for p in state.progress if p.waits_in] or [p for p in state.progress if p.last][-1:]
        head = [str(state.rank), str(state.process or "")]
        activity = "waits" if shown and shown[0].waits_in and state.doing not in _ENDS else state.doing
        head.append("is in fc.init()" if state.joining and activity not in _ENDS else activity)
        for p in shown:
            awaited = "" if p.waits_for is None else f"rank {p.waits_for}"
            since = f"{p.waited_s:.1f} s" if p.waits_in else ""
            call = p.waits_in or f"last: {p.last}"
            rows.append((*head, p.communicator, call, awaited, since))
            head = ["", "", ""]
        if not shown:
            rows.append((*head, "", "", "", ""))
    return Report("", _COLUMNS, rows, (2, 3, 4, 5))


_ENDS = ("is stopped", "is gone")
