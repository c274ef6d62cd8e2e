"""What flagcx holds itself to beside its peers, on the host and on several GPUs, and the verdict on a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from groups import OURS, OURS_SYMMETRIC
from report import Result

from flagcx.cli.sizes import parse_nbytes

SIZES = tuple(parse_nbytes(text) for text in ("1K", "16K", "256K", "4M", "64M", "256M"))
"""The messages that are compared unless others are asked for, in bytes."""


@dataclass(frozen=True, slots=True)
class Target:
    """The least ratio, the peer's time to ours, at each of ``SIZES``.

    Attributes:
        ours: Which of our two ways: ``flagcx`` or ``flagcx.empty``.
        peer: The other library.
        ranks: The number of ranks that it's meant for.
        least: Size in bytes -> the least ratio; sizes without a target are left out.
    """

    ours: str
    peer: str
    ranks: int
    least: Mapping[int, float]


def _target(ours: str, peer: str, ranks: int, *ratios: float | None) -> Target:
    least = {size: ratio for size, ratio in zip(SIZES, ratios, strict=True) if ratio is not None}
    return Target(ours, peer, ranks, MappingProxyType(least))


TARGETS = (
    _target(OURS, "openmpi", 2, 0.8, 1.5, 1.5, 1.2, 3.0, 3.0),
    _target(OURS, "openmpi", 4, 0.8, 2.5, 1.8, 1.1, 3.5, 2.5),
    _target(OURS_SYMMETRIC, "openmpi", 2, None, None, 5.0, 5.0, 5.0, 5.0),
    *(_target(OURS, "mpich", ranks, *6 * [1.2]) for ranks in (2, 4)),
    *(_target(OURS, "gloo", ranks, *6 * [5.0]) for ranks in (2, 4)),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Our result beside a peer's.

    Attributes:
        ours: Our result.
        peer: The peer's, with the same ranks and size.
        least: The least ratio that we hold ourselves to; None where there is no target.
    """

    ours: Result
    peer: Result
    least: float | None

    @property
    def ratio(self) -> float:
        """The peer's median time as a multiple of ours."""
        return self.peer.median_us / self.ours.median_us

    @property
    def passed(self) -> bool:
        """Whether the target is reached (or there is none) and our results are right."""
        return not self.ours.wrong and (self.least is None or self.ratio >= self.least)

    @property
    def word(self) -> str:
        """``pass``, ``FAIL`` or, where there is no target and nothing wrong, nothing."""
        return "FAIL" if not self.passed else "" if self.least is None else "pass"


def judge(results: Sequence[Result], targets: Sequence[Target] = TARGETS) -> Iterator[Verdict]:
    """Compares each of our results with each peer's at the same number of ranks and size.

    Args:
        results: Results of one run.
        targets: What to hold them to.

    Yields:
        A verdict for each pair, in the order of ``results``.
    """
    least = {(t.ours, t.peer, t.ranks, size): ratio for t in targets for size, ratio in t.least.items()}
    for peer in results:
        for ours in results:
            alike = (peer.ranks, peer.nbytes) == (ours.ranks, ours.nbytes)
            if alike and ours.implementation in OUR_NAMES and peer.implementation not in OUR_NAMES:
                key = (ours.implementation, peer.implementation, peer.ranks, peer.nbytes)
                yield Verdict(ours, peer, least.get(key))


OUR_NAMES = (OURS, OURS_SYMMETRIC)


# -- several GPUs, by the rows of ``gpu_replays.py``

TWO_GPUS_US: Mapping[int, float] = MappingProxyType(
    dict(
        zip(
            map(parse_nbytes, ("4K", "64K", "1M", "4M", "16M", "64M", "1G")),
            (4.8, 5.8, 9.0, 18.0, 55.0, 195.0, 2950.0),
            strict=True,
        )
    )
)
"""Two H200 over NVLink, float32: the most that a replay of what is chosen may take."""
SMALL_NBYTES, OF_PEER_SMALL, OF_PEER_LARGE = 4 << 20, 0.7, 0.9
"""Four and more GPUs: the part of the best peer's time, up to so many bytes and above."""
SCHEDULES = ("flagcx ring", "flagcx ring|ring", "flagcx tree", "flagcx double_binary_tree")
DIRECT = ("flagcx one_shot", "flagcx two_shot")
BEHIND_BEST, OF_NCCL = 1.05, 1 / 0.85
"""The choice against the best candidate; at 1 GiB the best schedule over NCCL against NCCL's own."""


@dataclass(frozen=True, slots=True)
class Held:
    """One time on GPUs against what it is held to.

    Attributes:
        what: What is held to what.
        ranks: Number of ranks, each with a GPU.
        dtype: Name of the dtype.
        nbytes: Bytes of the message.
        us: The time.
        most_us: What it may be.
    """

    what: str
    ranks: int
    dtype: str
    nbytes: int
    us: float
    most_us: float

    @property
    def passed(self) -> bool:
        """Whether it is kept."""
        return self.us <= self.most_us


def judge_gpus(rows: Sequence[Mapping[str, Any]]) -> Iterator[Held]:
    """Holds graph replays to the targets for several GPUs.

    Args:
        rows: Of ``gpu_replays.py``. Of what was measured twice the last counts; those with an error or of
            ranks that share a GPU are passed over.

    Yields:
        A verdict for each target, by ranks, dtype and size; before them, those on wrong sums of ours.
    """
    groups: dict[tuple[int, str, int], dict[str, float]] = {}
    for row in rows:
        if "replay_us" not in row or row["ranks"] > row["run"]["gpus"]:
            continue
        key = row["ranks"], row["dtype"], row["nbytes"]
        name = row["library"]
        if row["wrong"]:
            if name.startswith("flagcx"):
                yield Held(f"{name}: sums are wrong", *key, row["replay_us"], 0.0)
            continue
        if name in DIRECT and not row.get("protocol"):  # they say so where peers' memory carries them
            name += " over NCCL"
        groups.setdefault(key, {})[name] = row["replay_us"]
    for key in sorted(groups):
        yield from _held(*key, groups[key])


def _held(ranks: int, dtype: str, nbytes: int, times: Mapping[str, float]) -> Iterator[Held]:
    """The verdicts at one number of ranks, dtype and size."""
    place = ranks, dtype, nbytes
    own = {name: us for name, us in times.items() if name.startswith("flagcx ") and "comm.empty" not in name}
    peers = {name: us for name, us in times.items() if not name.startswith("flagcx")}
    chosen = times.get("flagcx")
    if chosen is not None:
        if ranks == 2 and dtype == "float32" and nbytes in TWO_GPUS_US:
            yield Held("chosen, two GPUs", *place, chosen, TWO_GPUS_US[nbytes])
        if ranks >= 4 and peers:
            best = min(peers, key=peers.__getitem__)
            part = OF_PEER_SMALL if nbytes <= SMALL_NBYTES else OF_PEER_LARGE
            yield Held(f"chosen, {part:g} of {best}", *place, chosen, part * peers[best])
        if own:
            best = min(own, key=own.__getitem__)
            yield Held(f"chosen, beside {best}", *place, chosen, BEHIND_BEST * own[best])
    laid = {name: us for name, us in own.items() if name in SCHEDULES or name.endswith(" over NCCL")}
    if nbytes == 1 << 30 and laid and "NCCL" in times:
        best = min(laid, key=laid.__getitem__)
        yield Held(f"{best}, 85% of NCCL's bandwidth", *place, laid[best], OF_NCCL * times["NCCL"])
