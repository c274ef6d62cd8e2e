"""GPU arrays through the peers' memory (CUDA IPC): a call is one kernel, without NCCL.

Up to some MiB messages travel as packets, each with a flag that the receiver polls, in one hop or two;
larger ones flow in chunks. So do all collectives, blocks of different sizes, sends and receives. Sums are
made in the order of ranks, in float32 for half precision and fp8, so all ranks get the same bits in every
run. All dtypes and operations work, also those that NCCL lacks. ``comm.empty(shape, dtype, device="gpu")``,
called by all ranks together, makes arrays that peers write in place, and read too where they share a GPU.
``comm.explain("allreduce", nbytes)`` says when peer memory is not used and why; ``FLAGCX_PEER_MEMORY=0``
switches it off. On one H200 that two ranks share, an all-reduce of 4 KiB takes the host 5.5 to 6.3 us, in
place or not, most other collectives 6 to 8, and ``dist.all_reduce`` on an enhanced group 22 to 26
(``bench/results/gpu_overhead_1_h200_shared.jsonl``).

========================  =====================================================================
``resource.PeerMemory``   compiles calls, and says which calls it can carry
``region.PeerRegion``     the memory that a rank shares with its peers, exchanged once and tested
``segments.Segments``     arrays of ``comm.empty()``, which the peers read and write in place
``grids``                 the shape of a launch
``messages.PeerMessages``  sends and receives
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
