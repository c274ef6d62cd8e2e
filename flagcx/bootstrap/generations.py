"""The members of a job whose ranks may die and come back, generation by generation.

A launcher that starts lost ranks again tells the store, which then knows what a connection that ends does not
say: whether the rank will be back. Each generation has a ``StoreState`` of its own::

    generation 1   ranks 0 1 2 3    formed: rank 2 dies, and the ranks that wait for it are told
    generation 2   ranks 0 1 . 3    forming: the ranks that call init wait for all that live or will be back
                   ranks 0 1 2 3    rank 2 was started again and has come: formed, by an agreement of all

A rank that dies while a generation forms is waited for if it is started again, and left out if it is not.
"""

from __future__ import annotations

from flagcx.bootstrap.membership import Membership
from flagcx.bootstrap.store_state import Answers, StoreRequest, Ticket


class Generations(Membership):
    """The ranks of one job that its launcher may start again. Its ``lost`` are those that it will not.

    Args:
        size: How many ranks the job has at most.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._forming = 0

    def join(self, rank: int, pid: int) -> None:
        """A rank has connected, and belongs to the generation that is forming."""
        self._stays[rank] = self._forming
        super().join(rank, pid)

    def submit(self, rank: int, request: StoreRequest, ticket: Ticket, now: float) -> Answers:
        """Takes a request of a connected rank; see ``StoreState.submit``."""
        return self._formed(super().submit(rank, request, ticket, now))

    def end_stay(self, rank: int) -> None:
        """A rank's connection has ended."""
        del self.connected[rank]

    def leave(self, rank: int, why: str = "") -> Answers:
        """A connected rank leaves in good order; while a generation forms, it may well be back for it."""
        if self._stays[rank] < self._forming:
            return self._formed(super().leave(rank, why))
        self.end_stay(rank)
        gone = self._leave_for_good(rank) if rank in self._finished else []
        return self._formed(self._states[self._forming].withdraw(rank) + gone)

    def lose(self, rank: int, how: str, returns: bool = True) -> Answers:
        """A rank died: generations that have formed go without it, the one that forms waits if it returns."""
        if not returns:
            self.lost[rank] = how
            self._gone.setdefault(rank)
        answers: Answers = []
        for generation, state in list(self._states.items()):
            if generation < self._forming or not returns:
                answers += state.lose(rank, how)
            else:
                answers += state.withdraw(rank)
        return self._formed(answers)

    def fail(self, rank: int, how: str) -> Answers:
        """A connected rank could not join, lives on and may try again: in the generation that forms."""
        self.end_stay(rank)
        return self.lose(rank, how)

    def finish(self, rank: int) -> Answers:
        """A rank's process ended well, so it will not come again once its connection has ended."""
        return self._formed(super().finish(rank))

    def _leave_for_good(self, rank: int) -> Answers:
        return [answer for state in self._states.values() for answer in state.leave(rank)]

    def _formed(self, answers: Answers) -> Answers:
        """Notes that the generation has formed once its ranks have agreed; forgets those without ranks."""
        if self._forming in self._states and self._states[self._forming].agreed:
            self._forming += 1
        peopled = {self._stays[rank] for rank in self.connected} | {self._forming}
        self._states = {stay: state for stay, state in self._states.items() if stay in peopled}
        return answers
