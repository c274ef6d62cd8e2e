"""NumPy arrays between the processes of one host, through shared memory.

What it leans on
----------------
* Segments without a name (``segment.py``), so that nothing is left behind whatever happens.
* Signals that are stored after the data they speak of. x86-64 shows stores in order; elsewhere a
  memory fence stands between (``fence.py``).
* Waiting that notices a dead, late or disagreeing peer (``signals.py``).

Ways through it
---------------
========================  =====================================================================
``one_shot.OneShot``      all-reduce ``one_shot``, up to 64 KiB: one exchange in double-buffered slots
``two_shot.TwoShotSlots`` all-reduce ``two_shot``: pieces through a ring of slots
``direct.Direct``         all-reduce ``two_shot``, large or in shared arrays: in the peers' own memory
``one_shot.Barrier``      a barrier is the entry in the ledger itself
``steps.Steps``           any schedule of any collective
========================  =====================================================================
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from flagcx.arguments import host_array, result_array
from flagcx.config import Config
from flagcx.dtypes import check_for_host
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Buffer
from flagcx.transport.base import Call, Plan
from flagcx.transport.shared_memory.arena import ONE_SHOT_NBYTES, Arena
from flagcx.transport.shared_memory.channel import RENDEZVOUS_NBYTES, Arrival, Exchange, run_exchange
from flagcx.transport.shared_memory.direct import Direct
from flagcx.transport.shared_memory.one_shot import Barrier, OneShot
from flagcx.transport.shared_memory.reduction import Scaled
from flagcx.transport.shared_memory.signals import Signals
from flagcx.transport.shared_memory.steps import Steps
from flagcx.transport.shared_memory.two_shot import TwoShotSlots

CROSS_MEMORY_PAIR_NBYTES = 32 << 10
"""What each rank must move for each peer, times their number, before one copy by a system call for each of
them beats two through slots."""
SHARED_NBYTES = 8 << 10
"""From here on arrays that peers map are worked on where they lie."""
SLOTS, CROSS_MEMORY = "slots", "cross_memory"
"""The protocols: through slots of the shared memory, or by a system call between private memories."""
_NEVER = 1 << 62
_LEAST_ATTACHED_NBYTES = 4 << 10
_ATTACH_NBYTES = MappingProxyType(
    {"": RENDEZVOUS_NBYTES, SLOTS: _NEVER, CROSS_MEMORY: _LEAST_ATTACHED_NBYTES}
)


class SharedMemoryTransport:
    """Carries NumPy arrays between the ranks of one host.

    Args:
        rank: This rank.
        size: Number of ranks.
        exchange: Sends bytes to all ranks and returns everybody's, in rank order.
        config: Settings.

    Attributes:
        takes_cores: Whether moving data is work for the cores, which a computation then lacks.

    Raises:
        ResourceError: There is no room for shared memory.
        PeerDiedError: A peer died during init.
        PeerTimeoutError: A peer did not come in time.
    """

    name = "shared_memory"
    takes_cores = True

    def __init__(
        self, rank: int, size: int, exchange: Callable[[bytes], list[bytes]], config: Config
    ) -> None:
        self.rank, self.size = rank, size
        self._arena = Arena(rank, size, exchange, config)
        self._compiling = threading.Lock()
        self._kinds: dict[np.dtype, int] = {}

    @staticmethod
    def settings(config: Config) -> dict[str, object]:
        """The settings that change how fast it is."""
        return {"slot_nbytes": config.slot_nbytes, "cross_memory": config.cross_memory}

    @property
    def cross_memory(self) -> bool:
        """Whether ranks read and write each other's private memory."""
        return self._arena.cross_memory

    def empty(self, shape, dtype) -> np.ndarray:
        """An uninitialised array in shared memory, which peers read and write without a copy."""
        return self._arena.heap.empty(shape, dtype)

    def shared_nbytes(self) -> int:
        """Bytes in living arrays of ``empty``."""
        return self._arena.heap.used_nbytes()

    @property
    def progress(self) -> Signals:
        """Counts the calls (``sequence``) and the time spent waiting for peers (``waited_ns``)."""
        return self._arena.signals

    def protocols(self, collective: str, algorithm: str, nbytes: int) -> tuple[str, ...]:
        """The ways in which a call's data may move; one empty word where there is no choice.

        Args:
            collective: Name of the collective.
            algorithm: Name of the algorithm.
            nbytes: Bytes of the message, or of one block where the collective has blocks.
        """
        small = nbytes < 2 * _LEAST_ATTACHED_NBYTES
        one_exchange = collective == "allreduce" and algorithm == "one_shot" and nbytes <= ONE_SHOT_NBYTES
        if small or one_exchange or not self.cross_memory or self.size == 1:
            return ("",)
        return SLOTS, CROSS_MEMORY

    def compile(self, call: Call) -> Plan:
        """See ``transport.base.Transport``.

        Raises:
            OperationError: The operation is a kernel for GPUs.
        """
        check_for_host(call.op)
        with self._compiling:
            return self._compile_scaled(call)

    def _compile_scaled(self, call: Call) -> Plan:
        if call.op is None or call.op.scale is None:
            return self._compile(call)
        whole = call.in_place and not COLLECTIVES[call.schedule.collective].blocks
        return Scaled(self._compile(replace(call, in_place=whole)), call.op.scale, whole)

    def _compile(self, call: Call) -> Plan:
        signature = self._arena.signals.signature(call.describe())
        if call.schedule.collective == "barrier":
            return Barrier(self._arena, call, signature)
        if call.schedule.collective == "allreduce" and call.counts and self.size > 1:
            special = self._compile_allreduce(call, signature)
            if special is not None:
                return special
        program = call.program()
        return Steps(
            self._arena,
            program,
            call.layout(program),
            call.dtype,
            call.op,
            _overlay(call),
            signature,
            _ATTACH_NBYTES[call.protocol],
        )

    def _compile_allreduce(self, call: Call, signature: int) -> Plan | None:
        nbytes = int(call.counts) * call.dtype.numpy.itemsize  # type: ignore[arg-type]
        if call.schedule.algorithm == "one_shot" and nbytes <= ONE_SHOT_NBYTES:
            return OneShot(self._arena, call, signature)
        if call.schedule.algorithm == "two_shot":
            if nbytes >= SHARED_NBYTES:
                long = nbytes >= CROSS_MEMORY_PAIR_NBYTES * self.size * (self.size - 1)
                cross_memory = self.cross_memory and (
                    call.protocol == CROSS_MEMORY if call.protocol else long
                )
                return Direct(self._arena, call, signature, cross_memory)
            return TwoShotSlots(self._arena, call, signature)
        return None

    def transfer(
        self, sends: Sequence[tuple[np.ndarray, int]], receives: Sequence[tuple[np.ndarray, int]]
    ) -> None:
        """Sends and receives at once; only the ranks concerned call it.

        Args:
            sends: Arrays, and the rank each goes to.
            receives: Arrays, and the rank whose data each gets.
        """
        arrays = [a.reshape(-1).view(np.uint8) for a, _ in (*sends, *receives)]
        kinds = [self._kind(a.dtype) for a, _ in (*sends, *receives)]
        whole = [(i, 0, len(a)) for i, a in enumerate(arrays)]
        departures = tuple((peer, whole[i]) for i, (_, peer) in enumerate(sends))
        arrivals = tuple(
            Arrival(peer, whole[len(sends) + i], False, False, False, ())
            for i, (_, peer) in enumerate(receives)
        )
        run_exchange(self._arena, Exchange(departures, arrivals), arrays, kinds, point_to_point=True)

    def _kind(self, dtype: np.dtype) -> int:
        """What messages between two ranks are told by: there is no call that all make."""
        kind = self._kinds.get(dtype)
        if kind is None:
            kind = self._kinds[dtype] = self._arena.signals.kind(f"send and receive of {dtype.name}")
        return kind

    def check_end(self) -> None:
        """Looks, when all calls have been made, whether the peers have made the same, as far as can be seen.

        Raises:
            MismatchError: A peer called something else lately, or sent what this rank has never received.
        """
        self._arena.signals.examine_end(self._arena.taken)

    @staticmethod
    def take(array, what: str, writable: bool) -> np.ndarray:
        """Takes a caller's array. See ``flagcx.arguments.host_array``."""
        return host_array(array, what, writable=writable)

    @staticmethod
    def result(out, what: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Takes or makes the array of a result. See ``flagcx.arguments.result_array``."""
        return result_array(out, what, shape, dtype)

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers that this rank cannot go on, and whose fault it is."""
        self._arena.signals.abort(reason, culprit)

    def close(self) -> None:
        """Gives everything back. Idempotent."""
        self._arena.close()


def _overlay(call: Call) -> int | None:
    """How far INPUT elements lie behind the OUTPUT elements that are the same memory."""
    if not call.in_place:
        return None
    s = call.schedule
    shift = COLLECTIVES[s.collective].in_place_shift(call.rank, s.size, s.chunks, s.root)
    if shift is None:
        return None
    where = call.layout(call.program())
    given, result = shift
    return where.bounds[Buffer.INPUT][given] - where.bounds[Buffer.OUTPUT][result]
