"""GPU arrays through the peers' memory (CUDA IPC): a call is one kernel, without NCCL.

========================  =====================================================================
``resource.PeerMemory``   compiles calls, and says which calls it can carry
``region.PeerRegion``     the memory that a rank shares with its peers, exchanged once and tested
``segments.Segments``     arrays of ``comm.empty()``, which the peers read and write in place
``grids``                 the shape of a launch
``plans.PeerPlan``        a compiled call: one launch with prepared arguments
``flagcx.kernels.peer``   the kernels
========================  =====================================================================

``Call.protocol`` names one of two protocols: ``peer_packets`` for small messages, in packets with a flag
inside each, and ``peer_memory`` for all others, in chunks.
"""

from __future__ import annotations

from flagcx.transport.peer_memory.plans import PeerPlan
from flagcx.transport.peer_memory.resource import PeerMemory, connect, protocols_in

__all__ = ["PeerMemory", "PeerPlan", "connect", "protocols_in"]
