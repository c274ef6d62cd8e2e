"""What a transport is: it carries arrays of one kind between the ranks of one communicator.

Adding a transport
------------------
1. Derive a class from ``Transport`` (from ``flagcx.transport.steps.HostTransport`` for NumPy arrays, from
   ``DeviceTransport`` for arrays on GPUs). It is made from a ``TransportContext``, on all ranks together.
2. Carry data. A ``HostTransport`` needs ``transfer`` alone, which sends and receives arrays at once: every
   collective is then run step by step over it. A transport that knows better overrides ``compile``.
3. Register the class: ``flagcx.transport.registry.register_transport(MyTransport)``. Users ask for it by
   ``fc.init(transport="name")`` or ``FLAGCX_TRANSPORT``; with ``automatic=True`` it is chosen for every job
   that it serves. Selection, ``comm.explain``, ``flagcx tune``, the profiler and errors need nothing else.

Contract
--------
========================  ==========================================================================
``compile(call)``         once for each kind of call, on all ranks alike; the plan is kept and run many
                          times, by one thread at a time. A plan gives the same bits on every rank. It ends
                          in an error, never in silence, if a peer dies (``PeerDiedError``), comes later than
                          ``config.timeout_s`` (``PeerTimeoutError``), makes another call
                          (``MismatchError``) or gives up (``AbortedError``); the error's ``peer`` is the
                          rank at fault.
``transfer(...)``         point to point: only the ranks concerned call it; messages of a pair of ranks arrive
                          in the order in which they are sent.
``messenger``             where there is one, it carries what users send and receive, so that this waits for
                          no collective; see ``flagcx.transport.messenger``.
``take``, ``result``      check a caller's arrays, without a copy.
``empty``                 makes an array that peers reach with the fewest copies.
``protocols(...)``        the ways that ``Call.protocol`` may name; the same answer on all ranks.
``abort``                 after an error: the peers' calls end with ``AbortedError``.
``check_end``, ``close``  when all calls have been made. ``close`` may be called twice.
========================  ==========================================================================

Attributes with defaults say the rest: see ``Transport``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, Protocol

from flagcx.bootstrap.store import Store
from flagcx.config import Config
from flagcx.dtypes import DType, ReduceOp
from flagcx.schedule.collectives import COLLECTIVES, ChunkLayout, Counts, chunk_layout
from flagcx.schedule.model import Program, Schedule
from flagcx.transport.link_speed import LinkSpeed
from flagcx.transport.messenger import Messenger
from flagcx.transport.waits import Waits

HOST, DEVICE = "host", "device"
"""The kinds of array that a transport may carry: NumPy arrays, or arrays on GPUs."""


def signature_of(text: str) -> int:
    """A number of 64 bits that stands for a text, in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def groups_of(hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, in the order in which the hosts come first.

    Example:
        >>> groups_of(["a", "b", "a"])
        ((0, 2), (1,))
    """
    return tuple(
        tuple(rank for rank, other in enumerate(hosts) if other == host) for host in dict.fromkeys(hosts)
    )


class Coder(Protocol):
    """Codes what one rank exchanges, for its host, with the ranks of other hosts; see ``Call.coder``.

    Numbers are a stripe of the sum over the host, float32, of which every host owns a part of ``width``
    elements; the last parts may be shorter, or empty. Coded arrays are of uint8.
    """

    def wire_nbytes(self, count: int) -> int:
        """Bytes of ``count`` coded elements."""

    def encode(self, at: int, numbers: Any, width: int, coded: Any) -> None:
        """Codes the other hosts' parts; ``at`` is where the stripe begins in the message."""

    def reduce(self, at: int, numbers: Any, width: int, arrived: Any, reduced: Any) -> None:
        """Adds up this host's part in the order of hosts, and codes the sum."""

    def decode(self, numbers: Any, width: int, gathered: Any) -> None:
        """Decodes the sums of all parts."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call as every rank makes it, less the arrays.

    Attributes:
        schedule: Which rank sends what to which.
        rank: This rank.
        counts: Elements; see ``flagcx.schedule.collectives.Counts``.
        dtype: The element type.
        op: How contributions are combined, or None where nothing is.
        in_place: Whether INPUT and OUTPUT lie over each other as ``Collective.in_place_shift`` says.
        protocol: One of the transport's ways to move the data; its own choice if empty.
        part_of: The larger operation that the call is a step of, in words that must be the same on every
            rank; empty for a call of its own.
        coder: Makes, of a host's number and the number of hosts, what codes the messages between hosts; of an
            all-reduce of float32 over a transport whose ranks share memory inside hosts.
    """

    schedule: Schedule
    rank: int
    counts: Counts
    dtype: DType
    op: ReduceOp | None
    in_place: bool
    protocol: str = ""
    part_of: str = ""
    coder: Callable[[int, int], Coder] | None = None

    def __str__(self) -> str:
        s = self.schedule
        op = "" if self.op is None else f", {self.op.name}"
        return f"{s.collective} ({s.algorithm}) of {self.counts} {self.dtype.name}{op}"

    def describe(self) -> str:
        """The call in words that must be the same on every rank."""
        schedule = self.schedule
        if isinstance(self.counts, int):
            count = f"{self.counts}" + (" a rank" if COLLECTIVES[schedule.collective].blocks else "")
        else:
            count = "uneven" if schedule.collective == "alltoall" else f"{self.counts}"
        words = f"{schedule.collective} of {count} {self.dtype.name}"
        if self.op is not None:
            words += f" by {self.op.name}" + ("" if self.op.scale is None else f" x {self.op.scale!r}")
        if schedule.root is not None:
            words += f" with root {schedule.root}"
        protocol = f", {self.protocol}" if self.protocol else ""
        part_of = f", in {self.part_of}" if self.part_of else ""
        return f"{words} ({schedule.algorithm}, {schedule.chunks} chunks{protocol}){part_of}"

    def signature(self) -> int:
        """A number of 64 bits, not 0, that stands for ``describe()``."""
        return signature_of(self.describe()) or 1

    def program(self) -> Program:
        """This rank's program."""
        return self.schedule.program(self.rank)

    def layout(self, program: Program) -> ChunkLayout:
        """Where each chunk of this rank's buffers lies."""
        s = self.schedule
        return chunk_layout(
            s.collective, self.rank, s.size, s.chunks, s.root, self.counts, program.scratch_used()
        )


class Plan(Protocol):
    """A compiled call."""

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Runs the call once.

        Args:
            sendbuf: The INPUT array (contiguous, of the plan's dtype), or None where this rank has none.
            recvbuf: The OUTPUT array, or None; the same memory as ``sendbuf`` for a plan in place.
        """


class Progress(Protocol):
    """What a transport counts while it works.

    Attributes:
        sequence: Number of calls that all ranks made together.
        waited_ns: Time spent waiting for peers.
        background: Whether waits leave the core to a computation beside them.
    """

    sequence: int
    waited_ns: int
    background: bool


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What a transport is made from. Every rank of the communicator makes its own at the same time.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        hosts: The host of each rank.
        exchange: Sends bytes to all ranks and returns every rank's, in rank order.
        store: The ranks' part of the store, or None where the communicator has none.
        config: Settings.
        waits: What explains long waits, or None where there is no store.
        after_loss: For ranks that have lost others, words that no other communicator of theirs has; else
            empty.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    exchange: Callable[[bytes], list[bytes]]
    store: Store | None
    config: Config
    waits: Waits | None = None
    after_loss: str = ""


class Transport(ABC):
    """Carries arrays of one kind between the ranks of one communicator. See the module for the contract.

    Attributes:
        name: Its name for users, records and tuning tables.
        kind: ``HOST`` or ``DEVICE``.
        rank: This rank.
        size: Number of ranks.
        takes_cores: Whether moving data is work for the cores, which a computation beside it then lacks.
        cross_memory: Whether ranks read and write each other's private memory, in one copy; the rules for
            NumPy arrays on one host depend on it.
        modelled: Whether ``flagcx.cost.shared_memory`` says how long its calls take.
        shares_memory: Whether, of ranks on several hosts, those of one host share memory, through which the
            inner level of a hierarchy goes.
        link: The speed of the link between ranks where it is known beforehand, else None.
        progress: What it counts, or None if it counts nothing.
        messenger: What carries sends and receives beside collectives, any number at once; where it is None
            they go by ``transfer``, one after the other and each after the collectives before it.
    """

    name: str
    kind: ClassVar[str]
    rank: int
    size: int
    takes_cores: bool = False
    cross_memory: bool = False
    modelled: bool = False
    shares_memory: bool = False
    link: LinkSpeed | None = None
    progress: Progress | None = None
    messenger: Messenger | None = None

    @classmethod
    def open(cls, context: TransportContext) -> Transport:
        """Makes the transport, on all ranks together."""
        return cls(context)  # type: ignore[call-arg]

    @staticmethod
    def settings(config: Config) -> Mapping[str, object]:
        """The settings that change how fast it is: a tuning table holds for the same ones alone."""
        return {}

    def protocols(
        self,
        collective: str,
        algorithm: str,
        nbytes: int,
        dtype: DType | None = None,
        op: ReduceOp | None = None,
    ) -> Collection[str]:
        """The ways to move a call's data that ``Call.protocol`` may name; the same on all ranks.

        Args:
            collective: Name of the collective.
            algorithm: Name of the algorithm.
            nbytes: Bytes of the message, or of one block where the collective has blocks.
            dtype: The element type; None asks for what serves every dtype and operation.
            op: The operation, or None.

        Returns:
            Their names; none where the transport has one way only.
        """
        return ()

    @abstractmethod
    def compile(self, call: Call) -> Plan:
        """Compiles ``call``. The executor keeps the plan and runs it for every like call.

        Raises:
            OperationError: The transport cannot carry out the operation.
        """

    @abstractmethod
    def transfer(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        """Sends arrays to ranks and receives arrays from ranks, all at once; only those concerned call it.

        Args:
            sends: Arrays, and the rank each goes to.
            receives: Arrays, and the rank whose data each gets.
        """

    @abstractmethod
    def take(self, array: Any, what: str, writable: bool) -> Any:
        """Takes a caller's array without a copy, or raises ``ArrayError`` that calls it ``what``."""

    @abstractmethod
    def result(self, out: Any, what: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Takes the array that a caller gives for a result, or makes one."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        """An uninitialised array that peers reach without a copy, where the transport can."""

    def beside(self, plan: Plan) -> Plan:
        """The plan to run beside a computation in place of ``plan``; every rank runs the same of the two."""
        return plan

    def synchronize(self) -> None:  # noqa: B027
        """Waits until everything that was enqueued is done, where plans return before that."""

    def hints(self) -> list[str]:
        """Sentences that say how this rank's calls so far could have been quicker; none as a rule."""
        return []

    def has_lost(self) -> bool:
        """Whether a rank is known to have died or given up, though no call of this rank has told of it."""
        return False

    def check_end(self) -> None:  # noqa: B027
        """Checks, when all calls have been made, that the peers have made the same, as far as can be seen.

        Raises:
            MismatchError: A peer called something else, or sent what this rank has never received.
        """

    @abstractmethod
    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers that this rank cannot go on, and which rank is at fault, if that is known."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back. Further calls do nothing."""


class DeviceTransport(Transport):
    """Carries arrays on GPUs: plans enqueue on the current stream and return.

    Attributes:
        device: Number of this rank's device.
        array_class: The class of its arrays.
    """

    kind = DEVICE
    device: int
    array_class: Any

    @abstractmethod
    def submit(self, plan: Plan, sendbuf: Any, recvbuf: Any) -> Any:
        """Enqueues a plan on the communicator's own stream, after what the current stream has so far.

        Returns:
            The event that ends it, until which the arrays are kept.
        """

    @abstractmethod
    def follow(self, event: Any) -> None:
        """Makes the current stream wait for an event of ``submit``; the host goes on at once."""

    @abstractmethod
    def wait(self, event: Any, timeout_s: float) -> None:
        """Waits on the host for an event of ``submit``.

        Raises:
            PeerTimeoutError: It was not reached in time.
            CommunicationError: A rank died, gave up or did not come within the settings' time-out.
        """

    @abstractmethod
    def order(self, before: Any, after: Any) -> None:
        """Makes stream ``after`` wait for stream ``before``."""

    @abstractmethod
    def keep(self, stream: Any, *arrays: object) -> None:
        """Keeps arrays alive until a stream has done what is enqueued on it now."""
