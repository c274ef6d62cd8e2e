"""Measured times of candidates on one machine: the table, its file, and what it must fit.

A file is one JSON object: ``format``, ``fits`` (machine, ranks, transport, versions, settings, hosts)
and ``measured``, which has a list of sizes for each collective, each with the times of the candidates.
"""

from __future__ import annotations

import json
import math
import os
import platform
import zlib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flagcx._version import __version__
from flagcx.algorithms.candidate import Candidate
from flagcx.config import cache_directory
from flagcx.errors import ArgumentError
from flagcx.limits import explained
from flagcx.schedule.collectives import COLLECTIVES

FORMAT = 1
_MOST_FILE_NBYTES = 16 << 20
_TIE = 0.1
"""Times that differ by less than this part are ties."""
WIDEST_TIE = 0.3
"""So are those that differ by less than rounds lay apart, up to this part."""
_WORST = 2.0
"""A candidate counts as so many times slower than the fastest where it was not measured, and at most."""
_LINKS = {"latency_us": 8.0, "bandwidth_gb_per_s": 4.0}
"""What messages take between hosts, and by what factors that may differ on the same links, on busy hosts."""
_REACH = 4
"""How far beyond the measured sizes the table still speaks, as a factor."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a table holds.

    Attributes:
        machine: The processor, and how many cores this process may use.
        ranks: Number of ranks.
        transport: Name of the transport.
        versions: Of flagcx, NumPy and Python.
        settings: Those of the transport that change its speed.
        hosts: Of several hosts their ``groups`` of ranks, and once the links are measured their ``machines``
            and what messages take, as ``latency_us`` and ``bandwidth_gb_per_s``. Empty on one host.
    """

    machine: Mapping[str, Any]
    ranks: int
    transport: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    hosts: Mapping[str, Any] = field(default_factory=dict)

    def difference(self, other: Fit) -> str:
        """Says in what ``other`` differs; empty if in nothing."""
        for name in ("ranks", "transport", "machine", "versions", "settings"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"it was measured with {name} {mine}, here it is {theirs}"
        return _difference_of_hosts(self.hosts, other.hosts)


def _difference_of_hosts(measured: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """In what hosts differ from those of a table, as far as it is known of them; empty if in nothing."""
    if measured.get("groups") != here.get("groups"):
        groups, others = (found.get("groups", "one host") for found in (measured, here))
        return f"it was measured with these ranks on each host: {groups}, here they are: {others}"
    if measured.get("machines") != here.get("machines", measured.get("machines")):
        return f"it was measured with hosts {measured.get('machines')}, here they are {here['machines']}"
    for name, factor in _LINKS.items():
        mine, theirs = (max(found.get(name, 0.0), 1e-9) for found in (measured, here))
        if name in here and not 1 / factor <= mine / theirs <= factor:
            return f"it was measured with {mine:g} as {name} between hosts, here it is {theirs:g}"
    return ""


def fit_here(
    ranks: int, transport: str, settings: Mapping[str, Any], hosts: Mapping[str, Any] | None = None
) -> Fit:
    """What a table must fit in this process.

    Args:
        ranks: Number of ranks.
        transport: Name of the transport.
        settings: Those of the transport that change its speed.
        hosts: What is known of the hosts, where there are several; see ``Fit.hosts``.
    """
    return Fit(machine_here(), ranks, transport, versions_here(), dict(settings), hosts or {})


def machine_here() -> dict[str, Any]:
    """The processor of this host, and how many cores this process may use."""
    return {
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _processor() -> str:
    try:
        with explained("the processor's name cannot be read"), open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def versions_here() -> dict[str, str]:
    """The versions that every table depends on."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"flagcx": __version__, "numpy": np.__version__, "python": python}


@dataclass(frozen=True, slots=True)
class Point:
    """The candidates' times at one size.

    Attributes:
        nbytes: Bytes of the message, or of one block where the collective has blocks.
        times_us: Time of each candidate that was measured, in us.
        spread: By what part of the time the rounds of the fastest lay apart: between quartiles.
    """

    nbytes: int
    times_us: Mapping[Candidate, float]
    spread: float = 0.0


Ranked = tuple[Candidate, float]
"""A candidate and its time in us."""


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times.

    Attributes:
        fit: Where they hold.
        measured: For each collective its points, smallest first.
    """

    fit: Fit
    measured: Mapping[str, tuple[Point, ...]]

    def times(self, collective: str, nbytes: int) -> dict[Candidate, float]:
        """The time of each candidate at a size, in us; empty where the table says nothing.

        Between two measured sizes a time lies on the straight line between the two in a plot with
        logarithmic axes. Candidates that were measured on one side alone are left out there.

        Args:
            collective: Name of the collective.
            nbytes: Bytes of the message or block.
        """
        points = self.measured.get(collective, ())
        if not points or not points[0].nbytes / _REACH <= nbytes <= points[-1].nbytes * _REACH:
            return {}
        right = bisect_left([point.nbytes for point in points], nbytes)
        if right == 0 or right == len(points):
            return dict(points[min(right, len(points) - 1)].times_us)
        low, high = points[right - 1], points[right]
        share = math.log(nbytes / low.nbytes) / math.log(high.nbytes / low.nbytes)
        between = {
            candidate: time_us ** (1 - share) * high.times_us[candidate] ** share
            for candidate, time_us in low.times_us.items()
            if candidate in high.times_us
        }
        return between or dict(high.times_us if share > 0.5 else low.times_us)

    def rank(
        self,
        collective: str,
        nbytes: int,
        serving: Callable[[Candidate], bool],
        within: float = math.inf,
    ) -> list[Ranked]:
        """The candidates for a size with their times in us, the best first.

        Of those that cannot be told from the fastest, the best is the one that does best at the sizes around,
        too: a table has many points, and at some of them chance decides between equals.

        Args:
            collective: Name of the collective.
            nbytes: Bytes of the message or block.
            serving: Whether a candidate can serve the call; asked of the fastest first, and of few.
            within: Candidates slower than the fastest by more than this factor are left out.
        """
        ranked: list[Ranked] = []
        times = self.times(collective, nbytes) if nbytes > 0 else {}
        for us, one in sorted([(us, one) for one, us in times.items()]):
            if ranked and us > within * ranked[0][1]:
                break
            if serving(one):
                ranked.append((one, us))
        if len(ranked) < 2:
            return ranked
        around = self._around(collective, nbytes)
        fastest = ranked[0][1]
        limit = fastest * (1 + min(max(_TIE, *(point.spread for point in around)), WIDEST_TIE))
        tied = [pair for pair in ranked if pair[1] <= limit]
        if len(tied) > 1:
            able = {one for one, _ in ranked}
            scores = [2 * math.log(us / fastest) for _, us in tied]
            for point in around:
                there = sorted([(us, one) for one, us in point.times_us.items()])
                least = next((us for us, one in there if one in able or serving(one)), 1.0)
                for i, (one, _) in enumerate(tied):
                    scores[i] += math.log(min(point.times_us.get(one, math.inf) / least, _WORST))
            ranked.insert(0, ranked.pop(scores.index(min(scores))))
        return ranked

    def _around(self, collective: str, nbytes: int) -> tuple[Point, ...]:
        """The points next to a size, two on each side."""
        points = self.measured[collective]
        right = bisect_left([point.nbytes for point in points], nbytes)
        return points[max(right - 2, 0) : right + 2]

    def to_json(self) -> str:
        """The table as the text of its file."""
        measured = {
            collective: [
                {
                    "nbytes": point.nbytes,
                    "spread": round(point.spread, 3),
                    "times": [
                        {
                            "algorithm": one.label,
                            "piece_nbytes": one.piece_nbytes,
                            "protocol": one.protocol,
                            "time_us": round(us, 3),
                        }
                        for one, us in point.times_us.items()
                    ],
                }
                for point in points
            ]
            for collective, points in self.measured.items()
        }
        return json.dumps({"format": FORMAT, "fits": asdict(self.fit), "measured": measured}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Reads the text of a file.

        Raises:
            ArgumentError: It is no table; the message says what is wrong.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"it is not JSON: {error}") from None
        data = _check(data, dict, "the file")
        if data.get("format") != FORMAT:
            raise ArgumentError(f"its format is {data.get('format')!r}, expected {FORMAT}")
        fits, measured = _take(data, "fits", dict), _take(data, "measured", dict)
        kinds = {"machine": dict, "ranks": int, "transport": str, "versions": dict, "settings": dict}
        values = {name: _take(fits, name, kind, least=1) for name, kind in kinds.items()}
        fit = Fit(**values, hosts=_read_hosts(fits))
        known: dict[Candidate, Candidate] = {}
        return cls(fit, {name: _read_points(name, points, known) for name, points in measured.items()})


def _check(value: Any, kind: Any, what: str, least: float = 0) -> Any:
    """Returns a value from a file, which is not trusted, if it is of a kind: a type as JSON has them."""
    good = isinstance(value, (int, float) if kind is float else kind)
    if kind in (int, float):
        good = good and not isinstance(value, bool) and math.isfinite(value) and value >= least
    if not good or (kind is str and len(value) > 200):
        number = f"number from {least:g} up"
        kinds = {dict: "an object", list: "a list", str: "a short text", float: f"a {number}"}
        expected = kinds.get(kind, f"a whole {number}")
        raise ArgumentError(f"{what} is {_short(value)}, expected {expected}")
    return value


def _take(source: Mapping[str, Any], name: str, kind: Any, of: str = "", least: float = 0) -> Any:
    return _check(source.get(name), kind, f"{name} of {of}" if of else name, least)


def _read_hosts(fits: Mapping[str, Any]) -> dict[str, Any]:
    """``Fit.hosts``, which a table of one host need not have."""
    found = _check(fits.get("hosts", {}), dict, "hosts")
    for name in {"groups", "machines"} & found.keys():
        _take(found, name, list, "hosts")
    for name in _LINKS.keys() & found.keys():
        _take(found, name, float, "hosts")
    return found


def _read_points(collective: str, value: Any, known: dict[Candidate, Candidate]) -> tuple[Point, ...]:
    """The points of a collective; each candidate is one object, which makes it quick to look up."""
    if collective not in COLLECTIVES:
        raise ArgumentError(f"{_short(collective)} is no collective; expected {', '.join(COLLECTIVES)}")
    points: list[Point] = []
    for entry in _check(value, list, collective):
        entry = {"spread": 0.0, **_check(entry, dict, f"a size of {collective}")}
        nbytes = _take(entry, "nbytes", int, collective, least=1)
        what = f"{collective} of {nbytes:,} bytes"
        times = {}
        for time in _take(entry, "times", list, what):
            candidate = _read_candidate(collective, _check(time, dict, f"a time of {what}"), what)
            times[known.setdefault(candidate, candidate)] = _take(time, "time_us", float, what, least=1e-3)
        if not times:
            raise ArgumentError(f"{what} has no times")
        if points and nbytes <= points[-1].nbytes:
            raise ArgumentError(f"the sizes of {collective} do not grow from one to the next")
        points.append(Point(nbytes, times, _take(entry, "spread", float, what)))
    return tuple(points)


def _read_candidate(collective: str, time: Mapping[str, Any], what: str) -> Candidate:
    algorithm = _take(time, "algorithm", str, what)
    cut, protocol = _take(time, "piece_nbytes", int, what), _take(time, "protocol", str, what)
    try:
        candidate = Candidate.parse(algorithm)
    except ArgumentError:
        candidate = Candidate(algorithm)  # It serves no call; the rest of the table is good.
    return replace(candidate, piece_nbytes=cut, protocol=protocol)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# -- files ----------------------------------------------------------------------------------------


def table_path(fit: Fit, environ: Mapping[str, str]) -> Path:
    """Where the table of a machine, transport and number of ranks lies in the user's cache directory.

    Of several hosts the ranks on each count too.
    """
    machine = zlib.crc32(json.dumps(dict(fit.machine), sort_keys=True).encode())
    groups = fit.hosts.get("groups", ())
    over = f"-{len(groups)}-hosts-{zlib.crc32(json.dumps(groups).encode()):08x}" if groups else ""
    return cache_directory(environ) / "tuning" / f"{machine:08x}-{fit.transport}-{fit.ranks}{over}.json"


def save_table(table: Table, path: Path) -> None:
    """Writes a table; a process that reads it meanwhile sees the old one or the new one, whole.

    Raises:
        ArgumentError: It cannot be written there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(table.to_json())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ArgumentError(f"the tuning table cannot be written to {path}: {error}") from None


def read_table(path: Path) -> Table:
    """Reads a table, whether it fits or not.

    Raises:
        FileNotFoundError: There is no such file.
        ArgumentError: It is no table; the message says why.
        ResourceError: No descriptor is left for it.
    """
    try:
        with explained(f"the tuning table {path} cannot be read"), open(path, "rb") as file:
            raw = file.read(_MOST_FILE_NBYTES + 1)
        if len(raw) > _MOST_FILE_NBYTES:
            raise ArgumentError(f"it has over {_MOST_FILE_NBYTES >> 20} MiB")
        return Table.from_json(raw.decode())
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"it cannot be read: {error}") from None
