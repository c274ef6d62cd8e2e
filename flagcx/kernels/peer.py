"""The source of the kernels that work in the peers' memory, and the plan of that memory.

One kernel is made for each form (what is done), dtype and operation, number of ranks and reach (one GPU or
several). Nothing else is fixed: counts, addresses and grids are arguments.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import OperationError
from flagcx.kernels.peer_cuda import COMMON, INTRINSICS
from flagcx.kernels.peer_exchange import EXCHANGE
from flagcx.kernels.peer_packets import PACKETS
from flagcx.kernels.source import conversions, element_source, float16_conversions, has_kernel

PEER_PACKETS, PEER_MEMORY = "peer_packets", "peer_memory"
"""The protocols by which these kernels move data, as ``Call.protocol`` names them: packets with a flag inside
each, for small messages, and chunks, for all."""

MOST_RANKS = 16
"""Ranks that one communicator may have."""

WARP = 32
"""Threads of a warp; one more than those that move data sends a block's flags."""

PACKET_THREADS = 512
MOST_PACKETS = 512
"""Packs of 16 bytes that a block can push to a peer in a call of ``flagcx_packets``."""

_BARE_PACKS = 16384
"""Packs of bare packets that a block can push in a call, over all ranks."""

OFFSET_BITS = 44
"""Bits of an array's name that say where it lies in its segment; those above number the segment."""

FORMS = ("one_shot", "two_shot", "reduce_scatter", "allgather", "alltoall", "broadcast")
"""What a kernel does: the two schedules of all-reduce, and the other collectives."""

REDUCING = FORMS[:3]
PACKET_FORMS = ("one_shot", "two_shot", "reduce_scatter", "allgather", "alltoall")
"""Those that there are packets for. In a broadcast the root hears from nobody, which packets need."""

_FLIGHT = 8
_POLLS = 1023
_PAGE = 4096


class PeerArgs(ctypes.Structure):
    """The one argument of a kernel; the same as ``Args`` in its source."""

    _fields_ = (
        ("peer", ctypes.c_uint64 * MOST_RANKS),
        ("given", ctypes.c_uint64),
        ("result", ctypes.c_uint64),
        ("given_name", ctypes.c_uint64),
        ("result_name", ctypes.c_uint64),
        ("segments", ctypes.c_uint64),
        ("words", ctypes.c_uint64),
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


@dataclass(frozen=True, slots=True)
class Shape:
    """How ``flagcx_exchange`` is built.

    Attributes:
        work: Threads of a block that move data.
        resident: Blocks that fit on a multiprocessor at once, at least.
        lag: Chunks between two stages.
        slots: Chunks that a box holds; more than twice ``lag``.
        box_nbytes: Bytes of a slot, over all ranks.
    """

    work: int
    resident: int
    lag: int
    slots: int
    box_nbytes: int


# Processes that share a GPU get multiprocessors of their own, so their blocks are large; what is between the
# stages should stay in the cache. Between GPUs a flag takes long behind the data of all blocks.
_TOGETHER = Shape(512, 1, 1, 3, 64 << 10)
_APART = Shape(256, 2, 2, 5, 64 << 10)


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """Where everything lies in the memory that a rank shares with its peers.

    Attributes:
        ranks: Number of ranks.
        blocks: Blocks of threads that have a place there; no launch may have more.
        one_gpu: Whether all ranks use one GPU.

    Example:
        >>> PeerLayout(2, 8, one_gpu=True).most_chunk
        2048
    """

    ranks: int
    blocks: int
    one_gpu: bool

    @property
    def shape(self) -> Shape:
        """How the kernels are built."""
        return _TOGETHER if self.one_gpu else _APART

    @property
    def most_chunk(self) -> int:
        """Packs of 16 bytes that a slot of a box holds."""
        shape = self.shape
        return max(shape.box_nbytes // 16 // self.ranks // shape.work, 1) * shape.work

    @property
    def most_bare(self) -> int:
        """Packs that a block can push to a peer as bare packets in one call."""
        return _BARE_PACKS // self.ranks

    @property
    def places(self) -> dict[str, int]:
        """Offset in bytes of each part, by its name in the kernels' source, and the size as ``NBYTES``."""
        flags = self.blocks * MOST_RANKS * 4
        boxes = self.blocks * self.shape.slots * self.ranks * self.most_chunk * 16
        sizes = {
            "AT_STATE": self.blocks * 32,
            "AT_FIRST": flags,
            "AT_SECOND": flags,
            "AT_END": flags,
            "AT_HELLO": self.blocks * MOST_RANKS * 32,
            "AT_PACKETS": self.blocks * 2 * self.ranks * MOST_PACKETS * 32,
            "AT_BARE": self.blocks * 2 * self.ranks * self.most_bare * 16,
            "AT_INBOX": boxes,
            "AT_OUTBOX": boxes,
        }
        places, at = {}, 0
        for name, nbytes in sizes.items():
            places[name] = at
            at += -(-nbytes // _PAGE) * _PAGE
        places["NBYTES"] = at
        return places

    @property
    def nbytes(self) -> int:
        """Bytes of it all."""
        return self.places["NBYTES"]

    @property
    def cleared_nbytes(self) -> int:
        """Bytes from the start whose bits must be 0 before the first launch; from ``AT_BARE`` on, 1."""
        return self.places["AT_BARE"]


@dataclass(frozen=True, slots=True)
class PeerKernel:
    """Names one kernel.

    Attributes:
        form: One of ``FORMS``.
        packets: Whether it sends packets; else chunks.
        bare: Whether the packets are bare.
        dtype: The element type; for a form that combines nothing any of the same size will do.
        op: How elements are combined; None where they are not.
        layout: The memory.
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
            intrinsics: Stands for the GPU's part.
            changed: Constants that differ from this module's, by their names in the source.

        Raises:
            OperationError: There is no kernel for the operation.
        """
        if self.form in REDUCING and not has_kernel(self.dtype, self.op):
            name = "None" if self.op is None else self.op.name
            raise OperationError(f"there is no kernel for op={name!r} of {self.dtype.name} arrays")
        shape = self.layout.shape
        values = {
            "RANKS": self.layout.ranks, "MOST_RANKS": MOST_RANKS, "SLOTS": shape.slots, "LAG": shape.lag,
            "WORK": shape.work, "RESIDENT": shape.resident, "FLIGHT": _FLIGHT, "POLLS": _POLLS,
            "MOST_CHUNK": self.layout.most_chunk, "MOST_PACKETS": MOST_PACKETS,
            "PACKET_THREADS": PACKET_THREADS, "OFFSET_BITS": OFFSET_BITS,
            "PULLS": int(self.layout.one_gpu), "BARE": int(self.bare), "MOST_BARE": self.layout.most_bare,
            "OTHER_NAN": _OTHER_NANS.get(self.dtype.name, "0u"),
            "FORM": self.form.upper(), **{form.upper(): i for i, form in enumerate(FORMS)},
            **{name: f"{at}ull" for name, at in self.layout.places.items()}, **changed,
        }  # fmt: skip
        head = "#define FLAGCX_DEVICE __device__ __forceinline__\n" if intrinsics is INTRINSICS else ""
        head += f'#define SCOPE "{"gpu" if self.layout.one_gpu else "sys"}"\n'
        head += "".join(f"#define {name} {value}\n" for name, value in values.items())
        body = PACKETS if self.packets else EXCHANGE
        half = float16_conversions() if intrinsics is INTRINSICS else ""
        return head + conversions() + half + self._elements() + intrinsics + COMMON + body

    def _elements(self) -> str:
        if self.form in REDUCING:
            return element_source(self.dtype, self.op)
        element = self.dtype.numpy
        unit = f"u{8 * element.alignment}"
        pair = element.itemsize > element.alignment  # the two parts of a complex number
        return f"typedef struct {{ {unit} a, b; }} T;\n" if pair else f"typedef {unit} T;\n"


# What travels in place of a word of four bytes with all bits set: NaN too, in each of its parts.
_OTHER_NANS = {
    "float32": "0xfffffffeu", "complex64": "0xfffffffeu", "float16": "0xfffffffeu", "bfloat16": "0xfffffffeu",
    "float8_e4m3fn": "0xffffff7fu", "float8_e5m2": "0xffffff7fu",
}  # fmt: skip


def may_be_bare(form: str, dtype: DType) -> bool:
    """Whether bare packets can carry a form's elements."""
    return form in REDUCING and dtype.name in _OTHER_NANS


def has_peer_kernel(form: str, dtype: DType, op: ReduceOp | None) -> bool:
    """Whether there is a kernel for a form, dtype and operation. A scaled sum has none."""
    if form not in REDUCING:
        return True
    return op is not None and op.scale is None and has_kernel(dtype, op)
