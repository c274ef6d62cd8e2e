"""Which rank waits for which, in words: the ranks that cannot go on, and the one that keeps them waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flagcx.diagnosis.processes import GONE, STOPPED
from flagcx.diagnosis.state import ANY_NUMBER, Progress, RankState

_RECEIVE, _SEND = "a receive", "a send"
SAME_ORDER = "every rank must make the same calls in the same order"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What keeps a job from going on.

    Attributes:
        sentences: In words, the most important first.
        culprits: The ranks that keep others waiting and wait for none themselves.
        circles: Ranks that wait for each other in a circle.
    """

    sentences: list[str]
    culprits: list[int]
    circles: list[list[int]]


def explain(size: int, states: Sequence[RankState], elsewhere: Iterable[int] = ()) -> Explanation:
    """Explains where the ranks of a job are.

    Args:
        size: How many ranks it has.
        states: Where those are that can be seen.
        elsewhere: Ranks on hosts that cannot be seen.
    """
    seen = {state.rank: state for state in states}
    hidden = set(elsewhere) - seen.keys()
    missing = [rank for rank in range(size) if rank not in seen and rank not in hidden]
    if any(state.joining for state in states):
        return _explain_init(seen, missing)
    waiting = {rank: state.wait for rank, state in seen.items() if state.wait and _lives(state)}
    targets = {rank: _targets(wait, seen, rank) for rank, wait in waiting.items()}
    circles = _circles(targets)
    sentences = [_circle_in_words(circle, waiting, targets) for circle in circles]
    in_circles = {rank for circle in circles for rank in circle}
    sentences += _waits_in_words(waiting, targets, in_circles)
    awaited = {rank for few in targets.values() for rank in few}
    culprits = sorted(rank for rank in awaited if rank not in waiting)
    ended = {*missing, *(rank for rank, state in seen.items() if state.doing in (GONE, STOPPED))}
    for rank in sorted({*culprits, *ended}):
        sentences.append(_culprit_in_words(rank, seen.get(rank), rank in hidden, waiting, targets))
    sentences += [f"rank {r} gave up: {s.gave_up}" for r, s in sorted(seen.items()) if s.gave_up]
    if not sentences:
        sentences = ["No rank waits for another: the job goes on, or is in no call of flagcx."]
    return Explanation(sentences, sorted({*culprits, *ended}), circles)


def _explain_init(seen: Mapping[int, RankState], missing: Sequence[int]) -> Explanation:
    inside = [rank for rank, state in seen.items() if state.joining]
    sentences = [f"{name_ranks(inside)} {_be(inside)} in fc.init()."]
    if missing:
        have = "has" if len(missing) == 1 else "have"
        sentences.append(f"{name_ranks(missing)} {have} not called fc.init(), or {have} ended.")
    stopped = [rank for rank, state in seen.items() if state.doing == STOPPED]
    sentences += [f"{_process_of(seen[rank])} is stopped." for rank in stopped]
    return Explanation(sentences, sorted({*missing, *stopped}), [])


def _lives(state: RankState) -> bool:
    return state.doing not in (GONE, STOPPED) and not state.gave_up


def _targets(wait: Progress, seen: Mapping[int, RankState], rank: int) -> tuple[int, ...]:
    """The ranks that have not come to a call of all ranks; else the one that is waited for."""
    if wait.calls is not None and not wait.waits_in.startswith((_RECEIVE, _SEND)):
        behind = [q for q in wait.ranks if q != rank and _is_behind(seen.get(q), wait)]
        if behind:
            return tuple(behind)
    return () if wait.waits_for is None else (wait.waits_for,)


def _is_behind(state: RankState | None, wait: Progress) -> bool:
    """Whether a rank has not come to the call in which another one waits."""
    if state is None:
        return False
    same = [p for p in state.progress if _place(p) == _place(wait)]
    if not same:
        return True
    ahead = (wait.calls or 0) - (same[0].calls or 0)
    return same[0].calls is not None and 0 < ahead % ANY_NUMBER < ANY_NUMBER // 2


def _place(progress: Progress) -> tuple:
    return progress.communicator, progress.ranks, progress.on_gpu


def _circles(targets: Mapping[int, tuple[int, ...]]) -> list[list[int]]:
    """Ranks each of which waits for every other one of them, by way of others or not."""
    reached = {rank: _reached(rank, targets) for rank in targets}
    circles: list[list[int]] = []
    for rank in sorted(targets):
        circle = sorted(q for q in reached[rank] if rank in reached.get(q, ()))
        if rank in reached[rank] and circle not in circles:
            circles.append(circle)
    return circles


def _reached(rank: int, targets: Mapping[int, tuple[int, ...]]) -> set[int]:
    """The ranks that a rank waits for, those that they wait for, and so on."""
    found: set[int] = set()
    todo = list(targets[rank])
    while todo:
        q = todo.pop()
        if q not in found:
            found.add(q)
            todo += targets.get(q, ())
    return found


def _circle_in_words(
    circle: Sequence[int], waiting: Mapping[int, Progress], targets: Mapping[int, tuple[int, ...]]
) -> str:
    if len(circle) == 1:
        (rank,) = circle
        call = _call_in_words(waiting[rank])
        return f"rank {rank} waits for itself in {call}. It must send before it receives."
    parts = [
        f"rank {rank} waits for {name_ranks(q for q in targets[rank] if q in circle)} in "
        f"{_call_in_words(waiting[rank])}"
        for rank in circle
    ]
    return f"{'; '.join(parts)}: none of them can go on. {_why([waiting[rank] for rank in circle])}"


def _why(waits: Sequence[Progress]) -> str:
    calls = {wait.waits_in for wait in waits}
    names = list(dict.fromkeys(_name(wait) for wait in waits))
    if all(call.startswith(_RECEIVE) for call in calls):
        return "Each of them receives before it sends: use comm.sendrecv or comm.group()."
    if all(call.startswith(_SEND) for call in calls):
        return "Each of them sends before it receives: use comm.sendrecv or comm.group()."
    if len(names) > 1:
        listed = " and ".join(names)
        return f"They use {listed} in different orders; {SAME_ORDER}, of all communicators too."
    if len(calls) > 1:
        return f"They make different calls of {names[0]}; {SAME_ORDER}."
    return "All of them have come to the same call: it takes long, or its messages are lost."


def _waits_in_words(
    waiting: Mapping[int, Progress], targets: Mapping[int, tuple[int, ...]], left_out: set[int]
) -> list[str]:
    groups: dict[tuple, list[int]] = {}
    for rank in sorted(waiting.keys() - left_out):
        groups.setdefault((_call_in_words(waiting[rank]), targets[rank]), []).append(rank)
    sentences = []
    for (call, few), ranks in groups.items():
        waited = max(waiting[rank].waited_s for rank in ranks)
        verb = "waits" if len(ranks) == 1 else "wait"
        for_whom = f"for {name_ranks(few)} " if few else ""
        how_long = _duration(waited)
        sentences.append(f"{name_ranks(ranks)} {verb} {for_whom}in {call}, for {how_long}.")
    return sentences


def _call_in_words(wait: Progress) -> str:
    return f"{wait.waits_in} of {_name(wait)}{' (arrays on GPUs)' if wait.on_gpu else ''}"


def _name(progress: Progress) -> str:
    return f"communicator {progress.communicator}"


def _culprit_in_words(
    rank: int,
    state: RankState | None,
    is_elsewhere: bool,
    waiting: Mapping[int, Progress],
    targets: Mapping[int, tuple[int, ...]],
) -> str:
    if state is None:
        where = "on another host, which cannot be seen from here" if is_elsewhere else "gone"
        return f"rank {rank} is {where}."
    if state.doing == GONE:
        return f"{_process_of(state)} is gone."
    if state.doing == STOPPED:
        by = "by SIGSTOP, SIGTSTP or a debugger"
        return f"{_process_of(state)} is stopped ({by}); kill -CONT lets it go on."
    wanted = [_place(waiting[q]) for q, few in targets.items() if rank in few]
    last = [
        f"its last call of {_name(p)} was {p.last}" if p.last else f"it has made no call of {_name(p)}"
        for p in state.progress
        if _place(p) in wanted and (p.last or p.calls == 0)
    ]
    tail = f"; {'; '.join(last)}" if last else ""
    does = f"; it {state.doing}" if state.doing else ""
    return f"{_process_of(state)} itself waits for no rank{does}{tail}."


def _process_of(state: RankState) -> str:
    return f"rank {state.rank} (process {state.process} on {state.host})"


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def name_ranks(ranks: Iterable[int]) -> str:
    """Names ranks in few words.

    Example:
        >>> name_ranks([0]), name_ranks([1, 0, 4]), name_ranks([0, 1, 2, 3, 7])
        ('rank 0', 'ranks 0, 1 and 4', 'ranks 0 to 3 and 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank{'' if len(runs) == 1 and len(runs[0]) == 1 else 's'} {listed}"
