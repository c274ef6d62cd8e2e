"""NCCL's symmetric kernels (2.27 or later): memory of NCCL's own, registered as a window on every rank.

CuPy's binding has none of it, so this calls the library itself, with a communicator of its own.
"""

from __future__ import annotations

import ctypes
from typing import Any

_FLOAT32, _BFLOAT16, _SUM, _SYMMETRIC = 7, 9, 0, 1
_SINCE = 22700


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class SymmetricNccl:
    """The ranks of a communicator in one of NCCL's, with a window of memory.

    Args:
        comm: The communicator.
        cupy: The CuPy module.

    Raises:
        RuntimeError: NCCL has no windows, or refuses them here; on every rank.
    """

    def __init__(self, comm: Any, cupy: Any) -> None:
        self._comm, self._cupy, self._lib = comm, cupy, ctypes.CDLL("libnccl.so.2")
        if comm.size > cupy.cuda.runtime.getDeviceCount():
            raise RuntimeError("ranks share a GPU")
        version, mine = ctypes.c_int(), _Id()
        self._lib.ncclGetVersion(ctypes.byref(version))
        if version.value < _SINCE or not hasattr(self._lib, "ncclCommWindowRegister"):
            raise RuntimeError(f"NCCL {version.value} has no windows, which came with 2.27")
        if comm.rank == 0:
            self._check("ncclGetUniqueId", ctypes.byref(mine))
        mine = _Id.from_buffer_copy(comm.broadcast_object(bytes(bytearray(mine))))
        self._lib.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _Id, ctypes.c_int]
        self._handle, self._window, self._memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._check("ncclCommInitRank", ctypes.byref(self._handle), comm.size, mine, comm.rank)
        self._nbytes = 0
        self.empty(4096, cupy.dtype("float32"))

    def _check(self, name: str, *args: Any) -> None:
        status = getattr(self._lib, name)(*args)
        if any(self._comm.allgather_object(status)) if name != "ncclGetUniqueId" else status:
            raise RuntimeError(f"{name} gave {status} on rank {self._comm.rank}")

    def empty(self, nbytes: int, dtype: Any) -> Any:
        """An array in the window, which all ranks make together; those made before may be gone."""
        if nbytes > self._nbytes:
            if self._nbytes:
                self._check("ncclCommWindowDeregister", self._handle, self._window)
                self._check("ncclMemFree", self._memory)
            self._check("ncclMemAlloc", ctypes.byref(self._memory), ctypes.c_size_t(nbytes))
            window = self._handle, self._memory, ctypes.c_size_t(nbytes), ctypes.byref(self._window)
            self._check("ncclCommWindowRegister", *window, ctypes.c_int(_SYMMETRIC))
            self._nbytes = nbytes
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(self._memory.value, nbytes, self)
        return self._cupy.ndarray((nbytes // dtype.itemsize,), dtype, cuda.MemoryPointer(memory, 0))

    def allreduce(self, x: Any, stream: Any) -> None:
        """Adds up an array of ``empty`` in place, on a stream."""
        kind = _FLOAT32 if x.dtype.itemsize == 4 else _BFLOAT16
        at, count = ctypes.c_void_p(x.data.ptr), ctypes.c_size_t(x.size)
        status = self._lib.ncclAllReduce(at, at, count, kind, _SUM, self._handle, ctypes.c_void_p(stream.ptr))
        if status:
            raise ValueError(f"ncclAllReduce gave {status}")
