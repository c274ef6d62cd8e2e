"""NumPy arrays between the processes of one host, through shared memory.

Foundations
-----------
* Segments without a name (``segment.py``), so that a job that dies leaves no files.
* Signals that are stored after the data that they announce. x86-64 shows stores in order; elsewhere a
  memory fence stands between (``fence.py``).
* Waiting that notices a dead, late or disagreeing peer (``signals.py``).

Plans
-----
========================  =====================================================================
``one_shot.OneShot``      all-reduce ``one_shot``; all-gather, reduce-scatter and all-to-all ``direct``,
                          blocks of up to 64 to 256 KiB: one exchange in double-buffered slots
``broadcast.Broadcast``   broadcast ``direct`` up to 64 KiB: the root leaves it, all read it
``striped.Striped``       all-reduce ``two_shot`` up to 64 KiB, four ranks or more: two exchanges
``one_piece.OnePiece``    all-reduce ``two_shot``: a message that fits into the slots
``one_piece.Exchanged``   the same of two ranks, where the message is shorter
``two_shot.TwoShotSlots`` all-reduce ``two_shot``: pieces through a ring of slots
``direct.Direct``         all-reduce ``two_shot``, large or in shared arrays: in the peers' own memory, or
                          through slots while that is quicker (``quicker.py``)
``pulled.Pulled``         the others ``direct``, longer blocks: each rank reads them where they lie
``one_shot.Barrier``      an exchange of nothing
``steps.ChannelSteps``    any schedule of any collective: messages (``channel.py``), a step's together
                          (``exchange.py``)
========================  =====================================================================

What ranks send to each other on their own goes through channels apart from these (``messages.py``).
"""

from __future__ import annotations

import threading
from types import MappingProxyType

import numpy as np

from flagcx.config import Config
from flagcx.dtypes import DType, ReduceOp
from flagcx.transport.average import averaging
from flagcx.transport.base import Call, Plan, TransportContext
from flagcx.transport.shared_memory.arena import Arena
from flagcx.transport.shared_memory.broadcast import Broadcast
from flagcx.transport.shared_memory.channel import RENDEZVOUS_NBYTES, Receive, Receiving, Sending
from flagcx.transport.shared_memory.direct import Direct
from flagcx.transport.shared_memory.exchange import Exchange
from flagcx.transport.shared_memory.messages import SharedMemoryMessenger
from flagcx.transport.shared_memory.one_piece import Exchanged
from flagcx.transport.shared_memory.one_shot import Barrier, OneShot
from flagcx.transport.shared_memory.places import Places
from flagcx.transport.shared_memory.pulled import Pulled
from flagcx.transport.shared_memory.steps import ChannelSteps
from flagcx.transport.shared_memory.striped import Striped
from flagcx.transport.shared_memory.two_shot import through_slots
from flagcx.transport.shared_memory.words import ABORTED
from flagcx.transport.steps import HostTransport, Messages

CROSS_MEMORY_PAIR_NBYTES = 32 << 10
"""What each rank must move for each peer, times their number, before one copy by a system call for each of
them beats two through slots."""
MOST_SLOTS_NBYTES, MOST_CROWDED_NBYTES = 16 << 20, 2 << 20
"""Up to here an all-reduce may be faster through slots: where each rank has a core, and where ranks share
them."""
SHARED_NBYTES = 8 << 10
"""From here on arrays that peers map are worked on where they lie."""
SHARED_TAKE = (
    "0.28 to 0.64 of the time, measured at 4 to 256 MiB with 2 and 4 ranks on 2 cores of an AMD EPYC"
)
"""What the all-reduce of an array of ``comm.empty`` takes beside that of a private array: the medians in
``bench/results/host_allreduce_epyc_2_cores.jsonl``."""
SLOTS, CROSS_MEMORY = "slots", "cross_memory"
"""The protocols: through slots of the shared memory, or by a system call between private memories."""
_NEVER = 1 << 62
_LEAST_ATTACHED_NBYTES = 4 << 10
STEP_NBYTES = 64 << 10
"""From here on the messages of steps are read where they lie; from twice as much where ranks share cores,
since the sender has to wait then."""
_ATTACH_NBYTES = MappingProxyType({"": STEP_NBYTES, SLOTS: _NEVER, CROSS_MEMORY: _LEAST_ATTACHED_NBYTES})


class SharedMemoryTransport(HostTransport):
    """Carries NumPy arrays between the ranks of one host.

    Args:
        context: The communicator.

    Raises:
        ResourceError: There is no room for shared memory.
        PeerDiedError: A peer died during init.
        PeerTimeoutError: A peer did not come in time.
    """

    name = "shared_memory"
    modelled = True

    def __init__(self, context: TransportContext) -> None:
        self.rank, self.size = context.rank, context.size
        self._arena = arena = Arena(self.rank, self.size, context.exchange, context.config)
        self.cross_memory, self.progress = arena.cross_memory, arena.signals
        arena.signals.explain(context.waits)
        if context.waits is not None:
            context.waits.show(segment=list(arena.own_handle))
        self._compiling = threading.Lock()
        self.messenger = SharedMemoryMessenger(arena, self._kind)
        self._kinds: dict[np.dtype, int] = {}

    @staticmethod
    def settings(config: Config) -> dict[str, object]:
        """The settings that change how fast it is."""
        return {"slot_nbytes": config.slot_nbytes, "cross_memory": config.cross_memory}

    def empty(self, shape, dtype) -> np.ndarray:
        """An uninitialised array in shared memory, which peers read and write without a copy."""
        return self._arena.heap.empty(shape, dtype)

    def protocols(
        self,
        collective: str,
        algorithm: str,
        nbytes: int,
        dtype: DType | None = None,
        op: ReduceOp | None = None,
    ) -> tuple[str, ...]:
        """Slots, or straight from one private memory to the other; see ``Transport.protocols``."""
        small = nbytes < 2 * _LEAST_ATTACHED_NBYTES
        own = any(plan.serves(collective, algorithm, nbytes, self.size) for plan in (OneShot, Broadcast))
        if small or own or not self.cross_memory or self.size == 1:
            return ()
        return SLOTS, CROSS_MEMORY

    def _compile(self, call: Call) -> Plan:
        with self._compiling:
            return self._compile_locked(call)

    def _compile_locked(self, call: Call) -> Plan:
        arena, schedule = self._arena, call.schedule
        signature = arena.signals.log.signature(call.describe())
        if schedule.collective == "barrier":
            return Barrier(arena, signature)
        if isinstance(call.counts, int):
            what = schedule.collective, schedule.algorithm, call.counts * call.dtype.numpy.itemsize
            if not call.protocol and OneShot.serves(*what, self.size):
                return OneShot(arena, call, signature)
            if not call.protocol and Broadcast.serves(*what, self.size):
                return Broadcast(arena, call, signature)
            if call.protocol != SLOTS and self.cross_memory and Pulled.serves(*what, self.size):
                return Pulled(arena, call, signature)
        two_shot = schedule.collective == "allreduce" and schedule.algorithm == "two_shot"
        if two_shot and call.counts and self.size > 1:
            return self._compile_two_shot(call, signature)
        attach_nbytes = _ATTACH_NBYTES[call.protocol] << arena.signals.crowded
        return averaging(call, lambda call: ChannelSteps(arena, call, signature, attach_nbytes))

    def _compile_two_shot(self, call: Call, signature: int) -> Plan:
        nbytes = int(call.counts) * call.dtype.numpy.itemsize  # type: ignore[arg-type]
        if not call.protocol and Striped.serves(nbytes, self.size):
            return Striped(self._arena, call, signature)
        if nbytes < SHARED_NBYTES:
            return through_slots(self._arena, call, signature)
        pays = nbytes >= CROSS_MEMORY_PAIR_NBYTES * self.size * (self.size - 1)
        pays = pays and not Exchanged.serves(nbytes, self._arena)
        short = nbytes <= (MOST_CROWDED_NBYTES if self._arena.signals.crowded else MOST_SLOTS_NBYTES)
        attaches = call.protocol == CROSS_MEMORY if call.protocol else pays
        crosses = self.cross_memory and attaches
        return Direct(self._arena, call, signature, crosses, crosses and short and not call.protocol)

    def transfer(self, sends: Messages, receives: Messages) -> None:
        """Sends and receives at once; see ``Transport.transfer``."""
        arrays = [a.reshape(-1).view(np.uint8) for a, _ in (*sends, *receives)]
        kinds = [self._kind(a.dtype) for a, _ in (*sends, *receives)]
        arena, lane, raw = self._arena, self._arena.steps, np.dtype(np.uint8)
        peers = [peer for _, peer in (*sends, *receives)]
        parts = [(i, 0, len(a)) for i, a in enumerate(arrays)]
        each = [*zip(peers, parts, kinds, strict=True)]
        leaving = [
            Sending(arena, lane, peer, part, raw, kind, RENDEZVOUS_NBYTES)
            for peer, part, kind in each[: len(sends)]
        ]
        coming = [
            Receiving(arena, lane, Receive(peer, part), raw, kind, None, True)
            for peer, part, kind in each[len(sends) :]
        ]
        places = Places(arena)
        places.look_up(*arrays)
        Exchange(arena, leaving, coming, True).run(arrays, places, 0)

    def _kind(self, dtype: np.dtype) -> int:
        """The signature of messages between two ranks, which belong to no call of all ranks."""
        kind = self._kinds.get(dtype)
        if kind is None:
            with self._compiling:
                kind = self._arena.signals.log.kind(f"send and receive of {dtype.name}")
            self._kinds[dtype] = kind
        return kind

    def hints(self) -> list[str]:
        """Long private arrays that are reduced again would be quicker shared; see ``Transport.hints``."""
        calls = self._arena.private_calls
        if calls < 2:
            return []
        return [
            f"{calls:,} all-reduces were of private arrays of a MiB or more; in arrays of comm.empty(shape, "
            f"dtype) they took {SHARED_TAKE}"
        ]

    def has_lost(self) -> bool:
        """Whether a rank has died or given up; see ``Transport.has_lost``."""
        signals = self._arena.signals
        return any(words[ABORTED] for words in signals.words) or bool(signals.words and signals.dead())

    def check_end(self) -> None:
        """Checks that the peers have made the same calls; see ``Transport.check_end``."""
        arena = self._arena
        received = arena.steps.received, arena.messages.received
        arena.signals.log.check_end(arena.signals.sequence, received)

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tells the peers why this rank cannot go on; see ``Transport.abort``."""
        self._arena.signals.abort(reason, culprit)

    def close(self) -> None:
        """Gives everything back; see ``Transport.close``."""
        self._arena.close()
