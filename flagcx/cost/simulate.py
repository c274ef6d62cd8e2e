"""How long a schedule takes: every message over its links, every rank waiting for its own partners only.

A message begins when both ranks have begun the step it is in. It takes its latency, and for its bytes as long
as the busiest of its links needs for all that goes over that link on the same level: so concurrent messages
share links. Where messages are cut among channels, these may take longer than the links. A rank ends a step
when all its messages are over and all that arrived is reduced; then it begins the next, wherever the others
are.

What overlaps here is what overlaps in the transports. A rank's steps never do: each transport waits for all
messages of a step before it begins the next (``transport.steps``; on GPUs a step is one group, on one
stream), and calls of a communicator follow each other. So the inner and the outer phase of a hierarchy follow
each other on a rank, while groups drift apart as their own partners let them. Phases run side by side only
where a schedule has both in one step, as pieces that follow each other and split messages do; then the level
has the messages of both, and they share the links. Peers' memory and NCCL's own collectives, which pipelines
its levels, are priced by laws of their own.

Left out are messages of different levels that meet on a link because ranks have drifted apart (each level is
charged for itself), and buffers that let a sender run ahead of its receiver.

Levels that repeat are timed one by one until every rank gains the same from one to the next; from there on
the rest follows by multiplication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flagcx.cost.channels import Channels
from flagcx.cost.links import Flows
from flagcx.cost.network import Network
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Schedule
from flagcx.schedule.traffic import LevelTraffic, Rounds, rounds_of

_MOST_KEPT = 4_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a call at its ranks. All zero: the network's time alone.

    Attributes:
        call_us: Once a call.
        step_us: For a rank, once a step that has messages: a group, a launch, a flag.
        message_us: For a rank, each peer that it sends to in a step beyond the first.
        reduce_us: Once a step that reduces: the launch of a kernel.
        reduce_gb_per_s: 10^9 bytes added to others a second.
        copy_us: Once a step that copies.
        copy_gb_per_s: 10^9 bytes copied a second.
        launch_us: Once a step that reduces or copies, for ranks that do all such work in one launch. Then
            the four above cost nothing, and each sum reads its operands once and is written once.
        memory_gb_per_s: 10^9 bytes that such a launch reads and writes a second.
        spread: Measured over predicted time of such calls, between which 80% lie; None where not known.
        channels: The channels that messages are cut among; None where the links alone limit them.
    """

    call_us: float = 0.0
    step_us: float = 0.0
    message_us: float = 0.0
    reduce_us: float = 0.0
    reduce_gb_per_s: float = np.inf
    copy_us: float = 0.0
    copy_gb_per_s: float = np.inf
    launch_us: float = 0.0
    memory_gb_per_s: float = np.inf
    spread: tuple[float, float] | None = None
    channels: Channels | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__[:-2]:
            value = getattr(self, name)
            if not (value > 0 if name.endswith("per_s") else value >= 0):
                raise ArgumentError(
                    f"{name}={value!r}; expected a number {'above' if 'per_s' in name else 'from'} 0"
                )


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """The messages of one level with their times.

    Attributes:
        level: Number of the level.
        source: The sender of each message, int64 of shape (messages,).
        target: Its receiver.
        nbytes: Its bytes.
        begin_us: When each begins.
        end_us: When each is over.
        worker: Ranks that reduce or copy at the end of the level.
        done_us: When each of them is done with that.
    """

    level: int
    source: np.ndarray
    target: np.ndarray
    nbytes: np.ndarray
    begin_us: np.ndarray
    end_us: np.ndarray
    worker: np.ndarray
    done_us: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """The time of a schedule for one size of message.

    Attributes:
        time_us: When the last rank is done.
        finish_us: When each rank is done, float64 of shape (size,).
        sent_nbytes: Bytes that each rank sends.
        link_nbytes: Bytes that go over each link of the network.
        link_busy: The part of the time that each link needs for them, 0 to 1.
        steps: Levels on which there are messages.
        nbytes: Bytes of the whole message: of all blocks, where there is one a rank.
    """

    time_us: float
    finish_us: np.ndarray
    sent_nbytes: np.ndarray
    link_nbytes: np.ndarray
    link_busy: np.ndarray
    steps: int
    nbytes: float

    @property
    def algbw_gb_per_s(self) -> float:
        """Bytes of the message over time."""
        return self.nbytes / self.time_us / 1000 if self.time_us else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """The traffic of a level with all that does not depend on bytes.

    Attributes:
        traffic: The messages and the local work, one entry for each working rank.
        latency_us: Of each message.
        unit_us: Time of each message for each byte of a chunk.
        load: Chunks over each link.
        order: Puts the ends of messages (all sources, then all targets) in order of rank.
        starts: Where each rank's begin in that order.
        ranks: The ranks that have any.
        sends: Peers that each of ``ranks`` sends to beyond the first.
        pair: For each message a number that those of the same two ranks share; None where all differ.
    """

    traffic: LevelTraffic
    latency_us: np.ndarray
    unit_us: np.ndarray
    load: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    ranks: np.ndarray
    sends: np.ndarray
    pair: np.ndarray | None


class Timed:
    """A schedule laid over a network, to be timed for any number of bytes.

    Args:
        rounds: Its traffic.
        network: Of as many ranks.

    Example:
        >>> from flagcx.algorithms import build  # doctest: +SKIP
        >>> from flagcx.cost.network import uniform  # doctest: +SKIP
        >>> lay(build("allreduce", "ring", 4), uniform(4, 1.0, 10.0)).time(4000).time_us  # doctest: +SKIP
        6.6
    """

    def __init__(self, rounds: Rounds, network: Network) -> None:
        self.rounds, self.network = rounds, network
        self._levels: dict[tuple[int, ...], _Level] = {}
        self._messages = 0  # of all levels that are kept

    def time(self, nbytes: float, costs: Costs | None = None) -> Timing:
        """The time for a message.

        Args:
            nbytes: Bytes of the message; of one block, where the collective has one a rank.
            costs: Costs of the call at its ranks; none by default.

        Raises:
            ArgumentError: ``nbytes`` is negative.
        """
        clock = _Clock(self, nbytes, costs or Costs())
        for key, count in self.rounds.runs:
            clock.run(self._level(key), count)
        return clock.timing()

    def moments(self, nbytes: float, costs: Costs | None = None) -> Iterator[Moment]:
        """The messages with their times, level by level; for pictures, of not too many ranks and levels."""
        clock = _Clock(self, nbytes, costs or Costs())
        keys = (key for key, count in self.rounds.runs for _ in range(count))
        return (clock.moment(self._level(key), number) for number, key in enumerate(keys))

    def _level(self, key: tuple[int, ...]) -> _Level:
        found = self._levels.get(key)
        if found is None:
            found = self._make_level(key)
            self._messages += len(found.traffic.source)
            if self._messages > _MOST_KEPT:
                self._levels.clear()
                self._messages = len(found.traffic.source)
            self._levels[key] = found
        return found

    def _found(self, key: tuple[int, ...]) -> tuple[LevelTraffic, Flows]:
        """The traffic of a level and its routes."""
        if len(key) == 1:
            kind = self.rounds.kinds[key[0]]
            return kind, self.network.find(kind.source, kind.target)
        return self._parts.together(key)

    @cached_property
    def _parts(self) -> _Parts:
        shared = sorted({number for key, _ in self.rounds.runs if len(key) > 1 for number in key})
        return _Parts(self.rounds, shared, self.network)

    def _make_level(self, key: tuple[int, ...]) -> _Level:
        traffic, flows = self._found(key)
        carried = np.repeat(traffic.chunks, np.diff(flows.first)) * flows.share
        load = np.bincount(flows.link, carried, len(self.network.links))
        per_chunk = load / (self.network.bandwidth_gb_per_s * 1000)
        units = np.zeros(0)
        if len(flows.link):
            units = np.maximum.reduceat(per_chunk[flows.link], flows.first[:-1])
        ends = np.concatenate([traffic.source, traffic.target])
        order = np.argsort(ends, kind="stable")
        ranks, starts = np.unique(ends[order], return_index=True)
        peers, pair = traffic.source, None
        if len(key) > 1:
            codes, pair = np.unique(traffic.source * self.rounds.size + traffic.target, return_inverse=True)
            peers = codes // self.rounds.size
            pair = pair if len(codes) < len(pair) else None
        sends = np.maximum(np.bincount(peers, minlength=self.rounds.size)[ranks] - 1, 0)
        return _Level(traffic, flows.latency_us, units, load, order, starts, ranks, sends, pair)


class _Parts:
    """The kinds of traffic of which several make up a level, one after the other, with their routes.

    Args:
        rounds: The traffic.
        numbers: The kinds, ascending.
        network: Finds the routes.
    """

    def __init__(self, rounds: Rounds, numbers: Sequence[int], network: Network) -> None:
        kinds = [rounds.kinds[number] for number in numbers]
        self._place = np.full(len(rounds.kinds), -1)
        self._place[list(numbers)] = np.arange(len(numbers))
        columns = {n: np.concatenate([getattr(kind, n) for kind in kinds]) for n in LevelTraffic.__slots__}
        self._traffic = LevelTraffic(**columns)
        self._flows = network.find(self._traffic.source, self._traffic.target)
        self._messages = np.cumsum([0, *(len(kind.source) for kind in kinds)])
        self._workers = np.cumsum([0, *(len(kind.worker) for kind in kinds)])

    def together(self, key: tuple[int, ...]) -> tuple[LevelTraffic, Flows]:
        """All that happens on a level, with one entry for each rank that has local work; and its routes."""
        places, whole, flows = self._place[list(key)], self._traffic, self._flows
        rows, _ = _ranges(self._messages[places], self._messages[places + 1])
        links, first = _ranges(flows.first[rows], flows.first[rows + 1])
        routed = Flows(first, flows.link[links], flows.share[links], flows.latency_us[rows])
        work, _ = _ranges(self._workers[places], self._workers[places + 1])
        worker, inverse = np.unique(whole.worker[work], return_inverse=True)
        local = (
            np.bincount(inverse.ravel(), column[work], len(worker))
            for column in (whole.reduced, whole.copied, whole.touched)
        )
        return LevelTraffic(
            whole.source[rows], whole.target[rows], whole.chunks[rows], worker, *local
        ), routed


def _ranges(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of ranges, one range after the other, and where each range begins among them."""
    first = np.concatenate([[0], np.cumsum(stops - starts)])
    return np.arange(first[-1]) + np.repeat(starts - first[:-1], stops - starts), first


def lay(schedule: Schedule | Rounds, network: Network) -> Timed:
    """Lays a schedule over a network.

    Args:
        schedule: A schedule, or its traffic where it was found already.
        network: Of as many ranks.

    Raises:
        ArgumentError: The numbers of ranks differ.
        ScheduleError: The schedule cannot run.
    """
    if schedule.size != network.size:
        raise ArgumentError(f"a schedule for {schedule.size} ranks on a network of {network.size}")
    return Timed(rounds_of(schedule) if isinstance(schedule, Schedule) else schedule, network)


def message_nbytes(collective: str, size: int, nbytes: float) -> float:
    """Bytes of the whole message: ``nbytes`` of one block times the blocks, where there is one a rank."""
    return nbytes * (size if COLLECTIVES[collective].blocks else 1)


class _Clock:
    """When each rank begins its next step."""

    def __init__(self, timed: Timed, nbytes: float, costs: Costs) -> None:
        if nbytes < 0:
            raise ArgumentError(f"nbytes={nbytes!r}; expected 0 or more")
        self.timed, self.costs = timed, costs
        self.nbytes = message_nbytes(timed.rounds.collective, timed.rounds.size, nbytes)
        self.chunk = self.nbytes / timed.rounds.chunks
        self.now = np.full(timed.rounds.size, float(costs.call_us))
        self.load = np.zeros(0)

    def run(self, level: _Level, count: int) -> None:
        """Moves on by ``count`` levels on which the same happens."""
        self._charge(level, count)
        left, spent = count, self._spent_us(level)
        while left:
            before = self.now
            self.now = self._after(level, before, *self._messages(level, before, spent))
            left -= 1
            gained = self.now - before
            least, most = gained.min(), gained.max()
            if left and most - least <= 1e-12 * most + 4 * np.spacing(before.max()):
                self.now = self.now + most * left
                return

    def moment(self, level: _Level, number: int) -> Moment:
        """Moves on by one level, and returns its messages."""
        self._charge(level, 1)
        begin, end = self._messages(level, self.now, self._spent_us(level))
        self.now = self._after(level, self.now, begin, end)
        traffic, done = level.traffic, self.now[level.traffic.worker]
        nbytes = traffic.chunks * self.chunk
        return Moment(number, traffic.source, traffic.target, nbytes, begin, end, traffic.worker, done)

    def _charge(self, level: _Level, count: int) -> None:
        if len(level.load) > len(self.load):
            self.load = np.concatenate([self.load, np.zeros(len(level.load) - len(self.load))])
        self.load[: len(level.load)] += level.load * (count * self.chunk)

    def _spent_us(self, level: _Level) -> np.ndarray:
        """How long each message takes once it has begun."""
        channels, wire = self.costs.channels, level.unit_us * self.chunk
        if channels is not None and len(wire):
            nbytes = level.traffic.chunks * self.chunk
            wire = channels.time_us(nbytes, wire, self.timed.rounds.size, level.pair)
        return level.latency_us + wire

    @staticmethod
    def _messages(level: _Level, now: np.ndarray, spent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        begin = np.maximum(now[level.traffic.source], now[level.traffic.target])
        return begin, begin + spent

    def _after(self, level: _Level, now: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """When each rank has ended the level that it began ``now``."""
        costs, later = self.costs, now
        if len(level.ranks):
            last = np.maximum.reduceat(np.concatenate([end, end])[level.order], level.starts)
            later = now.copy()
            later[level.ranks] = last + (costs.step_us + costs.message_us * level.sends)
        if len(level.traffic.worker):
            later = later.copy() if later is now else later
            later[level.traffic.worker] += self._work_us(level.traffic)
        return later

    def _work_us(self, traffic: LevelTraffic) -> np.ndarray:
        costs, scale = self.costs, self.chunk / 1000
        spent = np.zeros(len(traffic.worker))
        for chunks, once_us, speed in (
            (traffic.reduced, costs.reduce_us, costs.reduce_gb_per_s),
            (traffic.copied, costs.copy_us, costs.copy_gb_per_s),
            (traffic.touched, costs.launch_us, costs.memory_gb_per_s),
        ):
            spent += (chunks > 0) * once_us + chunks * (scale / speed)
        return spent

    def timing(self) -> Timing:
        """The times and loads found, once all levels have run."""
        rounds = self.timed.rounds
        total = float(self.now.max())
        load = np.zeros(len(self.timed.network.links))
        load[: len(self.load)] = self.load
        busy = load / (self.timed.network.bandwidth_gb_per_s * 1000)
        sent = rounds.sent_chunks() * self.chunk
        return Timing(total, self.now, sent, load, busy / total if total else busy, rounds.steps, self.nbytes)
