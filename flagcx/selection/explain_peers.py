"""The rows of an explanation that stand for ways through the peers' memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flagcx.algorithms import entries
from flagcx.cost.model import Bottleneck
from flagcx.cost.peer_memory import FLAGGED, PACKETS, GpuLinks, Way, load_of, predict_us, reach_over
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.kernels.peer import MOST_RANKS, PeerLayout, may_be_bare
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.explanation import Row
from flagcx.topology.graph import LinkKind, Topology
from flagcx.topology.routes import Routes
from flagcx.topology.traffic import measure
from flagcx.transport.peer_memory.resource import PROTOCOLS, protocols_in

BLOCKS = 128
"""Blocks of threads that a communicator has where each rank has a GPU of its own."""
TOO_LONG = "too long for packets"
NO_PACKETS = "no packets carry this"
NOT_KNOWN = "whether these GPUs reach each other's memory is known on the machine alone"


def way_name(way: Way) -> str:
    """A way for people."""
    algorithm, protocol = way
    return f"{algorithm} ({protocol})"


def way_row(
    way: Way,
    collective: str,
    nbytes: int,
    size: int,
    reach: GpuLinks,
    flagged: bool,
    measured_us: float | None = None,
    bottleneck: Bottleneck | None = None,
) -> Row:
    """A way through the peers' memory, by the model that choices rest on; see ``peer_model.predict_us``."""
    load = load_of(way, collective, nbytes, size)
    what = (size, reach, flagged)
    return Row(
        way_name(way),
        way[0],
        1,
        load.steps,
        load.pushed * (FLAGGED if flagged and way[1] == PACKETS else 1),
        bottleneck,
        predict_us(way, collective, nbytes, *what),
        predict_us(way, collective, 0, *what),
        measured_us,
        way[1],
    )


def peer_rows(
    collective: str, nbytes: int, topology: Topology, gpus: Sequence[int], measured: Mapping[str, float]
) -> Iterator[Row]:
    """Every way through the peers' memory for float32 arrays, with the reason where it is not possible.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where there is one a rank.
        topology: The machine or cluster.
        gpus: The GPU of each rank.
        measured: Times in us that were measured, by the rows' names.
    """
    size, dtype = len(gpus), dtype_of("float32")
    one_host = len({topology.gpu(gpu).host for gpu in gpus}) == 1
    if not (1 < size <= MOST_RANKS and one_host and nbytes):
        return
    reduces = COLLECTIVES[collective].reduces
    op = resolve_op("sum", dtype) if reduces else None
    flagged = not (reduces and may_be_bare("one_shot", dtype))
    layout, reach = PeerLayout(size, BLOCKS, one_gpu=False), reach_over(topology, gpus)
    narrow, by_nvlink = _narrowest(topology, gpus)
    for algorithm in (str(known.algorithm) for known in entries(collective)):
        able = protocols_in(layout, collective, algorithm, nbytes, dtype, op)
        for protocol in PROTOCOLS if able else ():
            way = algorithm, protocol
            row = way_row(way, collective, nbytes, size, reach, flagged, measured.get(way_name(way)))
            if not by_nvlink:
                yield replace(row, predicted_us=None, obstacle=NOT_KNOWN)
            elif protocol not in able:
                small = protocols_in(layout, collective, algorithm, dtype.numpy.itemsize, dtype, op)
                yield replace(row, predicted_us=None, obstacle=TOO_LONG if protocol in small else NO_PACKETS)
            else:
                yield _placed(row, narrow, size)


def _placed(row: Row, narrow: Bottleneck, size: int) -> Row:
    """A row with its busiest link; what a rank sends goes to all peers in equal parts."""
    nbytes = row.sent_nbytes / (size - 1) * narrow.nbytes
    assert row.predicted_us is not None
    busy = nbytes / narrow.bandwidth_gb_per_s / 1e3 / row.predicted_us
    return replace(row, bottleneck=replace(narrow, nbytes=nbytes, busy=busy))


def _narrowest(topology: Topology, gpus: Sequence[int]) -> tuple[Bottleneck, bool]:
    """The link that is busy longest if every rank sends a byte to every other, and whether all is NVLink."""
    traffic = measure(topology, gpus, Routes(topology))
    load = traffic.load.sum(axis=(0, 1))
    worst = int((load / traffic.capacity).argmax())
    kinds = [topology.links_of(a)[b].kind for a, b in traffic.edges]
    bandwidth, nbytes = float(traffic.capacity[worst]), float(load[worst])
    narrow = Bottleneck(*traffic.edges[worst], kinds[worst].value, bandwidth, nbytes, 0.0)
    return narrow, set(kinds) == {LinkKind.NVLINK}
