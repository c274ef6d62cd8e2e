"""The way to CuPy: imported when a GPU array is met, and a missing part is named with its remedy."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from flagcx.errors import MissingDependencyError

OLDEST_CUPY = (13, 6)
THREAD_LOCAL, RELAXED = 1, 2
PER_THREAD = 2
"""Handle of the default stream that each thread has for itself, if CuPy is told to use those."""
_INSUFFICIENT_DRIVER = 35


def load_cupy() -> ModuleType:
    """Imports CuPy and checks that it has a GPU to work with.

    Raises:
        MissingDependencyError: CuPy, a driver or a GPU is missing, or they do not fit together. The
            message has the pip command where one helps.
    """
    cupy = import_cupy()
    check_version(cupy.__version__)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise no_device(cupy, error) from error
    if count == 0:
        raise MissingDependencyError(
            "GPU arrays need an NVIDIA GPU, and CuPy sees none (nvidia-smi -L lists them)"
        )
    return cupy


def import_cupy() -> ModuleType:
    """Imports CuPy, whether there is a GPU or not.

    Raises:
        MissingDependencyError: It is not installed or cannot be loaded.
    """
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"GPU arrays need CuPy, which is not installed: {pip_command(driver_cuda())}"
        ) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"CuPy is installed but cannot be loaded ({str(error).splitlines()[0]}); "
            f"install it anew: {pip_command(driver_cuda())}"
        ) from error


def check_version(version: str) -> None:
    """Raises MissingDependencyError if CuPy of this version is too old."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < OLDEST_CUPY:
        oldest = ".".join(map(str, OLDEST_CUPY))
        raise MissingDependencyError(
            f"CuPy {version} is too old; flagcx needs {oldest} or later: {pip_command(driver_cuda(), '-U ')}"
        )


def no_device(cupy: Any, error: Any) -> MissingDependencyError:
    """What to say when CuPy cannot reach a GPU.

    Args:
        cupy: The CuPy module.
        error: The CUDARuntimeError of the attempt.
    """
    driver = driver_cuda()
    built = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if driver is None:
        return MissingDependencyError(
            "GPU arrays need an NVIDIA GPU and its driver, and there is no libcuda.so.1 on this machine; a "
            "container gets it by --gpus all"
        )
    if getattr(error, "status", None) == _INSUFFICIENT_DRIVER and driver // 1000 < built:
        return MissingDependencyError(
            f"CuPy is built for CUDA {built}, but the driver goes up to CUDA {driver // 1000}."
            f"{driver % 1000 // 10}: pip uninstall -y cupy-cuda{built}x nvidia-nccl-cu{built} && "
            f"{pip_command(driver)}"
        )
    return MissingDependencyError(f"GPU arrays need an NVIDIA GPU that CuPy can use, and it says: {error}")


def pip_command(driver: int | None, flags: str = "") -> str:
    """The command that installs what GPU arrays need.

    Args:
        driver: The newest CUDA that the driver supports, as 1000 major + 10 minor; None if unknown.
        flags: Further options of ``pip install``, with a blank behind.

    Example:
        >>> pip_command(12080)
        'pip install cupy-cuda12x nvidia-nccl-cu12'
    """
    major = 12 if driver is not None and driver < 13000 else 13
    return f"pip install {flags}cupy-cuda{major}x nvidia-nccl-cu{major}"


@contextmanager
def capture_mode(mode: int) -> Iterator[None]:
    """Has the driver treat this thread by another rule while a graph is captured, for a ``with`` block.

    By its first rule (global) no thread may allocate or ask for an event while any thread captures by that
    rule, as torch does; if one does, the capture fails.

    Args:
        mode: ``THREAD_LOCAL``: captures of other threads are no concern of this one. ``RELAXED``: those of
            this thread are not either.
    """
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except OSError:  # Without a driver there are no captures.
        yield
        return
    previous = ctypes.c_int(mode)
    exchange(ctypes.byref(previous))
    try:
        yield
    finally:
        exchange(ctypes.byref(previous))


def is_capturing(runtime: Any, stream: Any) -> bool:
    """Whether what is enqueued on a stream goes into a graph that is being captured.

    Args:
        runtime: ``cupy.cuda.runtime``.
        stream: A CuPy stream. The one that all threads have by default cannot be captured.
    """
    return stream.ptr > 1 and runtime.streamIsCapturing(stream.ptr) != 0


def driver_cuda() -> int | None:
    """The newest CUDA that the driver supports, as 1000 major + 10 minor; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
