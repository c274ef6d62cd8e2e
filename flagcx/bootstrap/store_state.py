"""What a store knows and who waits for what: the rules, without a socket.

A ``StoreState`` takes one request after another and answers when it can. It holds no connection and reads no
clock, so that every rule can be tested by calling it: a *ticket* stands for whoever asked, and comes back
with the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

MAX_STORED_NBYTES = 256 << 20

Ticket = Any
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a rank.

    Attributes:
        kind: "set", "get", "add", "delete" or "gather".
        key: The key, or the gathering's name.
        value: The bytes to set or to contribute.
        amount: What to add.
        timeout_s: How long to wait, in seconds ("get" and "gather").
        group: The ranks concerned, in the order in which a gathering returns their values.
    """

    kind: str
    key: str
    value: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request got.

    Attributes:
        values: The value of "get", or the contributions to a gathering in the order of its group.
        number: The sum after "add"; 1 if "delete" found the key.
        fault: "" if it went well, or why it did not: "died", "left", "timeout", "full", "twice".
        ranks: The ranks at fault, if any.
        detail: More about the fault, in words.
    """

    values: tuple[bytes, ...] = ()
    number: int = 0
    fault: str = ""
    ranks: tuple[int, ...] = ()
    detail: str = ""


@dataclass(slots=True)
class _Wait:
    """A "get" whose key is not there yet."""

    ticket: Ticket
    request: Request
    deadline: float


@dataclass(slots=True)
class _Gathering:
    """A gathering that some have joined: rank -> (ticket, value)."""

    group: Group
    deadline: float
    joined: dict[int, tuple[Ticket, bytes]] = field(default_factory=dict)


Answers = list[tuple[Ticket, Answer]]


class StoreState:
    """Keys, counters and gatherings of one stay of ``size`` ranks.

    Args:
        size: How many ranks the job has.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.present: set[int] = set()
        self.left: set[int] = set()
        self._dead: dict[int, str] = {}
        self._values: dict[str, bytes] = {}
        self._stored_nbytes = 0
        self._counters: dict[str, int] = {}
        self._waits: list[_Wait] = []
        self._gatherings: dict[tuple[Group, str], _Gathering] = {}

    def join(self, rank: int) -> None:
        """A rank is here."""
        self.present.add(rank)

    def leave(self, rank: int) -> Answers:
        """A rank went away in good order. Gatherings that it has yet to join can never be complete."""
        self.present.discard(rank)
        self.left.add(rank)
        answer = Answer(fault="left", ranks=(rank,))
        return self._give_up(lambda group, joined: rank in group and rank not in joined, answer)

    def lose(self, rank: int, detail: str) -> Answers:
        """A rank died: whoever waits is told, and every later request of its peers is refused."""
        if rank in self._dead:
            return []
        self.present.discard(rank)
        self._dead[rank] = detail
        answer = Answer(fault="died", ranks=(rank,), detail=detail)
        answers = self._give_up(lambda group, joined: rank in group, answer)
        orphaned = [wait for wait in self._waits if rank in self._group(wait.request)]
        self._waits = [wait for wait in self._waits if rank not in self._group(wait.request)]
        return answers + [(wait.ticket, answer) for wait in orphaned]

    def submit(self, rank: int, request: Request, ticket: Ticket, now: float) -> Answers:
        """Takes a rank's request.

        Returns:
            The answers that this request set free: its own, others', both or none.
        """
        for dead, detail in self._dead.items():
            if dead in self._group(request):
                return [(ticket, Answer(fault="died", ranks=(dead,), detail=detail))]
        if request.kind == "set":
            return self._set(request, ticket)
        if request.kind == "get":
            return self._get(request, ticket, now)
        if request.kind == "add":
            number = self._counters[request.key] = self._counters.get(request.key, 0) + request.amount
            return [(ticket, Answer(number=number))]
        if request.kind == "delete":
            return [(ticket, Answer(number=self._delete(request.key)))]
        return self._gather(rank, request, ticket, now)

    def expire(self, now: float) -> Answers:
        """Answers whoever has waited too long. A gathering fails for all in it at the first deadline."""
        late = [wait for wait in self._waits if wait.deadline <= now]
        self._waits = [wait for wait in self._waits if wait.deadline > now]
        answers: Answers = [
            (wait.ticket, Answer(fault="timeout", ranks=self._absent(self._group(wait.request))))
            for wait in late
        ]
        for place, gathering in list(self._gatherings.items()):
            if gathering.deadline <= now:
                del self._gatherings[place]
                missing = tuple(rank for rank in gathering.group if rank not in gathering.joined)
                answer = Answer(fault="timeout", ranks=missing)
                answers += [(ticket, answer) for ticket, _ in gathering.joined.values()]
        return answers

    def next_deadline(self) -> float:
        """When ``expire`` has something to do next; infinity if nobody waits."""
        deadlines = [wait.deadline for wait in self._waits]
        deadlines += [gathering.deadline for gathering in self._gatherings.values()]
        return min(deadlines, default=math.inf)

    def _group(self, request: Request) -> Group:
        return tuple(range(self.size)) if request.group is None else request.group

    def _absent(self, group: Group) -> tuple[int, ...]:
        return tuple(rank for rank in group if rank not in self.present)

    def _set(self, request: Request, ticket: Ticket) -> Answers:
        added = len(request.value) - len(self._values.get(request.key, b""))
        if self._stored_nbytes + added > MAX_STORED_NBYTES:
            detail = f"{self._stored_nbytes} bytes of at most {MAX_STORED_NBYTES} are in use"
            return [(ticket, Answer(fault="full", detail=detail))]
        self._stored_nbytes += added
        self._values[request.key] = request.value
        answer = Answer(values=(request.value,))
        served = [wait for wait in self._waits if wait.request.key == request.key]
        self._waits = [wait for wait in self._waits if wait.request.key != request.key]
        return [(ticket, Answer()), *((wait.ticket, answer) for wait in served)]

    def _get(self, request: Request, ticket: Ticket, now: float) -> Answers:
        if request.key in self._values:
            return [(ticket, Answer(values=(self._values[request.key],)))]
        self._waits.append(_Wait(ticket, request, now + request.timeout_s))
        return []

    def _delete(self, key: str) -> int:
        counted = self._counters.pop(key, None)
        value = self._values.pop(key, None)
        self._stored_nbytes -= len(value or b"")
        return int(value is not None or counted is not None)

    def _gather(self, rank: int, request: Request, ticket: Ticket, now: float) -> Answers:
        group = self._group(request)
        place = (group, request.key)
        gathering = self._gatherings.get(place)
        joined = {} if gathering is None else gathering.joined
        if rank in joined:
            return [(ticket, Answer(fault="twice", ranks=(rank,)))]
        gone = tuple(other for other in group if other in self.left and other not in joined)
        if gone:
            return [(ticket, Answer(fault="left", ranks=gone))]
        deadline = now + request.timeout_s
        if gathering is None:
            gathering = self._gatherings[place] = _Gathering(group, deadline)
        gathering.deadline = min(gathering.deadline, deadline)
        gathering.joined[rank] = (ticket, request.value)
        if len(gathering.joined) < len(group):
            return []
        del self._gatherings[place]
        answer = Answer(values=tuple(gathering.joined[member][1] for member in group))
        return [(waiting, answer) for waiting, _ in gathering.joined.values()]

    def _give_up(self, hopeless: Callable[[Group, Collection[int]], bool], answer: Answer) -> Answers:
        """Ends every gathering for which ``hopeless(group, joined)`` holds."""
        answers: Answers = []
        for place, gathering in list(self._gatherings.items()):
            if hopeless(gathering.group, gathering.joined):
                del self._gatherings[place]
                answers += [(ticket, answer) for ticket, _ in gathering.joined.values()]
        return answers
