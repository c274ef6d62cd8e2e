"""What ranks do to test all-reduces of rows with an epilogue on GPUs. Each returns what went wrong."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import flagcx as fc
from flagcx.dtypes import DTYPES
from flagcx.errors import FlagcxError
from flagcx.kernels.epilogue import (
    COLUMN,
    ELEMENT,
    FLOATS,
    ONE,
    Epilogue,
    check_numbers,
    operands_of,
    pieces_named,
    result_dtype,
)

BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}
NUMBERS = {"eps": 1e-5, "factor": 0.375}
EPILOGUES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "norm": (("residual", "rmsnorm"), None),
    "layernorm": (("bias", "residual", "layernorm"), None),
    "int8": (("residual", "rmsnorm", "quantize_rows"), "int8"),
    "fp8": (("rmsnorm", "quantize"), "float8_e4m3fn"),
    "no row": (("bias", "scale", "silu_mul"), None),
}
LAST = {"float32": 4e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2, "float8_e4m3fn": 0.13, "int8": 0.0}


class Call:
    """A call with data that differs in every (rank, row, column), and what its arrays must be after it.

    Args:
        comm: The communicator.
        name: One of ``EPILOGUES``.
        dtype: The dtype of the rows.
        operand: The dtype of operands for elements and columns.
        rows: Number of rows.
        columns: Elements of a row.
        seed: Of the data.
    """

    def __init__(
        self, comm: Any, name: str, dtype: str, operand: str, rows: int, columns: int, seed: int = 0
    ) -> None:
        self.comm, self.shape = comm, (rows, columns)
        names, out = EPILOGUES[name]
        self.pieces = pieces_named(names)
        self.where = f"rank {comm.rank} of {comm.size}: {name} of {rows} x {columns} {dtype}, {operand}"
        kinds = [
            BY_NAME[operand if o.shape in (ELEMENT, COLUMN) else "float32"] for o in operands_of(self.pieces)
        ]
        kind = BY_NAME[dtype]
        self.out = result_dtype(self.pieces, kind, out)
        numbers = check_numbers(self.pieces, NUMBERS)
        epilogue = Epilogue(self.pieces, numbers, tuple(kinds), self.out)
        self.data = [_numbers(seed + q, self.shape, kind.numpy) for q in range(comm.size)]
        sizes = {ELEMENT: self.shape, COLUMN: (columns,), ONE: (1,)}
        self.arrays = {
            o.name: np.array([0.03125], np.float32)
            if o.shape == ONE
            else _numbers(seed + 99 + i, sizes.get(o.shape, (rows, 1)), k.numpy)
            for i, (o, k) in enumerate(zip(operands_of(self.pieces), kinds, strict=True))
        }
        total = self.data[0].astype(np.float32)
        for x in self.data[1:]:
            total = total + x.astype(np.float32)
        self.want = {name: array.copy() for name, array in self.arrays.items()}
        self.want["out"] = np.zeros(self.shape, self.out.numpy)
        epilogue.apply(total, [self.want[o.name] for o in epilogue.operands], self.want["out"])

    def given(self) -> dict[str, Any]:
        """The call's arrays on the GPU."""
        return {name: on_gpu(array) for name, array in self.arrays.items()}

    def run(self, x: Any, out: Any, given: dict[str, Any], **options: Any) -> Any:
        """Makes the call."""
        names = tuple(piece.name for piece in self.pieces)
        numbers = {name: NUMBERS[name] for piece in self.pieces for name in piece.numbers}
        dtype = self.out.numpy if self.pieces[-1].quantizes else None
        return self.comm.allreduce_then(x, names, out=out, dtype=dtype, **given, **numbers, **options)

    def faults(self, out: Any, given: dict[str, Any], rounded: bool = True) -> list[str]:
        """What is wrong with its arrays, whose sum may be rounded; all ranks must have the same bits."""
        found, last = [], LAST[self.data[0].dtype.name] if rounded else 0.0
        for name, array in {**given, "out": out}.items():
            got = host(array)
            found += differences(f"{self.where}: {name}", got, self.want[name], last)
            digest = hashlib.sha256(got.tobytes()).hexdigest()
            if len(set(self.comm.allgather_object(digest))) > 1:
                found.append(f"{self.where}: {name} has other bits on another rank")
        return found


def _numbers(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(dtype)


def on_gpu(array: np.ndarray, offset: int = 0) -> Any:
    """The array on the GPU, ``offset`` elements after the begin of its memory."""
    import cupy

    start = offset * array.itemsize
    memory = cupy.empty(array.nbytes + start + 1, np.uint8)
    view = memory[start : start + array.nbytes]
    view.set(array.reshape(-1).view(np.uint8))
    return view.view(array.dtype).reshape(array.shape)


def host(array: Any) -> np.ndarray:
    """An array of the GPU as NumPy's."""
    return array.reshape(-1).view(np.uint8).get().view(array.dtype).reshape(array.shape)


def differences(where: str, got: np.ndarray, want: np.ndarray, last: float) -> list[str]:
    """What is wrong with an array, beyond its last bit and ``last`` of its largest value."""
    a, b = got.astype(np.float32), want.astype(np.float32)
    allowed = LAST[got.dtype.name] * np.abs(b) + last * np.abs(b).max(initial=0)
    allowed += 1.0 if got.dtype.name == "int8" else 1e-5
    far = ~(np.abs(a - b) <= allowed)
    if not far.any():
        return []
    return [f"{where}: {far.sum()} of {far.size} differ, {a[far][:3]}, expected {b[far][:3]}"]


def shapes(
    names: list[str], kinds: list[tuple[str, str]], sizes: list[tuple[int, int]], algorithms: list
) -> list[str]:
    """Epilogues of rows of several shapes, in and out of place, against the counterpart."""
    comm, faults = fc.init(), []
    for name in names:
        for dtype, operand in kinds:
            for rows, columns in sizes:
                call = Call(comm, name, dtype, operand, rows, columns)
                for number, algorithm in enumerate(algorithms):
                    x = on_gpu(call.data[comm.rank], number % 2)
                    out = on_gpu(np.zeros(call.shape, call.out.numpy))
                    given = call.given()
                    call.run(x, out, given, algorithm=algorithm)
                    faults += call.faults(out, given, algorithm != "one_shot")
                    if call.out.numpy == x.dtype:
                        given = call.given()
                        call.run(x, x, given, algorithm=algorithm)
                        faults += call.faults(x, given, algorithm != "one_shot")
                if len(faults) > 8:
                    return faults
    return faults


def every_dtype(columns: int) -> list[str]:
    """All dtypes of rows, each with operands of two."""
    kinds = [(dtype, FLOATS[(i + k) % 3]) for i, dtype in enumerate(FLOATS) for k in range(2)]
    return shapes(["norm"], kinds, [(3, columns)], ["one_shot", "two_shot", "ring"])


def replayed(times: int) -> list[str]:
    """A captured call, replayed with other data each time; calls outside the graph between."""
    import cupy

    comm, faults = fc.init(), []
    first = Call(comm, "norm", "bfloat16", "bfloat16", 5, 4096)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, out, given = on_gpu(first.data[comm.rank]), on_gpu(first.want["out"]), first.given()
        first.run(x, out, given)
        stream.synchronize()
        comm.barrier()
        stream.begin_capture()
        first.run(x, out, given)
        graph = stream.end_capture()
        for seed in range(times):
            call = Call(comm, "norm", "bfloat16", "bfloat16", 5, 4096, seed)
            for array, values in ((x, call.data[comm.rank]), *((given[n], call.arrays[n]) for n in given)):
                array.reshape(-1).view(np.uint8).set(values.reshape(-1).view(np.uint8))
            graph.launch(stream)
            stream.synchronize()
            faults += call.faults(out, given)
            comm.allreduce(cupy.ones(100, cupy.float32))
    return faults


def started_and_grouped() -> list[str]:
    """Calls that are started, that are in a group, on a stream of the caller's, and of strides."""
    import cupy

    comm, faults = fc.init(), []
    call = Call(comm, "norm", "float16", "float32", 7, 1000)
    x, out, given = on_gpu(call.data[comm.rank]), on_gpu(call.want["out"]), call.given()
    call.run(x, out, given, async_op=True).wait()
    faults += call.faults(out, given)
    out, given = on_gpu(np.zeros_like(call.want["out"])), call.given()
    with comm.group():
        call.run(x, out, given)
        comm.allreduce(cupy.ones(3))
    faults += call.faults(out, given)
    out, given = on_gpu(np.zeros_like(call.want["out"])), call.given()
    cupy.cuda.Device().synchronize()
    call.run(x, out, given, stream=cupy.cuda.Stream(non_blocking=True))
    cupy.cuda.Device().synchronize()
    faults += call.faults(out, given)
    wide = cupy.zeros((7, 2000), np.float16)
    wide[:, ::2] = x
    out, given = cupy.zeros((7, 2000), np.float16)[:, ::2], call.given()
    call.run(wide[:, ::2], out, given)
    return faults + call.faults(cupy.ascontiguousarray(out), given)


def disagreeing() -> str:
    """What the ranks get that call different epilogues."""
    comm = fc.init(timeout_s=20.0, explain_wait_s=1.0)
    call = Call(comm, "norm", "float32", "float32", 2, 64)
    x, given = on_gpu(call.data[comm.rank]), call.given()
    comm.allreduce(x.copy())
    try:
        comm.allreduce_rmsnorm(x, given["residual"], given["weight"], 1e-5 * (1 + comm.rank))
        comm._device.transport.synchronize()
        comm.close()
    except FlagcxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def chosen(sizes: list[tuple[int, int]]) -> list[str]:
    """The kind of plan for each shape, and what it was recorded as."""
    comm, found = fc.init(), []
    for rows, columns in sizes:
        call = Call(comm, "norm", "bfloat16", "bfloat16", rows, columns)
        call.run(on_gpu(call.data[comm.rank]), None, call.given())
        plans = comm._device._cache.plans
        plan = next(reversed(plans.values()))
        record = comm.profiler.records()[-1].operation
        found.append(f"{type(plan.plan).__name__} {record.algorithm} {record.protocol}")
    return found


def one_rank() -> list[str]:
    """One rank alone: the rows are the sum."""
    return shapes(["norm", "int8"], [("bfloat16", "float32")], [(3, 4096), (2, 333)], [None])
