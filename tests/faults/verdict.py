"""Whether a job of the fault suite ended as it must: no hang, nothing wrong, nothing left, right blame."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.faults.plan import HARMLESS, Plan

Events = list[dict[str, Any]]
_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a job.

    Attributes:
        plan: The job.
        struck: Whether its fault happened.
        hangs: Ranks that did not end.
        wrong: Results that were returned and are wrong.
        leaks: What was left.
        blame: Errors that name another than the victim, or that nothing called for.
        unclear: Exceptions of the victim that are not of flagcx's tree, in a call of flagcx.
        raised_s: How long after the fault, or after the call's begin, each error came.
        logs: Where the logs of its ranks are, if they are kept.
    """

    plan: Plan
    struck: bool
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    blame: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    raised_s: list[float] = field(default_factory=list)
    logs: str = ""

    @property
    def tardy(self) -> bool:
        """Whether an error came only when a time-out had passed that nothing called for."""
        called_for = self.plan.fault in ("stop", "cut link") or self.plan.phase == "init"
        return not called_for and max(self.raised_s, default=0.0) > _AFTER_S

    @property
    def good(self) -> bool:
        """Whether there is nothing to say against it."""
        return not (self.hangs or self.wrong or self.leaks or self.blame)


def judge(plan: Plan, events: dict[str, Events], late: set[int], leaks: list[str]) -> Verdict:
    """Reads the logs of a job.

    Args:
        plan: The job.
        events: Of "launcher" and each rank.
        late: Ranks that ran on beyond the bound.
        leaks: What was found to be left.
    """
    of_victim = events[f"rank{plan.victim}"]
    struck_at = [e["time"] for e in (*events["launcher"], *of_victim) if e["event"] == "fault"]
    seen = Verdict(plan, bool(struck_at) or plan.fault in ("strangers", "two jobs"), leaks=list(leaks))
    seen.hangs.extend(f"rank {rank} after {_last(events[f'rank{rank}'])}" for rank in sorted(late))
    for rank in range(plan.size):
        _judge_rank(seen, rank, events[f"rank{rank}"], min(struck_at, default=0.0))
    _judge_launcher(seen, events["launcher"])
    return seen


def _judge_rank(seen: Verdict, rank: int, events: Events, struck_at: float) -> None:
    plan, begun = seen.plan, 0.0
    victim = rank == plan.victim
    for event in events:
        what = f"rank {rank}, {event.get('phase')}: {event.get('kind', '')} {event.get('text', '')}"
        if event["event"] == "begin":
            begun = event["time"]
        elif event["event"] == "wrong":
            seen.wrong.append(what)
        elif event["event"] == "error":
            if not (victim and plan.fault not in HARMLESS) and not _is_right(plan, rank, event, seen.struck):
                seen.blame.append(what)
            elif struck_at and not victim:
                seen.raised_s.append(event["time"] - max(begun, struck_at))
        elif event["event"] == "raised" and not (
            event["kind"] in _EXPECTED or (victim and _says_enough(event))
        ):
            excused = victim or plan.fault == "small /dev/shm"
            if not (_may_end_all(plan) and seen.struck):
                (seen.unclear if excused else seen.wrong).append(what)
        elif event["event"] == "after" and victim:
            pass  # a rank without memory or descriptors may need the time-out
        elif event["event"] == "after" and event["seconds"] > _AFTER_S:
            seen.hangs.append(f"rank {rank} needed {event['seconds']:.1f} s to refuse a call after an error")
        elif event["event"] == "after" and not event["kind"] and plan.fault not in _ALIVE:
            seen.wrong.append(f"rank {rank}: a call after an error raised nothing")
    names = [event["event"] for event in events]
    if not victim and plan.fault != "dead store" and not {"end", "raised"} & set(names):
        seen.wrong.append(f"rank {rank} ended without a word after {_last(events)}")
    if "end" in names and plan.transport == "shared memory" and not victim:
        more, opened = _opened(events)
        if more > _KEPT + (_SERVER + plan.size) * (rank == 0 and plan.store == "rank 0"):
            seen.leaks.append(f"rank {rank} has {more} descriptors more than at its start: {opened}")


def _may_end_all(plan: Plan) -> bool:
    """Whether the ranks share a GPU in a way that one that is killed takes the others' GPU from them."""
    return plan.transport == "GPU, MPS" and plan.fault in ("kill", "stop")


def _says_enough(event: dict[str, Any]) -> bool:
    """Whether NumPy says what it has no memory for, be it for an array of the caller's or for a result."""
    return "Unable to allocate" in event["text"]


_EXPECTED = "Injected", "SystemExit"
_KEPT = 1 + 3
"""Descriptors that a rank keeps until its process ends: the sniper's pipe, and the store's connection."""
_SERVER = 4
"""Descriptors of a store that a rank serves until its process ends, beside its connections."""
_ALIVE = ("descriptors", "memory", "small /dev/shm")
"""Faults after which a call may go well: all ranks live, and what failed may have been a split alone."""


def _judge_launcher(seen: Verdict, events: Events) -> None:
    plan = seen.plan
    for event in events:
        if event["event"] == "launch error" and event["peer"] != plan.victim:
            seen.blame.append(f"fc.launch: {event['text']}")
    more, opened = _opened(events)
    if more > 0:
        seen.leaks.append(f"the launcher has {more} descriptors more than at its start: {opened}")


def _opened(events: Events) -> tuple[int, str]:
    """How many descriptors more a process has at its end than at its start, and what those are."""
    if not events or events[-1]["event"] != "end":
        return 0, ""
    start, end = events[0]["descriptors"], events[-1]["descriptors"]
    return len(end) - len(start), ", ".join((Counter(end) - Counter(start)).elements())


def _is_right(plan: Plan, rank: int, event: dict[str, Any], struck: bool) -> bool:
    """Whether a rank's error is one that the fault calls for, and blames what is at fault."""
    if not struck or plan.fault in HARMLESS:
        return False
    text = event["text"]
    if plan.fault == "small /dev/shm":
        return "/dev/shm" in text or "memory" in text
    if plan.fault == "dead store":
        return "launcher" in text or "store" in text
    if plan.fault == "cut link":
        return event["peer"] is None or event["peer"] // 2 != rank // 2
    if _may_end_all(plan):
        return True
    if "MPI_Init did not return" in text:  # through which ranks of several hosts find each other
        return plan.phase == "init"
    if event["peer"] is not None:
        return event["peer"] == plan.victim
    return re.search(rf"\branks? [\d, and]*\b{plan.victim}\b", text) is not None


def _last(events: Events) -> str:
    return f"{events[-1]['event']} {events[-1].get('phase', '')}".strip() if events else "nothing"
