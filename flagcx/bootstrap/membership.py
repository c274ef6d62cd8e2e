"""Which ranks of a job are connected, have left or are lost: the store server's rules, without a socket.

A rank may leave and come back (``init``, ``close``, ``init``): its n-th stay meets the others' n-th stays, in
a ``StoreState`` of their own, so that a rank that has come back never meets one that has yet to leave. Where
a rank's ``init`` fails and its process lives on, that stay is over for all: the ranks in it are told, and who
comes next, late or again, begins with the stay after it. A lost rank cannot come back.
"""

from __future__ import annotations

from typing import Any

from flagcx.bootstrap.store_state import Answers, StoreRequest, StoreState, Ticket


class Membership:
    """The ranks of one job, with a ``StoreState`` for each stay.

    Args:
        size: How many ranks the job has.

    Attributes:
        connected: The process id of each rank that is connected.
        lost: What happened to each rank that is lost.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.connected: dict[int, int] = {}
        self.lost: dict[int, str] = {}
        self._finished: set[int] = set()
        self._gone: dict[int, None] = {}  # ranks that are lost or have finished, the first of them first
        self._stays = [0] * size
        self._states: dict[int, StoreState] = {}
        self._first = 0  # stay that a rank may still join

    @property
    def complete(self) -> bool:
        """Whether all ranks are connected, each for as many times as the others."""
        return len(self.connected) == self.size and len(set(self._stays)) == 1

    def has_left(self, rank: int) -> bool:
        """Whether a rank was connected before, and is not."""
        return self._stays[rank] > 0 and rank not in self.connected

    def refusal(self, rank: int, size: int) -> str:
        """Why a process that knows the key may not join as this rank; "" if it may."""
        if size != self.size or not 0 <= rank < self.size:
            return f"it calls itself rank {rank} of {size}, but this job has {self.size} ranks"
        if rank in self.connected:
            return (
                f"rank {rank} is already connected, from process {self.connected[rank]}; each rank may "
                f"call init once at a time, and a process started by a rank must not inherit its variables"
            )
        if rank in self.lost:
            return f"rank {rank} was lost before ({self.lost[rank]}) and cannot come back"
        return ""

    def observed(self, prefix: str) -> dict[str, Any]:
        """What an observer learns: the ranks that are connected or lost, and values under ``prefix``."""
        values = {
            key: value.decode(errors="replace")
            for state in self._states.values()
            for key, value in state.values_under(prefix).items()
        }
        return {"connected": self.connected, "lost": self.lost, "notes": values}

    def join(self, rank: int, pid: int) -> None:
        """A rank has connected."""
        stay = self._stays[rank] = max(self._stays[rank], self._first)
        if stay not in self._states:
            state = self._states[stay] = StoreState(self.size)
            for other in self._gone:  # what the first did may be why others gave up
                if other in self.lost:
                    state.lose(other, self.lost[other])
                elif other not in self.connected:
                    state.leave(other)
        self._states[stay].present.add(rank)
        self.connected[rank] = pid

    def submit(self, rank: int, request: StoreRequest, ticket: Ticket, now: float) -> Answers:
        """Takes a request of a connected rank; see ``StoreState.submit``."""
        return self._states[self._stays[rank]].submit(rank, request, ticket, now)

    def end_stay(self, rank: int) -> None:
        """A rank's connection has ended."""
        del self.connected[rank]
        self._stays[rank] += 1

    def leave(self, rank: int, why: str = "") -> Answers:
        """A connected rank leaves in good order.

        Args:
            rank: The rank.
            why: The failure of a peer because of which it leaves, if that is so.
        """
        stay = self._stays[rank]
        self.end_stay(rank)
        answers = self._states[stay].leave(rank, why)
        if len(self._states[stay].left) == self.size:
            del self._states[stay]
        self._forget()
        return answers + (self._leave_for_good(rank) if rank in self._finished else [])

    def fail(self, rank: int, how: str) -> Answers:
        """A connected rank could not join, lives on and may try again; the ranks of its stay are told.

        Args:
            rank: The rank.
            how: What happened.
        """
        stay = self._stays[rank]
        self.end_stay(rank)
        self._first = max(self._first, stay + 1)
        answers = self._states[stay].lose(rank, how, "failed")
        self._forget()
        return answers

    def _forget(self) -> None:
        """Forgets stays that no rank is in and none may join any more."""
        peopled = {self._stays[rank] for rank in self.connected}
        for stay in [stay for stay in self._states if stay < self._first and stay not in peopled]:
            del self._states[stay]

    def lose(self, rank: int, how: str, returns: bool = False) -> Answers:
        """A rank died, in its stay or between two; the ranks of every stay are told.

        Args:
            rank: The rank.
            how: What happened.
            returns: Whether its launcher may start it again, where one does.
        """
        self.lost[rank] = how
        self._gone.setdefault(rank)
        return [answer for state in self._states.values() for answer in state.lose(rank, how)]

    def misses(self, rank: int, lost: int) -> bool:
        """Whether a connected rank is in a stay to which the death of another one matters."""
        return self._states[self._stays[rank]].is_dead(lost)

    def finish(self, rank: int) -> Answers:
        """A rank's process ended well, so it will not come again once its connection has ended."""
        self._finished.add(rank)
        self._gone.setdefault(rank)
        return [] if rank in self.connected else self._leave_for_good(rank)

    def expire(self, now: float) -> Answers:
        """Answers requests that have waited too long."""
        return [answer for state in self._states.values() for answer in state.expire(now)]

    def deadlines(self) -> list[float]:
        """When ``expire`` has something to do next, for each stay."""
        return [state.next_deadline() for state in self._states.values()]

    def _leave_for_good(self, rank: int) -> Answers:
        later = (state for stay, state in self._states.items() if stay >= self._stays[rank])
        return [answer for state in later for answer in state.leave(rank)]
