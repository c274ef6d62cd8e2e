"""Imports CuPy when the first GPU array is seen; an error names the missing part and its remedy."""

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
"""Handle of the per-thread default stream, which CuPy can be told to use."""
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
    """The exception to raise where CuPy cannot reach a GPU, and failed with this CUDARuntimeError."""
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
        flags: Further options of ``pip install``, followed by a blank.

    Example:
        >>> pip_command(12080)
        'pip install cupy-cuda12x nvidia-nccl-cu12'
    """
    major = 12 if driver is not None and driver < 13000 else 13
    return f"pip install {flags}cupy-cuda{major}x nvidia-nccl-cu{major}"


@contextmanager
def capture_mode(mode: int) -> Iterator[None]:
    """Sets this thread's capture mode (cuThreadExchangeStreamCaptureMode) for a ``with`` block.

    In the default mode, global, no thread may allocate or query an event while any thread captures in that
    mode, as torch does; if one does, the capture fails.

    Args:
        mode: ``THREAD_LOCAL``: captures of other threads do not restrict this one. ``RELAXED``: its own do
            not either.
    """
    driver = _driver()
    if driver is None:  # Without a driver there are no captures.
        yield
        return
    exchange, previous = driver.cuThreadExchangeStreamCaptureMode, ctypes.c_int(mode)
    exchange(ctypes.byref(previous))
    try:
        yield
    finally:
        exchange(ctypes.byref(previous))


def is_capturing(runtime: Any, stream: Any) -> bool:
    """Whether a stream is being captured into a graph; the legacy default stream cannot be.

    ``runtime`` is ``cupy.cuda.runtime``.
    """
    return stream.ptr > 1 and runtime.streamIsCapturing(stream.ptr) != 0


def driver_cuda() -> int | None:
    """The newest CUDA that the driver supports, as 1000 major + 10 minor; None without a driver."""
    driver, version = _driver(), ctypes.c_int()
    found = driver is not None and driver.cuDriverGetVersion(ctypes.byref(version)) == 0
    return version.value if found else None


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
