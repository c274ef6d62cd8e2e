"""What a communicator says of a call before it is made: what would run, and why."""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcx.dtypes import dtype_of, resolve_op
from flagcx.errors import ArgumentError, CommunicatorError, FlagcxError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.explain_calls import (
    Asked,
    Machine,
    explain_between_hosts,
    explain_on_device,
    explain_on_host,
)
from flagcx.selection.explanation import Explanation
from flagcx.selection.placement import gpus_of

PROTOCOLS = ("peer_memory", "peer_packets")
"""The protocols for GPUs; a transport has them where the GPUs reach each other's memory."""


def explain(comm: Any, collective: str, nbytes: int, dtype: Any, op: Any, gpu: bool | None) -> Explanation:
    """See ``Communicator.explain``."""
    if collective not in COLLECTIVES:
        raise ArgumentError(
            f"collective={collective!r} is not known; expected one of {', '.join(COLLECTIVES)}"
        )
    if not isinstance(nbytes, (int, np.integer)) or isinstance(nbytes, bool) or nbytes < 0:
        raise ArgumentError(f"nbytes must be an integer from 0 up, got {nbytes!r}")
    if gpu and comm._device is None:
        raise CommunicatorError(
            "gpu=True explains calls on arrays on GPUs, and none was made yet; make one first, on all ranks"
        )
    if comm._device is not None and gpu is not False:
        return _on_device(comm, collective, int(nbytes), dtype, op)
    if len(set(comm.hosts)) > 1:
        return _between_hosts(comm, collective, int(nbytes))
    return _on_host(comm, collective, int(nbytes))


def _on_host(comm: Any, collective: str, nbytes: int) -> Explanation:
    selector, transport = comm._selector, comm._transport
    choice = selector.choose(collective, nbytes, comm.size)
    measured = dict(selector.ranked(collective, nbytes, comm.size))
    where = f"{transport.name.replace('_', ' ')} of {comm.hosts[comm.rank].partition('/')[0]}"
    asked = Asked(collective, nbytes, comm.size, choice, measured, selector.note, where)
    return explain_on_host(asked, transport.protocols, transport.cross_memory)


def _between_hosts(comm: Any, collective: str, nbytes: int) -> Explanation:
    choice = comm._host._choose(collective, nbytes, comm.size, False)
    where = f"{len(set(comm.hosts))} hosts"
    return explain_between_hosts(Asked(collective, nbytes, comm.size, choice, {}, comm._selector.note, where))


def _on_device(comm: Any, collective: str, nbytes: int, dtype: Any, op: Any) -> Explanation:
    executor = comm._device
    assert executor is not None
    kind = dtype_of(dtype)
    resolved = resolve_op(op, kind) if COLLECTIVES[collective].reduces else None
    possible = executor.possible(collective, nbytes, kind, resolved)
    selector, size = executor.selector, comm.size
    choice = selector.choose(collective, nbytes, size, False, possible)
    measured = {} if selector.measured is None else selector.measured.times(collective, max(nbytes, 1))
    machine, where = _machine(comm), "GPUs"
    if machine is not None and machine.topology.name:
        where = machine.topology.name
    why = executor.transport.no_peers
    note = f"{selector.note}; peer memory is not used: {why}" if why else selector.note
    asked = Asked(collective, nbytes, size, choice, measured, note, where)
    return explain_on_device(asked, possible, machine, PROTOCOLS)


def _machine(comm: Any) -> Machine | None:
    """Where the ranks' GPUs are, as this rank sees them."""
    from flagcx.topology import detect

    executor = comm._device
    assert executor is not None
    if not comm.config.topology_detection or len(set(comm.hosts)) > 1:
        return None
    try:
        topology = detect()
    except FlagcxError:
        return None
    gpus = gpus_of(topology, [identity.pci_bus_id for identity in executor.transport.identities])
    return None if gpus is None else Machine(topology, gpus, executor.order)
