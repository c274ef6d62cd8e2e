"""The source of the kernels that access the peers' memory, and the layout of that memory.

There is one kernel for each form (the collective and its algorithm), dtype, operation, number of ranks, and
for ranks on one GPU or on several. Counts, addresses and grids are arguments.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import OperationError
from flagcx.kernels.peer_cuda import COMMON, INTRINSICS
from flagcx.kernels.peer_exchange import EXCHANGE
from flagcx.kernels.peer_packets import PACKETS
from flagcx.kernels.source import (
    CONVERSIONS,
    DEVICE_FUNCTION,
    FLOAT16_CONVERSIONS,
    PACK,
    element_source,
    has_kernel,
)

PEER_PACKETS, PEER_MEMORY = "peer_packets", "peer_memory"
"""The protocols by which these kernels move data, as ``Call.protocol`` names them: packets with a flag inside
each, for small messages, and chunks, for all."""
PROTOCOLS = (PEER_PACKETS, PEER_MEMORY)

MOST_RANKS = 16
"""Most ranks of a communicator."""

WARP = 32
"""Threads of a warp. A block has one warp for its flags besides those that move data."""

PACKET_THREADS = 512
MOST_PACKETS = 512
"""Most packs of 16 bytes that a block can push to a peer in a call of ``flagcx_packets``."""

_BARE_PACKS = 16384
"""Most packs that a block can push as bare packets in a call, over all ranks."""

OFFSET_BITS = 44
"""An array's handle is the number of its segment plus one, times 2^44, plus its offset in the segment."""

FORMS = ("one_shot", "two_shot", "reduce_scatter", "reduce", "allgather", "alltoall", "broadcast", "barrier")
"""The two algorithms of all-reduce, and the other collectives."""

REDUCING = FORMS[:4]
CHUNK_FORMS = FORMS[:-1]
"""The forms with a kernel that moves chunks. All have one that sends packets."""

TWO_AT_ONCE = 4
"""What a kernel tells the host, besides 1 for a wait that timed out: two launches of the rank ran at once."""

_PAIR_CHANNELS = 32
FLIGHT = 8
POLLS = 1023
_PAGE = 4096


class PeerArgs(ctypes.Structure):
    """The only argument of a kernel; ``Args`` in its source."""

    _fields_ = (
        ("peer", ctypes.c_uint64 * MOST_RANKS),
        ("sendbuf", ctypes.c_uint64),
        ("recvbuf", ctypes.c_uint64),
        ("sendbuf_handle", ctypes.c_uint64),
        ("recvbuf_handle", ctypes.c_uint64),
        ("segments", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("part", ctypes.c_int64),
        ("factor", ctypes.c_double),
        ("chunk", ctypes.c_uint32),
        ("steps", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("finish", ctypes.c_int32),
        ("pull", ctypes.c_int32),
    )


class BlockArgs(PeerArgs):
    """The argument of a reduce-scatter's kernels, whose blocks may differ in size."""

    _fields_ = (("starts", ctypes.c_int64 * (MOST_RANKS + 1)),)  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The constants of ``flagcx_exchange``.

    Attributes:
        work: Threads of a block that move data.
        resident: Least number of blocks that are on a multiprocessor at once.
        lag: Chunks between two stages.
        slots: Chunks that a box holds; more than twice ``lag``.
        box_nbytes: Bytes of a slot, over all ranks.
    """

    work: int
    resident: int
    lag: int
    slots: int
    box_nbytes: int


# Processes that share a GPU get multiprocessors of their own, so their blocks are large, and the chunks
# between two stages should stay in the cache. Between GPUs a flag waits for the data of all blocks.
_ONE_GPU = KernelShape(512, 1, 1, 3, 64 << 10)
_SEVERAL_GPUS = KernelShape(256, 2, 2, 5, 64 << 10)


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """The layout of the memory that a rank shares with its peers.

    Attributes:
        ranks: Number of ranks.
        blocks: Blocks of threads that have a place there, the most of any launch.
        one_gpu: Whether all ranks use one GPU.
        clusters: Whether all GPUs have clusters of blocks.

    Example:
        >>> PeerLayout(2, 8, one_gpu=True).most_chunk
        2048
    """

    ranks: int
    blocks: int
    one_gpu: bool
    clusters: bool = False

    @property
    def shape(self) -> KernelShape:
        """The constants of the kernels."""
        return _ONE_GPU if self.one_gpu else _SEVERAL_GPUS

    @property
    def most_chunk(self) -> int:
        """Most packs of 16 bytes of a chunk: those that a slot of a box holds."""
        shape = self.shape
        return max(shape.box_nbytes // 16 // self.ranks // shape.work, 1) * shape.work

    @property
    def most_bare(self) -> int:
        """Most packs that a block can push to a peer as bare packets in one call."""
        return _BARE_PACKS // self.ranks

    # Of ``flagcx_move``, whose channels of collectives come before those of sends and receives:

    @property
    def channels(self) -> int:
        """Channels of each pair of ranks for collectives: where there are several pairs, twice the blocks."""
        return self.blocks if self.ranks <= 2 else -(-2 * self.blocks // (self.ranks - 1))

    @property
    def pair_channels(self) -> int:
        """Channels of each pair of ranks for sends and receives."""
        return min(self.blocks, _PAIR_CHANNELS if self.ranks > 4 else 2 * _PAIR_CHANNELS)

    @property
    def boxes(self) -> int:
        """Chunks under way in a channel; a power of 2, and more than ``lag``."""
        return 4

    @property
    def box_packs(self) -> int:
        """Most packs of 16 bytes of a chunk of a channel."""
        return 4 * self.shape.work if self.one_gpu else 8 * self.shape.work

    @property
    def small_packs(self) -> int:
        """Most packs of a message that go through one channel as packets."""
        return 1024

    @property
    def packs_each(self) -> int:
        """Packs for which a message that goes as packets gets another channel."""
        return 256

    @property
    def most_small(self) -> int:
        """Most bytes of a message that goes as packets, which double them; beyond, chunks are faster."""
        return (1 << 20) // max(self.ranks - 1, 1)

    @property
    def places(self) -> dict[str, int]:
        """Offset in bytes of each part, by its name in the kernels' source, and the size as ``NBYTES``."""
        flags = self.blocks * MOST_RANKS * 4
        boxes = self.blocks * self.shape.slots * self.ranks * self.most_chunk * 16
        channels = self.channels + self.pair_channels
        pairs = channels * MOST_RANKS
        sizes = {
            "AT_STATE": self.blocks * 32,
            "AT_FIRST": flags,
            "AT_SECOND": flags,
            "AT_END": flags,
            "AT_HANDLES": self.blocks * MOST_RANKS * 32,
            "AT_PACKETS": self.blocks * 2 * self.ranks * MOST_PACKETS * 32,
            "AT_PAIRS": pairs * 16,
            "AT_BOXES_SENT": pairs * 4,
            "AT_BOXES_TAKEN": pairs * 4,
            "AT_CALLS_TAKEN": pairs * 4,
            "AT_POSTED": 2 * MOST_RANKS * 4,
            "AT_SIZES": pairs * 2 * 16,
            "AT_PAIR_PACKETS": channels * 2 * self.ranks * self.small_packs * 32,
            "AT_BARE": self.blocks * 2 * self.ranks * self.most_bare * 16,
            "AT_INBOX": boxes,
            "AT_OUTBOX": boxes,
            "AT_PAIR_BOXES": channels * self.boxes * self.ranks * self.box_packs * 16,
        }
        places, at = {}, 0
        for name, nbytes in sizes.items():
            places[name] = at
            at += -(-nbytes // _PAGE) * _PAGE
        places["NBYTES"] = at
        return places

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory."""
        return self.places["NBYTES"]

    @property
    def cleared_nbytes(self) -> int:
        """Bytes from the start that must be 0 before the first launch; from ``AT_BARE`` on all bits are 1."""
        return self.places["AT_BARE"]


@dataclass(frozen=True, slots=True)
class PeerKernel:
    """One kernel.

    Attributes:
        form: One of ``FORMS``.
        packets: Whether it sends packets; else chunks.
        dtype: The element type; only its size matters to a form that does not reduce.
        op: The reduction, or None.
        layout: The memory.
        bare: Whether the packets are bare.
    """

    form: str
    packets: bool
    dtype: DType
    op: ReduceOp | None
    layout: PeerLayout
    bare: bool = False

    @property
    def name(self) -> str:
        """The kernel's name in its source."""
        return "flagcx_packets" if self.packets else "flagcx_exchange"

    def source(self, intrinsics: str = INTRINSICS, **changed: int) -> str:
        """The whole CUDA source.

        Args:
            intrinsics: What takes the place of ``INTRINSICS`` on a host.
            changed: Constants to replace, by their names in the source.

        Raises:
            OperationError: There is no kernel for the operation.
        """
        if self.form in REDUCING and not has_kernel(self.dtype, self.op):
            name = "None" if self.op is None else self.op.name
            raise OperationError(f"there is no kernel for op={name!r} of {self.dtype.name} arrays")
        body = PACKETS if self.packets else EXCHANGE
        return self.prelude(intrinsics, **changed) + body

    def prelude(self, intrinsics: str = INTRINSICS, **changed: int) -> str:
        """The source without a kernel: constants, the element type, intrinsics and what kernels share."""
        shape = self.layout.shape
        values = {
            "RANKS": self.layout.ranks, "MOST_RANKS": MOST_RANKS, "SLOTS": shape.slots, "LAG": shape.lag,
            "WORK": shape.work, "RESIDENT": shape.resident, "FLIGHT": FLIGHT, "POLLS": POLLS,
            "MOST_CHUNK": self.layout.most_chunk, "MOST_PACKETS": MOST_PACKETS,
            "PACKET_THREADS": PACKET_THREADS, "OFFSET_BITS": OFFSET_BITS,
            "PACKETS_ONLY": int(self.packets), "PULLS": int(self.layout.one_gpu),
            "BARE": int(self.bare), "MOST_BARE": self.layout.most_bare,
            "TWO_AT_ONCE": TWO_AT_ONCE, "OTHER_NAN": _OTHER_NANS.get(self.dtype.name, "0u"),
            "FORM": self.form.upper(), **{form.upper(): i for i, form in enumerate(FORMS)},
            **{name: f"{at}ull" for name, at in self.layout.places.items()}, **changed,
        }  # fmt: skip
        on_gpu = intrinsics is INTRINSICS
        head = (DEVICE_FUNCTION if on_gpu else "") + CONVERSIONS + (FLOAT16_CONVERSIONS if on_gpu else "")
        head += f'#define SCOPE "{"gpu" if self.layout.one_gpu else "sys"}"\n'
        head += "".join(f"#define {name} {value}\n" for name, value in values.items())
        return head + self._elements() + intrinsics + PACK + COMMON

    def _elements(self) -> str:
        if self.form in REDUCING:
            return element_source(self.dtype, self.op)
        element = self.dtype.numpy
        unit = f"u{8 * element.alignment}"
        pair = element.itemsize > element.alignment  # the two parts of a complex number
        return f"typedef struct {{ {unit} a, b; }} T;\n" if pair else f"typedef {unit} T;\n"


# What is sent in place of a word of four bytes with all bits set: another NaN, in each of its elements.
_OTHER_NANS = {
    "float32": "0xfffffffeu", "complex64": "0xfffffffeu", "float16": "0xfffffffeu", "bfloat16": "0xfffffffeu",
    "float8_e4m3fn": "0xffffff7fu", "float8_e5m2": "0xffffff7fu",
}  # fmt: skip


def may_be_bare(form: str, dtype: DType) -> bool:
    """Whether a form can use bare packets."""
    return form in REDUCING and dtype.name in _OTHER_NANS


def has_peer_kernel(form: str, dtype: DType, op: ReduceOp | None) -> bool:
    """Whether there is a kernel for a form, dtype and operation; a scaled sum has none."""
    if form not in REDUCING:
        return True
    return op is not None and op.scale is None and has_kernel(dtype, op)
