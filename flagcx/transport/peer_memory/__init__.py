"""GPU arrays through the peers' own memory (CUDA IPC): a call is one kernel, and NCCL has no part in it.

========================  =====================================================================
``region.PeerRegion``     the memory that a rank shares with its peers, exchanged once and tried
``segments.Segments``     arrays of ``comm.empty()``, which the peers read and write in place
``grids``                 the shape of a launch
``plans.PeerPlan``        a compiled call: one launch with arguments that are ready
``flagcx.kernels.peer``   the kernels
========================  =====================================================================

Two protocols, by the names that ``Call.protocol`` takes: ``peer_packets`` for small messages, in which data
carries its own flags, and ``peer_memory`` for all others.
"""

from __future__ import annotations

from flagcx.transport.peer_memory.plans import PeerPlan
from flagcx.transport.peer_memory.resource import PeerMemory, connect

__all__ = ["PeerMemory", "PeerPlan", "connect"]
