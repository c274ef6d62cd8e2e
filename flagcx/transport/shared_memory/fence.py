"""Memory order. On x86-64 stores are seen in the order they are made, and so are loads; a signal that
is stored after the data is never seen before it, and nothing is needed. Arm and others reorder both,
so there a full fence stands between data and signal, on the writing and on the reading side.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable

from flagcx.errors import ResourceError

_ORDERED = ("x86_64", "AMD64", "i686", "i386", "s390x")
_DMB_ISH_RET = bytes.fromhex("bf3b03d5c0035fd6")  # dmb ish; ret (little endian)
_MEMBARRIER = {"ppc64le": 365, "riscv64": 283, "loongarch64": 283, "aarch64": 283}
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4


def memory_fence(machine: str | None = None) -> Callable[[], object] | None:
    """The fence that this machine needs, or None where the hardware orders stores and loads itself.

    Args:
        machine: As ``platform.machine()`` names it; this machine by default.

    Raises:
        ResourceError: The machine reorders and no fence can be had.
    """
    machine = machine or platform.machine()
    if machine in _ORDERED:
        return None
    for make in (_from_libatomic, _from_machine_code, _from_membarrier):
        fence = make(machine)
        if fence is not None:
            return fence
    raise ResourceError(
        f"a {machine} processor needs a memory fence between data and signal, and none could be made; "
        f"install libatomic (Debian: libatomic1)"
    )


def _from_libatomic(machine: str) -> Callable[[], object] | None:
    import ctypes.util  # imports much, which few machines need

    name = ctypes.util.find_library("atomic")
    function = getattr(ctypes.CDLL(name), "atomic_thread_fence", None) if name else None
    if function is None:
        return None
    function.argtypes, function.restype = [ctypes.c_int], None
    return lambda: function(5)  # memory_order_seq_cst


def _from_machine_code(machine: str) -> Callable[[], object] | None:
    if machine not in ("aarch64", "arm64"):
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except (OSError, ValueError):
        return None
    page[: len(_DMB_ISH_RET)] = _DMB_ISH_RET
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    function = ctypes.CFUNCTYPE(None)(address)

    def fence(_page=page) -> None:
        function()

    return fence


def _from_membarrier(machine: str) -> Callable[[], object] | None:
    number = _MEMBARRIER.get(machine)
    if number is None:
        return None
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if syscall(number, _REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        return None
    return lambda: syscall(number, _GLOBAL_EXPEDITED, 0, 0)
