"""Ranks that kill themselves, or do worse, at a chosen place: before or after the n-th call of a function."""

from __future__ import annotations

import functools
import importlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

IN_CALLS = (
    "transport.shared_memory.signals:Signals.wait_for",
    "transport.shared_memory.one_shot:OneShot.run",
    "transport.shared_memory.two_shot:TwoShotSlots.finish",
    "transport.shared_memory.one_piece:OnePiece.finish",
    "transport.shared_memory.direct:Direct._work",
    "transport.shared_memory.in_place:InPlace._finish",
    "transport.shared_memory.pulled:Pulled._take",
    "transport.shared_memory.channel:Sending.advance",
    "transport.shared_memory.channel:Receiving.advance",
    "executor.point_to_point:PointToPoint._advance",
)
IN_JOINING = (
    "bootstrap.store:Store.agree",
    "bootstrap.store:Store.exchange",
    "transport.shared_memory.segment:Segment.create",
    "transport.shared_memory.segment:Segment.attach",
    "transport.shared_memory.arena:Arena._exchange_cards",
    "transport.shared_memory.arena:Arena._agree_on_cross_memory",
    "transport.shared_memory.signals:Signals.close",
)

IN_TAKEOVER = (
    *IN_JOINING,
    "bootstrap.remote_store:RemoteStore.recover",
    "bootstrap.remote_store:RemoteStore._connect",
    "bootstrap.takeover:Standby.serve",
)


class Kill(NamedTuple):
    """Where a rank dies.

    Attributes:
        place: A function of the package, as "module:Class.method".
        number: In which of its calls from now on.
        after: Whether after that call, else before it.
    """

    place: str
    number: int
    after: bool

    @classmethod
    def at_random(cls, places: tuple[str, ...], chance: random.Random) -> Kill:
        """Chooses a place, often in its first calls."""
        return cls(chance.choice(places), chance.choice([1, 1, 2, 3, 5]), chance.random() < 0.5)


def die() -> None:
    """Ends this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(kill: Kill, act: Callable[[], object] = die) -> None:
    """From now on this process dies at a place, or does there what ``act`` does, once."""
    module_name, _, path = kill.place.partition(":")
    owner_name, _, name = path.partition(".")
    owner = getattr(importlib.import_module(f"flagcx.{module_name}"), owner_name)
    original = owner.__dict__[name]
    calls = 0

    def counted(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        here = calls == kill.number
        if here and not kill.after:
            act()
        result = run(*args, **kwargs)
        if here and kill.after:
            act()
        return result

    if isinstance(original, classmethod):
        bound = getattr(owner, name)
        setattr(owner, name, staticmethod(functools.partial(counted, bound)))
    else:

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return counted(original, self, *args, **kwargs)

        setattr(owner, name, method)
