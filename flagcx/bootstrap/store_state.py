"""What a store holds and which ranks wait for what: the rules, without a socket or a clock.

``StoreState`` takes one request after another and answers each when it can, so that every rule can be tested
by a call. A *ticket* stands for the connection that asked, and comes back with the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_STORED_NBYTES = 256 << 20
OBSERVER, NOTES = "observer", "waits/"
"""What a greeting says that asks for one look from outside, and how the keys begin that it shows."""

Ticket = Any
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One call of a rank.

    Attributes:
        kind: "set", "get", "add", "delete", "exchange", "agree" or "expel".
        key: The key, or the name of the exchange or agreement; or why a rank is expelled.
        value: The bytes to set or to contribute.
        amount: What to add, or the rank to expel.
        timeout_s: How long to wait, in seconds ("get", "exchange" and "agree").
        group: The ranks concerned, in the order in which an exchange returns their values.
    """

    kind: str
    key: str
    value: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The store's answer to a request.

    Attributes:
        values: The value of "get", or the contributions to an exchange or agreement, in its group's order.
        number: The sum after "add"; 1 if "delete" found the key.
        fault: "" if it went well, else the reason: "died", "failed", "left", "timeout", "full" or "twice".
        ranks: The ranks at fault, if any; after "agree", those of its group that are gone.
        detail: More about the fault, in words; of a rank that has left, the failure of a peer that made it.
    """

    values: tuple[bytes, ...] = ()
    number: int = 0
    fault: str = ""
    ranks: tuple[int, ...] = ()
    detail: str = ""


@dataclass(slots=True)
class _WaitingGet:
    """A "get" whose key is not set yet."""

    ticket: Ticket
    request: StoreRequest
    deadline: float


@dataclass(slots=True)
class _OpenExchange:
    """An exchange or agreement that some ranks have joined: rank -> (ticket, value)."""

    group: Group
    deadline: float
    joined: dict[int, tuple[Ticket, bytes]] = field(default_factory=dict)


Answers = list[tuple[Ticket, StoreAnswer]]


class StoreState:
    """Keys, counters and exchanges of one stay of ``size`` ranks.

    Args:
        size: How many ranks the job has.

    Attributes:
        present: The ranks that are connected.
        left: The ranks that left in good order, each with the failure of a peer that made it leave, or "".
        agreed: How many agreements were reached.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.present: set[int] = set()
        self.left: dict[int, str] = {}
        self._dead: dict[int, StoreAnswer] = {}
        self._ended: dict[int, None] = {}  # ranks that left or died, the first of them first
        self._values: dict[str, bytes] = {}
        self._stored_nbytes = 0
        self._counters: dict[str, int] = {}
        self._gets: list[_WaitingGet] = []
        self._exchanges: dict[tuple[Group, str], _OpenExchange] = {}
        self._agreements: dict[tuple[Group, str], _OpenExchange] = {}
        self.agreed = 0

    def leave(self, rank: int, why: str = "") -> Answers:
        """A rank left in good order. Exchanges that it has yet to join can never be complete."""
        self.present.discard(rank)
        self.left.setdefault(rank, why)
        self._ended.setdefault(rank)
        answer = StoreAnswer(fault="left", ranks=(rank,), detail=why)
        answers = self._end_exchanges(lambda it: rank in it.group and rank not in it.joined, answer)
        return answers + self.withdraw(rank)

    def withdraw(self, rank: int) -> Answers:
        """A rank's connection ended, whether it is gone or will be back: it takes part in no agreement."""
        self.present.discard(rank)
        for place, agreement in list(self._agreements.items()):
            if agreement.joined.pop(rank, None) and not agreement.joined:
                del self._agreements[place]
        return self._end_agreements()

    def lose(self, rank: int, detail: str, fault: str = "died") -> Answers:
        """A rank died: every waiting rank of its groups is told, and later requests of them are refused.

        With "failed" as the fault it lives, and could not join: the others of this stay cannot go on either.
        """
        if rank in self._dead:
            return []
        self.present.discard(rank)
        answer = self._dead[rank] = StoreAnswer(fault=fault, ranks=(rank,), detail=detail)
        self._ended.setdefault(rank)
        answers = self._end_exchanges(lambda it: rank in it.group, answer)
        answers += self._answer_gets(lambda get: rank in self._group(get.request), lambda _: answer)
        return answers + self.withdraw(rank)

    def is_dead(self, rank: int) -> bool:
        """Whether a rank died, or could not join."""
        return rank in self._dead

    def submit(self, rank: int, request: StoreRequest, ticket: Ticket, now: float) -> Answers:
        """Takes a rank's request.

        Returns:
            The answers that this request set free: its own, others', both or none.
        """
        if request.kind == "agree":
            return self._agree(rank, request, ticket, now)
        group = self._group(request)
        for ended in self._ended:  # what the first did may be why others gave up
            if ended in group and ended in self._dead:
                return [(ticket, self._dead[ended])]
            if ended in group and request.kind == "exchange" and not self._has_joined(ended, request):
                return [(ticket, StoreAnswer(fault="left", ranks=(ended,), detail=self.left[ended]))]
        if request.kind == "set":
            return self._set(request, ticket)
        if request.kind == "get":
            if request.key in self._values:
                return [(ticket, StoreAnswer(values=(self._values[request.key],)))]
            self._gets.append(_WaitingGet(ticket, request, now + request.timeout_s))
            return []
        if request.kind == "add":
            number = self._counters[request.key] = self._counters.get(request.key, 0) + request.amount
            return [(ticket, StoreAnswer(number=number))]
        if request.kind == "delete":
            return [(ticket, StoreAnswer(number=self._delete(request.key)))]
        return self._exchange(rank, request, ticket, now)

    def _has_joined(self, rank: int, request: StoreRequest) -> bool:
        exchange = self._exchanges.get((self._group(request), request.key))
        return exchange is not None and rank in exchange.joined

    def expire(self, now: float) -> Answers:
        """Answers requests that waited too long. An exchange fails as a whole at its first deadline, and so
        does an agreement."""

        def late(get: _WaitingGet) -> StoreAnswer:
            absent = (rank for rank in self._group(get.request) if rank not in self.present)
            return StoreAnswer(fault="timeout", ranks=tuple(absent))

        answers = self._answer_gets(lambda get: get.deadline <= now, late)
        for place, exchange in list(self._exchanges.items()):
            if exchange.deadline <= now:
                missing = tuple(rank for rank in exchange.group if rank not in exchange.joined)
                answers += self._end_exchange(place, StoreAnswer(fault="timeout", ranks=missing))
        for place, agreement in list(self._agreements.items()):
            if agreement.deadline <= now:
                answer = StoreAnswer(fault="timeout", ranks=self._awaited(agreement))
                answers += _answer_all(self._agreements.pop(place), answer)
        return answers

    def values_under(self, prefix: str) -> dict[str, bytes]:
        """The values of all keys that begin with ``prefix``."""
        return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    def next_deadline(self) -> float:
        """When ``expire`` has something to do next; infinity if no rank waits."""
        deadlines = [get.deadline for get in self._gets]
        deadlines += [exchange.deadline for exchange in self._exchanges.values()]
        deadlines += [agreement.deadline for agreement in self._agreements.values()]
        return min(deadlines, default=math.inf)

    def _group(self, request: StoreRequest) -> Group:
        return tuple(range(self.size)) if request.group is None else request.group

    def _set(self, request: StoreRequest, ticket: Ticket) -> Answers:
        added = len(request.value) - len(self._values.get(request.key, b""))
        if self._stored_nbytes + added > MAX_STORED_NBYTES:
            detail = f"{self._stored_nbytes} bytes of at most {MAX_STORED_NBYTES} are in use"
            return [(ticket, StoreAnswer(fault="full", detail=detail))]
        self._stored_nbytes += added
        self._values[request.key] = request.value
        answer = StoreAnswer(values=(request.value,))
        return [
            (ticket, StoreAnswer()),
            *self._answer_gets(lambda get: get.request.key == request.key, lambda _: answer),
        ]

    def _delete(self, key: str) -> int:
        counted = self._counters.pop(key, None)
        value = self._values.pop(key, None)
        self._stored_nbytes -= len(value or b"")
        return int(value is not None or counted is not None)

    def _exchange(self, rank: int, request: StoreRequest, ticket: Ticket, now: float) -> Answers:
        group, deadline = self._group(request), now + request.timeout_s
        place = (group, request.key)
        exchange = self._exchanges.get(place) or _OpenExchange(group, deadline)
        if rank in exchange.joined:
            return [(ticket, StoreAnswer(fault="twice", ranks=(rank,)))]
        self._exchanges[place] = exchange
        exchange.deadline = min(exchange.deadline, deadline)
        exchange.joined[rank] = (ticket, request.value)
        if len(exchange.joined) < len(group):
            return []
        return self._end_exchange(
            place, StoreAnswer(values=tuple(exchange.joined[member][1] for member in group))
        )

    def _agree(self, rank: int, request: StoreRequest, ticket: Ticket, now: float) -> Answers:
        """Joins an agreement, which is complete when every rank of its group has joined or is gone.

        All that have joined get the same answer, whichever of them dies next.
        """
        place = (self._group(request), request.key)
        agreement = self._agreements.setdefault(place, _OpenExchange(place[0], math.inf))
        if rank in agreement.joined:
            return [(ticket, StoreAnswer(fault="twice", ranks=(rank,)))]
        agreement.deadline = min(agreement.deadline, now + request.timeout_s)
        agreement.joined[rank] = (ticket, request.value)
        return self._end_agreements()

    def _awaited(self, agreement: _OpenExchange) -> Group:
        """The ranks that an agreement waits for."""
        present = (rank for rank in agreement.group if rank not in self._dead and rank not in self.left)
        return tuple(rank for rank in present if rank not in agreement.joined)

    def _end_agreements(self) -> Answers:
        """Ends the agreements that are complete."""
        answers: Answers = []
        for place, agreement in list(self._agreements.items()):
            if not self._awaited(agreement):
                gone = tuple(rank for rank in agreement.group if rank not in agreement.joined)
                values = tuple(agreement.joined[rank][1] for rank in agreement.group if rank not in gone)
                answers += _answer_all(self._agreements.pop(place), StoreAnswer(values=values, ranks=gone))
                self.agreed += 1
        return answers

    def _answer_gets(
        self, chosen: Callable[[_WaitingGet], bool], answer: Callable[[_WaitingGet], StoreAnswer]
    ) -> Answers:
        """Ends every waiting "get" that ``chosen`` holds for."""
        ended = [get for get in self._gets if chosen(get)]
        self._gets = [get for get in self._gets if not chosen(get)]
        return [(get.ticket, answer(get)) for get in ended]

    def _end_exchanges(self, chosen: Callable[[_OpenExchange], bool], answer: StoreAnswer) -> Answers:
        """Ends every exchange that ``chosen`` holds for."""
        ended = [place for place, exchange in self._exchanges.items() if chosen(exchange)]
        return [pair for place in ended for pair in self._end_exchange(place, answer)]

    def _end_exchange(self, place: tuple[Group, str], answer: StoreAnswer) -> Answers:
        return _answer_all(self._exchanges.pop(place), answer)


def _answer_all(ended: _OpenExchange, answer: StoreAnswer) -> Answers:
    return [(ticket, answer) for ticket, _ in ended.joined.values()]
