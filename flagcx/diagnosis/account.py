"""What a flight record says, in words: what ended the job, which rank did not come, where ranks part ways."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagcx.diagnosis import flight_record
from flagcx.diagnosis.explain import SAME_ORDER, Explanation, explain, name_ranks
from flagcx.diagnosis.state import RankState
from flagcx.errors import ArgumentError

_CONSEQUENCES = ("AbortedError", "PeerDiedError")
_OWN_ERRORS = (*_CONSEQUENCES, "PeerTimeoutError", "MismatchError", "CommunicationError")
_WITHOUT_ERROR = ("asked", "SIGUSR2")
_MOST_LINES, _MOST_PLACES = 12, 4

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Account:
    """What a flight record says.

    Attributes:
        headline: The job, in a line.
        sentences: In words, the most important first.
        explanation: Which rank waits for which.
        states: Where each rank was, in rank order.
        places: For each rank, where its threads were in the user's program, the main thread first.
    """

    headline: str
    sentences: list[str]
    explanation: Explanation
    states: list[RankState]
    places: dict[int, list[str]]


def account(*paths: Path) -> Account:
    """Reads a flight record, of which each host of the job may have its own part.

    Raises:
        ArgumentError: A file is none, or they are of different jobs.
    """
    parts = [flight_record.read(path) for path in paths]
    names = {part.get("job") for part in parts}
    if len(names) > 1:
        raise ArgumentError(f"the files are of different jobs: {', '.join(sorted(map(str, names)))}")
    records = [record for part in parts for record in part["records"]]
    try:
        return _account({**parts[0], "records": records})
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ArgumentError(
            f"{paths[0]} is a flight record of another version of flagcx ({problem})"
        ) from None


def _account(found: Mapping[str, Any]) -> Account:
    records = sorted(found["records"], key=lambda record: record["at"])
    last = {record["rank"]: record for record in records}
    states = _states(records, last)
    hosts = found.get("hosts", {})
    seen = {hosts.get(str(record["rank"])) for record in records}
    elsewhere = [int(rank) for rank, host in hosts.items() if host not in seen]
    explanation = explain(found["size"], list(states.values()), elsewhere)
    places = {rank: _places(record) for rank, record in last.items()}
    sentences = [*_signals(records), *_end(records)]
    parted = _parting(last)
    sentences += parted or explanation.sentences
    suspects = sorted({*explanation.culprits, *(r for circle in explanation.circles for r in circle)})
    sentences += [f"rank {rank} stands {'; '.join(places[rank])}." for rank in suspects if places.get(rank)]
    without = [rank for rank in range(found["size"]) if rank not in last]
    if without:
        have = "has" if len(without) == 1 else "have"
        sentences.append(f"{name_ranks(without)} {have} left no record.")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(records[-1]["at"]))
    headline = f"{found['job']}: {found['script']}, {found['size']} ranks, recorded {when}"
    return Account(headline, sentences, explanation, [states[rank] for rank in sorted(states)], places)


def _states(records: Sequence[Record], last: Mapping[int, Record]) -> dict[int, RankState]:
    """Where each rank was by its own record, or else as another rank saw it last."""
    seen = [RankState.from_dict(state) for record in records for state in record.get("others", [])]
    states = {state.rank: state for state in seen}
    return states | {rank: RankState.from_dict(record["state"]) for rank, record in last.items()}


def _end(records: Sequence[Record]) -> list[str]:
    """The error that came first, unless it follows from another."""
    errors = [record for record in records if record["reason"] not in _WITHOUT_ERROR]
    if not errors:
        ranks = name_ranks(r["rank"] for r in records)
        reason = "SIGUSR2" if any(r["reason"] == "SIGUSR2" for r in records) else "a rank asked"
        return [f"There was no error: {ranks} {'was' if len(records) == 1 else 'were'} recorded ({reason})."]
    first = min(errors, key=lambda record: (record["reason"] in _CONSEQUENCES, record["at"]))
    when = time.strftime("%H:%M:%S", time.localtime(first["at"]))
    text = first["error"].splitlines()[0] if first["error"] else ""
    sentences = [f"rank {first['rank']} failed first, at {when}: {first['reason']}: {text}"]
    if first["traceback"] and first["reason"] not in _OWN_ERRORS:
        sentences += ["    " + line for line in first["traceback"].splitlines()[-_MOST_LINES:]]
    return sentences


def _signals(records: Sequence[Record]) -> list[str]:
    """The ranks that a signal ended, with what they were doing."""
    ended = {rank: text for r in records for rank, text in r.get("ended_by_signal", {}).items()}
    sentences = []
    for rank, text in ended.items():
        lines = [line for line in text.splitlines() if line.strip()][:_MOST_LINES]
        sentences.append(f"rank {rank} was ended by a signal: {lines[0] if lines else 'which is not known'}")
        sentences += ["    " + line for line in lines[1:]]
    return sentences


def _places(record: Record) -> list[str]:
    """Where threads are in the user's program: the innermost frame outside flagcx and Python's own files."""
    places: list[str] = []
    for thread in record["threads"]:
        frames = thread["frames"]
        users = [frame for frame in frames if not frame["own"] and "/lib/python" not in frame["file"]]
        if users and len(places) < _MOST_PLACES:
            frame, name = users[-1], thread["name"]
            text = f": {frame['text']}" if frame["text"] else ""
            where = f"at {frame['file']}:{frame['line']} in {frame['function']}{text}"
            places.append(where if thread is record["threads"][0] else f"its thread {name} {where}")
    return places


def _parting(last: Mapping[int, Record]) -> list[str]:
    """Where ranks of a communicator part ways: the first call, of those recorded, that is not the same."""
    sentences = []
    histories: dict[tuple, dict[int, dict[int, str]]] = {}
    for rank, record in last.items():
        for communicator in record["communicators"]:
            for kind in ("calls", "gpu_calls"):
                calls = {number: words for number, words in communicator.get(kind, [])}
                if not calls:
                    calls = _recorded(communicator) if kind == "calls" else {}
                place = communicator["name"], tuple(communicator["ranks"]), kind
                histories.setdefault(place, {})[rank] = calls
    for (name, _, _), calls_of in histories.items():
        for number in sorted({n for calls in calls_of.values() for n in calls}):
            said: dict[str, list[int]] = {}
            for rank, calls in sorted(calls_of.items()):
                if number in calls:
                    said.setdefault(calls[number], []).append(rank)
            if len(said) > 1:
                parts = "; ".join(f"{name_ranks(ranks)} called {words}" for words, ranks in said.items())
                where = f"Ranks part ways at call {number} of communicator {name}: {parts}"
                sentences.append(f"{where}; {SAME_ORDER}, with the same count, dtype, operation and root.")
                break
    return sentences


def _recorded(communicator: Mapping[str, Any]) -> dict[int, str]:
    """The calls of all ranks that the profiler recorded, where the transport keeps no words of them."""
    return {
        sequence: f"{name} of {nbytes:,} bytes of {dtype} ({algorithm})"
        for sequence, name, dtype, algorithm, nbytes, *_ in communicator.get("records", [])
        if sequence > 0
    }
