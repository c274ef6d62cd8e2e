"""NumPy arrays over hosts that need not be there: the options ``--hosts`` and ``--link``, and their model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flagcx.errors import ArgumentError

if TYPE_CHECKING:
    from flagcx.selection.candidates import Request
    from flagcx.selection.selector import Selector

Hosts = Annotated[
    str | None,
    typer.Option("--hosts", help="NumPy arrays over hosts with so many ranks each, by commas: 4,4."),
]
Link = Annotated[str, typer.Option("--link", help="Of each host, with --hosts: GB/s, and us of latency.")]
LINK = "1.25,30"
"""The link by default: 10 Gbit/s."""


def asked_over_hosts(collective: str, nbytes: int, hosts: str, link: str) -> tuple[Selector, Request]:
    """The choices on such hosts, whose links are as ``cost.hosts.HostLinks.of`` has them, and a request.

    Raises:
        ArgumentError: ``hosts`` or ``link`` is none, or there is no such collective.
    """
    from flagcx.cost.hosts import HostLinks
    from flagcx.schedule.collectives import check_collective
    from flagcx.selection.candidates import Request
    from flagcx.selection.rules import MultiHostRules
    from flagcx.selection.selector import Selector, TuningInfo
    from flagcx.transport.base import groups_of
    from flagcx.transport.link_speed import LinkSpeed

    check_collective(collective)
    counts = [int(word) if word.strip().isdigit() else 0 for word in hosts.split(",")]
    if len(counts) < 2 or not all(counts):
        raise ArgumentError(f"--hosts {hosts!r}; expected the ranks of two hosts or more, such as 4,4")
    groups = groups_of([f"host{number}" for number, count in enumerate(counts) for _ in range(count)])
    speed = LinkSpeed.parse(link)
    rules = MultiHostRules(groups, HostLinks.of(speed.bandwidth_gb_per_s, speed.latency_us))
    told = TuningInfo(note=f"links of {link} (GB/s, us)", order=tuple(range(sum(counts))))
    return Selector(rules, told, groups), Request(collective, nbytes, sum(counts))


def simulated_over_hosts(
    collective: str, algorithm: str, nbytes: int, hosts: str, link: str
) -> dict[str, Any]:
    """What the model of both levels says of one algorithm; the report of ``flagcx simulate``.

    Raises:
        ArgumentError: As above; or the algorithm does not serve the collective, or there are too many ranks.
    """
    from flagcx.cost.simulate import message_nbytes
    from flagcx.schedule.collectives import bus_share
    from flagcx.selection.rules import MOST_MODELLED_RANKS

    selector, request = asked_over_hosts(collective, nbytes, hosts, link)
    candidate = selector.choose_named(algorithm, request)
    found = selector.rules.predict(candidate, request)
    if found is None:
        raise ArgumentError(f"--hosts {hosts}: the model is of 2 to {MOST_MODELLED_RANKS} ranks")
    total = message_nbytes(collective, request.size, nbytes)
    speed, narrow = total / found.time_us / 1000, found.bottleneck
    link_of = narrow and {
        "link": [narrow.a, narrow.b],
        "kind": narrow.kind,
        "bandwidth_gb_per_s": narrow.bandwidth_gb_per_s,
        "nbytes": narrow.nbytes,
        "busy": narrow.busy,
    }
    return {
        "topology": selector.rules.where,
        "collective": collective,
        "algorithm": algorithm,
        "candidate": found.candidate.name,
        "ranks": request.size,
        "pieces": found.candidate.pieces,
        "nbytes": total,
        "steps": found.steps,
        "time_us": found.time_us,
        "algbw_gb_per_s": speed,
        "busbw_gb_per_s": speed * bus_share(collective, request.size),
        "sent_nbytes": found.sent_nbytes,
        "links_used": int(narrow is not None),
        "links": [link_of] if link_of else [],
    }
