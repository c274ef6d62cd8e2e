"""Where one rank is: the calls it made in each communicator, and what it waits for."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from flagcx.diagnosis.processes import GONE
from flagcx.transport.shared_memory.peek import SegmentState, peek
from flagcx.transport.shared_memory.segment import Handle
from flagcx.transport.waits import ON_GPU, ON_HOST

ANY_NUMBER = 1 << 16
"""The numbers of calls in shared memory are known modulo this."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come in one communicator, with one kind of array.

    Attributes:
        communicator: Its name in messages.
        ranks: Its ranks, by their numbers in the job.
        on_gpu: Whether this is about arrays on GPUs.
        calls: How many calls of all ranks it has made, modulo 65536; None where that is not known.
        last: The last of them, in words; "" for none.
        waits_in: The call that waits, in words; "" where none does.
        waits_for: The rank of the job that it waits for, if that is known.
        waited_s: For how long it has, in seconds.
    """

    communicator: str
    ranks: tuple[int, ...]
    on_gpu: bool
    calls: int | None
    last: str
    waits_in: str = ""
    waits_for: int | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankState:
    """Where one rank is.

    Attributes:
        rank: The rank.
        host: The name of its host.
        process: Its process, as that host numbers it; 0 where it is not known.
        doing: What the process does, in words that follow its name; "" where that cannot be seen.
        joining: Whether it is still in ``fc.init()``.
        gave_up: Why it gave up; "" where it has not.
        progress: What it does in each communicator.
    """

    rank: int
    host: str
    process: int
    doing: str
    joining: bool
    gave_up: str
    progress: tuple[Progress, ...]

    @property
    def wait(self) -> Progress | None:
        """The longest wait that it is in; None where it is in none."""
        return max((p for p in self.progress if p.waits_in), key=lambda p: p.waited_s, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RankState:
        """The reverse of ``to_dict``.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is of another type.
        """
        progress = tuple(Progress(**{**p, "ranks": tuple(p["ranks"])}) for p in fields["progress"])
        return cls(**{**fields, "progress": progress})


def state_of(page: Mapping[str, Any], process: int, doing: str) -> RankState:
    """Puts together what a rank shows.

    Args:
        page: What its page says.
        process: Its process, as this one numbers it.
        doing: What the process does, in words.
    """
    progress, reasons = [], []
    for fields in page["communicators"]:
        seen = None
        if "segment" in fields:
            seen = peek(Handle(*fields["segment"]), process, len(fields["ranks"]))
        if seen is not None:
            progress += _in_shared_memory(fields, seen)
            reasons += [seen.reason] if seen.reason else []
        progress += _noted(fields, seen)
    joining = page.get("phase") == "init"
    host = page["host"].partition("/")[0]
    return RankState(page["rank"], host, process, doing, joining, "; ".join(reasons), tuple(progress))


def _in_shared_memory(fields: Mapping[str, Any], seen: SegmentState) -> list[Progress]:
    name, ranks, now = fields["name"], tuple(fields["ranks"]), time.monotonic()
    number, last = seen.calls[-1] if seen.calls else (-1, "")
    progress = Progress(name, ranks, False, (number + 1) % ANY_NUMBER, last)
    return [
        replace(
            progress,
            waits_in=f"a {wait.message}" if wait.message else last,
            waits_for=ranks[wait.peer],
            waited_s=now - wait.since_ns / 1e9,
        )
        for wait in seen.waits
    ] or [progress]


def _noted(fields: Mapping[str, Any], seen: SegmentState | None) -> list[Progress]:
    """What the page itself notes: waits, how many calls there were, and how far the GPU has come."""
    name, ranks, gpu = fields["name"], tuple(fields["ranks"]), fields.get("gpu")
    waits, counts, now = fields.get("waits", {}), fields.get("counts", {}), time.monotonic()
    found = []
    for kind, note in waits.items():
        if (gpu if kind == ON_GPU else seen) is not None:
            continue  # is told below, or by the words in shared memory
        calls = counts[kind] % ANY_NUMBER if kind in counts else None
        call, waited_s = note["call"], now - note["since"]
        found.append(Progress(name, ranks, kind == ON_GPU, calls, call, call, note["for"], waited_s))
    if gpu is not None:
        calls, last = gpu["calls"] % ANY_NUMBER, gpu["what"] if gpu["issued"] else ""
        progress = Progress(name, ranks, True, calls, last)
        if gpu["since"] is not None:
            awaited, waited_s = waits.get(ON_GPU, {}).get("for"), now - gpu["since"]
            progress = replace(progress, waits_in=last, waits_for=awaited, waited_s=waited_s)
        found.append(progress)
    if seen is None and not waits.keys() - {ON_GPU} and counts.get(ON_HOST):
        found.append(Progress(name, ranks, False, counts[ON_HOST] % ANY_NUMBER, ""))
    return found


def noted_state(rank: int, host: str, found: Mapping[str, Any]) -> RankState:
    """Where a rank on another host is, by what the job's store knows; see ``observe``."""
    progress = []
    for key, text in found["notes"].items():
        _, owner, kind = key.split("/", 2)
        if owner == str(rank):
            note = json.loads(text)
            calls = note["counts"].get(kind, 0) % ANY_NUMBER
            place = note["communicator"], tuple(note["ranks"]), kind == ON_GPU
            waited_s = time.time() - note["since"]
            call = note["call"]
            progress.append(Progress(*place, calls, call, call, note["for"], waited_s))
    lost = str(rank) in found["lost"]
    process = found["connected"].get(str(rank), 0)
    doing = GONE if lost else ""
    return RankState(rank, host.partition("/")[0], process, doing, False, "", tuple(progress))
