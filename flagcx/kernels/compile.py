"""Compiles kernels from their CUDA source without flushing subnormal numbers to zero.

``cupy.RawKernel`` appends ``-ftz=true`` to the options that it is given. Subnormal float32, bfloat16 and fp8
numbers would then be lost from sums, and those of fp8 could not even be read. So the source goes to NVRTC
without that option, and the binary is kept in the user's cache directory for the next process.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from flagcx.config import cache_directory, environment
from flagcx.kernels.source import OPTIONS

logger = logging.getLogger("flagcx")


@lru_cache(maxsize=512)
def load_kernel(cupy: Any, device: int, source: str, name: str) -> Any:
    """A kernel for a device, current or not, that all communicators of the process share.

    See ``compile_kernel``.
    """
    with cupy.cuda.Device(device):
        return compile_kernel(cupy, source, name)


def compile_kernel(cupy: Any, source: str, name: str) -> Any:
    """Compiles a kernel for the current device, or finds it in the cache.

    Args:
        cupy: The CuPy module.
        source: CUDA source that includes no header.
        name: Name of an ``extern "C"`` kernel in it.

    Returns:
        A ``cupy.cuda.function.Function``.
    """
    try:
        module = cupy.cuda.function.Module()
        module.load(_binary(cupy, source))
        return module.get_function(name)
    except (AttributeError, TypeError) as error:
        # These functions of CuPy are internal, so another version may lack them.
        logger.warning(
            "CuPy %s compiles kernels another way (%s): subnormal numbers may count as zero",
            cupy.__version__,
            error,
        )
        return cupy.RawKernel(source, name, options=OPTIONS).kernel


def _binary(cupy: Any, source: str) -> bytes:
    versions = cupy.cuda.nvrtc.getVersion(), cupy.cuda.device.get_compute_capability()
    digest = hashlib.sha256(repr((source, OPTIONS, versions)).encode()).hexdigest()
    path = cache_directory(environment()) / "kernels" / f"{digest}.cubin"
    with contextlib.suppress(OSError):
        return _intact(path.read_bytes())
    binary, _ = cupy.cuda.compiler.compile_using_nvrtc(source, OPTIONS, filename="flagcx.cu")
    _keep(path, binary)
    return binary


def _intact(kept: bytes) -> bytes:
    """A binary from the cache without its checksum; raises OSError if it is damaged."""
    binary, checksum = kept[:-32], kept[-32:]
    if hashlib.sha256(binary).digest() != checksum:
        raise OSError("a kernel in the cache is damaged")
    return binary


def _keep(path: Path, binary: bytes) -> None:
    """Puts a binary into the cache, whole or not at all; without a cache every process compiles."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(binary + hashlib.sha256(binary).digest())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
