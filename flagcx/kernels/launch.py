"""Launches of the fused kernel on the current device, compiled by NVRTC through CuPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import OperationError
from flagcx.kernels.compile import load_kernel
from flagcx.kernels.fuse import Chain, Finish, Phase, Place
from flagcx.kernels.source import NAME, THREADS, has_kernel, kernel_source

Memories = tuple[int, int, int, int]
"""Addresses of the memories that chains name by number."""

Launch = Callable[[Memories, Any], None]
"""Enqueues one phase: (addresses of the memories, stream)."""

_MAX_CHAINS = 65535
_BLOCKS_PER_PROCESSOR = 16


class FusedKernels:
    """Compiles phases to launches on one device."""

    def __init__(self, cupy: Any, device: int) -> None:
        self._cupy, self._device = cupy, device
        attributes = cupy.cuda.Device(device).attributes
        self._blocks = _BLOCKS_PER_PROCESSOR * attributes["MultiProcessorCount"]

    def compile(
        self, phases: Sequence[Phase], dtype: DType, op: ReduceOp | None, factor: float, stream: Any
    ) -> list[Launch]:
        """Makes the launches of one step.

        Args:
            phases: As ``flagcx.kernels.fuse`` makes them.
            dtype: The element type.
            op: How sources are combined.
            factor: The factor or divisor of chains with a ``Finish``.
            stream: A stream that is not being captured, for the copies of the tables.

        Raises:
            OperationError: The operation is a ufunc that CuPy lacks.
        """
        if not has_kernel(dtype, op):
            assert op is not None
            return [_generic(self._cupy, phase, dtype, op, factor) for phase in phases]
        function = load_kernel(self._cupy, self._device, kernel_source(dtype, op), NAME)
        parts = [p[i : i + _MAX_CHAINS] for p in phases for i in range(0, len(p), _MAX_CHAINS)]
        return [self._fused(function, part, dtype, factor, stream) for part in parts]

    def _fused(self, function: Any, chains: Phase, dtype: DType, factor: float, stream: Any) -> Launch:
        rows: list[tuple[int, ...]] = []
        sources: list[tuple[int, int]] = []
        for chain in chains:
            rows.append((*chain.to, chain.count, len(sources), len(chain.sources), int(chain.finish)))
            sources += chain.sources
        numbers = np.array([*(n for row in rows for n in row), *(n for s in sources for n in s)], np.int64)
        with stream:
            table = self._cupy.asarray(numbers)
        stream.synchronize()
        pack = THREADS * max(1, 16 // dtype.numpy.itemsize)
        wanted = -(-max(c.count for c in chains) // pack)
        grid = max(1, min(wanted, self._blocks // len(chains))), len(chains)
        at = table.data.ptr, table.data.ptr + 6 * len(rows) * 8

        def launch(memories: Memories, stream: Any, table: Any = table) -> None:  # keeps the table alive
            function(grid, (THREADS,), (*at, *memories, factor), stream=stream)

        return launch


def _generic(cupy: Any, chains: Phase, dtype: DType, op: ReduceOp, factor: float) -> Launch:
    """One phase of a caller's own operation: its CuPy kernel, launched once for each source."""
    combine, element = cupy_function(cupy, op), dtype.numpy

    def view(memories: Memories, place: Place, count: int) -> Any:
        start = memories[place[0]] + place[1] * element.itemsize
        memory = cupy.cuda.UnownedMemory(start, count * element.itemsize, None)
        return cupy.ndarray((count,), element, cupy.cuda.MemoryPointer(memory, 0))

    def run(chain: Chain, memories: Memories) -> None:
        to = view(memories, chain.to, chain.count)
        first, *others = (view(memories, source, chain.count) for source in chain.sources)
        for other in others:
            combine(first, other, to)
            first = to
        if chain.finish is Finish.SCALE:
            cupy.multiply(first, factor, to)
        elif not others:
            to[...] = first

    def launch(memories: Memories, stream: Any) -> None:
        with stream:
            for chain in chains:
                run(chain, memories)

    return launch


def cupy_function(cupy: Any, op: ReduceOp) -> Callable:
    """The function that combines two CuPy arrays for an operation that has no fused kernel.

    Args:
        cupy: The CuPy module.
        op: Its ``ufunc`` is a NumPy ufunc, whose namesake CuPy must have, or a CuPy ufunc or
            ``ElementwiseKernel`` of two inputs and one output.

    Raises:
        OperationError: CuPy has no function of that name.
    """
    if not isinstance(op.ufunc, np.ufunc):
        return op.ufunc
    found = getattr(cupy, op.ufunc.__name__, None)
    if found is None:
        raise OperationError(
            f"op={op.name!r} is a NumPy ufunc that CuPy has not; expected a ufunc that both have, such as "
            f"np.hypot, or ReduceOp(name, kernel, kinds) with a cupy.ElementwiseKernel of two inputs"
        )
    return found
