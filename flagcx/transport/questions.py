"""What ranks ask each other of their last calls on GPUs, and what they answer, through the store.

One counter of the store has both the questions so far and the ranks that gave up, so that one look at it
tells of both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from flagcx.bootstrap.store import Store
from flagcx.errors import PeerTimeoutError
from flagcx.transport.compared import compare_last, compare_marks
from flagcx.transport.stream_order import StreamOrder

_ANSWER_S = 1.0
_QUESTION = 1 << 32  # added to the counter of failures
_FINAL = 1 << 30  # the number of a question that the calls of a rank that closes answer
_TOLD_MARKS = 16


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank tells of its calls.

    Attributes:
        captured: Whether a stream was being captured, so that graphs of the caller may replay calls.
        calls: The number of calls.
        last: The last calls: their numbers, and words equal on all ranks.
        marks: Numbers of calls, and what stands for all calls up to there.
    """

    captured: bool
    calls: int
    last: list[tuple[int, str]]
    marks: list[tuple[int, int]]


class Questions:
    """The questions and answers of one rank.

    Args:
        order: The rank's operations.
        store: The communicator's part of the store.
        tick_s: How often to look for answers, in seconds.
    """

    def __init__(self, order: StreamOrder, store: Store, tick_s: float) -> None:
        self._order, self._store, self._tick_s = order, store, tick_s
        self._asked, self._ended = 0, False

    def look(self) -> bool:
        """Answers a question that was asked meanwhile. Returns whether a rank has given up."""
        asked, failures = divmod(self._store.add("nccl/failures", 0), _QUESTION)
        if not failures and asked != self._asked:
            self._answer(asked)
        return bool(failures)

    def _answer(self, question: int) -> None:
        """Lets the other ranks see this rank's last calls."""
        self._asked = question
        told = self.told(self._order.last_calls())
        answer = [_FINAL if self._ended else question, *astuple(told)]
        self._store.set(f"nccl/calls/{self._store.rank}", json.dumps(answer).encode())

    def told(self, last: list[tuple[int, str]]) -> Told:
        """What this rank tells of its calls, with these as the last ones."""
        order, mark = self._order, self._order.mark
        return Told(order.captured, mark[0], last, [*order.marks][-_TOLD_MARKS:] + [mark])

    def ask(self) -> dict[int, Told]:
        """What all ranks that answer in time tell of their calls by now."""
        question = self._store.add("nccl/failures", _QUESTION) // _QUESTION
        self._answer(question)
        return self._answers(question, _ANSWER_S)

    def end(self, limit_s: float) -> dict[int, Told]:
        """What the ranks tell that make no further call either, as far as they do so in time."""
        self._ended = True
        self._answer(self._asked)
        return self._answers(_FINAL, limit_s)

    def _answers(self, question: int, limit_s: float) -> dict[int, Told]:
        """What the ranks that answer in time tell of their calls."""
        end, answers = time.monotonic() + limit_s, {}
        for rank in range(self._store.size):
            while rank not in answers:
                left = end - time.monotonic()
                try:
                    number, *told = json.loads(
                        self._store.get(f"nccl/calls/{rank}", min(max(left, 0.0), self._tick_s))
                    )
                    if number >= question:
                        answers[rank] = unpacked(told)
                        break
                except PeerTimeoutError:
                    pass
                if left <= 0:
                    break
                time.sleep(self._tick_s / 8)
        return answers


def unpacked(told: Sequence) -> Told:
    """What a rank told, from its JSON."""
    captured, calls, last, marks = told
    return Told(captured, calls, [(n, words) for n, words in last], [(n, trail) for n, trail in marks])


def compare(answers: Mapping[int, Told]) -> None:
    """Compares what ranks called, unless only some of them capture, whose graphs replay calls.

    Raises:
        MismatchError: They differ.
    """
    if len({told.captured for told in answers.values()}) == 1:
        compare_last({rank: told.last for rank, told in answers.items()})
        compare_marks({rank: told.marks for rank, told in answers.items()})
