"""What a job of the fault suite does, drawn from a seed: its ranks and calls, and one fault at one moment."""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.communicator.kills import IN_CALLS, IN_JOINING, Kill

IN_GPU_CALLS = (
    "bootstrap.store:Store.exchange",
    "executor.device:DeviceExecutor.run",
    "executor.device:DeviceExecutor.start",
    "transport.nccl.transport:NcclTransport.submit",
    "transport.peer_memory.resource:PeerMemory.compile",
)
_IN_NETWORK = (
    "transport.network.wire:Wire.exchange",
    "transport.network.wire:Wire.send",
    "bootstrap.store:Store.exchange",
)
IN_MPI = (*_IN_NETWORK, "transport.mpi.engine:MpiEngine.some_done")
IN_UCX = (*_IN_NETWORK, "transport.ucx.engine:UcxEngine.some_done", "transport.ucx.engine:UcxEngine._connect")

FATAL = ("kill", "stop", "term", "exception", "exit", "descriptors", "memory")
"""Faults of one rank that the others must be told of, or must not need it any more."""
HARMLESS = ("none", "pause", "slow", "strangers", "two jobs")
"""Faults after which every call of every rank must be right."""
FAULTS = {
    "shared memory": (*FATAL, *HARMLESS[1:], "dead store", "small /dev/shm"),
    "threads": ("exception", "exit", "slow"),
    "GPU": ("kill", "stop", "term", "exception", "exit", "kill", "pause", "slow"),
    "GPU, MPS": ("kill", "stop", "exception", "exit", "pause"),
    "MPI": ("kill", "stop", "term", "exception", "exit", "descriptors", "memory", "pause", "slow"),
    "MPI, two hosts": ("kill", "stop", "exception", "exit", "pause", "slow", "cut link", "cut link"),
    "UCX, two hosts": ("kill", "stop", "term", "exception", "exit", "pause", "slow", "cut link", "cut link"),
}

_EITHER = ("the launcher", "rank 0")
_STORES = dict.fromkeys(("MPI", "MPI, two hosts", "UCX, two hosts", "GPU", "GPU, MPS"), ("rank 0",))
"""Who may serve the store, where jobs are started by no launcher of flagcx's."""


class Plan(NamedTuple):
    """One job.

    Attributes:
        seed: Gives the calls.
        transport: One of ``FAULTS``.
        size: Number of ranks.
        calls: Number of calls.
        fault: What happens.
        victim: The rank to which it happens.
        phase: "init", "close", or the number of a call, in which it happens.
        moment: "before", "inside" (after a time), "at" (at a place in the library) or "after".
        delay_s: That time.
        kill: That place.
        store: Whether "the launcher" or "rank 0" serves the store.
    """

    seed: int
    transport: str
    size: int
    calls: int
    fault: str
    victim: int
    phase: str | int
    moment: str
    delay_s: float
    kill: Kill
    store: str

    @property
    def on_gpu(self) -> bool:
        """Whether the arrays are on a GPU, which all ranks share."""
        return self.transport.startswith("GPU")

    @property
    def on_hosts(self) -> bool:
        """Whether the ranks are on two test hosts, whose link may be cut."""
        return self.transport.endswith("two hosts")

    @property
    def timeout_s(self) -> float:
        """The time-out of operations: short where nothing else can end a wait."""
        return 5.0 if self.fault in ("stop", "cut link") else 20.0

    @property
    def init_timeout_s(self) -> float:
        """The time-out of ``fc.init()`` and splits: short where a rank may never come.

        Ranks of MPI have started 22 s after the first on a busy machine.
        """
        never = self.fault in ("stop", "cut link") or (self.phase == "init" and self.fault not in HARMLESS)
        return 30.0 if never else 60.0

    @property
    def bound_s(self) -> float:
        """After how many seconds from the start of the job a rank that still runs is said to hang."""
        return 75.0

    @property
    def kind(self) -> str:
        """When the fault happens, in words."""
        phase = self.phase if isinstance(self.phase, str) else f"call {self.phase}"
        place = f" {'after' if self.kill.after else 'before'} {self.kill.place}, {self.kill.number}."
        time = f" {self.delay_s * 1e6:.0f} us"
        return f"{self.moment} {phase}{place if self.moment == 'at' else time * (self.moment == 'inside')}"


def draw(seed: int, transport: str, fault: str = "") -> Plan:
    """Draws a job.

    Args:
        seed: The seed.
        transport: One of ``FAULTS``.
        fault: One of its faults; drawn if empty.
    """
    chance = random.Random(f"{seed} {transport}")
    fault = fault or chance.choice(FAULTS[transport])
    size = 4 if transport.endswith("two hosts") else chance.choice((2, 3, 4))
    calls = chance.choice((3, 6, 10))
    phase: str | int = chance.choice(("init", "close", *["call"] * 6))
    if phase == "call":
        phase = chance.randrange(calls)
    moment = chance.choice(("before", "inside", "inside", "at", "after"))
    if transport == "threads" and moment in ("inside", "at"):
        moment = "before"  # a signal, and a place in the library, would mean the whole process
    longest, places = (0.08 if phase == "init" else 0.003), IN_CALLS
    if transport.startswith(("MPI", "UCX")):
        places = IN_UCX if transport.startswith("UCX") else IN_MPI
    elif "GPU" in transport:  # in whose first call all ranks connect
        longest, places = (2.0 if phase == 0 else 0.05), IN_GPU_CALLS
    return Plan(
        seed,
        transport,
        size,
        calls,
        fault,
        chance.randrange(size),
        phase,
        moment,
        longest * chance.random() ** 2,
        Kill.at_random(IN_JOINING if phase in ("init", "close") else places, chance),
        "the launcher"
        if fault in ("dead store", "strangers")
        else chance.choice(_STORES.get(transport, _EITHER)),
    )
