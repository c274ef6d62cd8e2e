"""What the threads of one job share: the messages on their way, and which ranks wait, ended or failed."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flagcx.errors import ArgumentError
from flagcx.transport.base import TransportContext

STEPS, MESSAGES = range(2)
"""The lanes of a pair of ranks: for the steps of collectives, and for what the ranks send on their own."""
LANES = 2


@dataclass(slots=True, eq=False)
class Sent:
    """A message on its way.

    Attributes:
        call: The call that it belongs to, in words.
        data: The data.
        taken: Whether the sender may use its array again.
    """

    call: str
    data: np.ndarray
    taken: bool


class Room:
    """What the ranks of one communicator share; all of it under ``lock``.

    Attributes:
        wakes: For each rank, what it waits for.
        boxes: The messages to each rank from each that have not been received: of the steps of collectives,
            then those that ranks send on their own.
        changes: How often each rank was told to look again.
        calls: For each call that not all ranks have made yet: its words, a rank that made it, and how many.
        waiting: The ranks that wait, each with the lane of what it waits for.
        closed: How many calls each rank had made that has closed its communicator.
        failed: Why each rank gave up that did, and the rank at fault.
        joined: How many ranks have come.
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.wakes = [threading.Condition(self.lock) for _ in range(size)]
        self.boxes: list[list[list[deque[Sent]]]] = [
            [[deque() for _ in range(size)] for _ in range(size)] for _ in range(LANES)
        ]
        self.changes = [0] * size
        self.calls: dict[int, list] = {}
        self.waiting: set[tuple[int, int]] = set()
        self.closed: dict[int, int] = {}
        self.failed: dict[int, tuple[str, int | None]] = {}
        self.joined = 0

    def wake(self, rank: int) -> None:
        """Lets a rank look again."""
        self.changes[rank] += 1
        self.wakes[rank].notify_all()

    def wake_all(self) -> None:
        """Lets every rank look again."""
        for rank in range(len(self.wakes)):
            self.wake(rank)


@lru_cache(maxsize=1)
def rooms() -> dict[str, Room]:
    """The rooms of this process that not all of their ranks have entered yet."""
    return {}


def enter_room(context: TransportContext) -> Room:
    """Finds the room that rank 0 makes."""
    token = secrets.token_hex(8)
    if context.rank == 0:
        rooms()[token] = Room(context.size)
    try:
        cards = [json.loads(card) for card in context.exchange(json.dumps([os.getpid(), token]).encode())]
    except BaseException:
        rooms().pop(token, None)
        raise
    elsewhere = [(q, pid) for q, (pid, _) in enumerate(cards) if pid != cards[0][0]]
    room = rooms().get(cards[0][1])
    if elsewhere or room is None:
        rooms().pop(token, None)
        q, pid = (elsewhere or [(context.rank, os.getpid())])[0]
        raise ArgumentError(
            f"transport='threads' needs ranks that are threads of one process; rank 0 is in process "
            f"{cards[0][0]}, rank {q} in process {pid}; start them with fc.launch(function, threads=True)"
        )
    with room.lock:
        room.joined += 1
        if room.joined == context.size:
            del rooms()[cards[0][1]]
    return room
