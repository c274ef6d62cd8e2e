"""The kernels that add up rows and apply an epilogue: on the host, beside its counterpart; and compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flagcx.dtypes import DTYPES, dtype_of
from flagcx.errors import ArgumentError
from flagcx.kernels.epilogue import (
    COLUMN,
    ELEMENT,
    FLOATS,
    ONE,
    ROW,
    Epilogue,
    Operand,
    Piece,
    check_numbers,
    operands_of,
    pieces_named,
    result_dtype,
)
from flagcx.kernels.peer import PeerLayout
from flagcx.kernels.rows import LOCAL, NAME, RowKernel, RowShape
from flagcx.kernels.source import OPTIONS
from tests.kernels import nvrtc, peer_host
from tests.kernels.peer_host import BLOCKS
from tests.kernels.rows_host import RowCall, RowHost
from tests.kernels.test_peer import Wanted
from tests.ranges import exhaustive

needs_compiler = pytest.mark.skipif(peer_host.COMPILER is None, reason="no C++ compiler on this machine")
needs_nvrtc = pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
)
BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}
NUMBERS = {"eps": 1e-5, "factor": 0.375}
EPILOGUES = {
    "norm": (("residual", "rmsnorm"), None),
    "layernorm": (("bias", "residual", "layernorm"), None),
    "quantised rows": (("residual", "rmsnorm", "quantize_rows"), "int8"),
    "quantised": (("rmsnorm", "quantize"), "float8_e4m3fn"),
    "no row is looked at": (("bias", "scale", "silu_mul"), None),
}
FIRST = [("norm", "one_shot"), ("norm", "two_shot"), ("quantised rows", "one_shot")]
"""What the default run takes of epilogues and forms."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def epilogue_of(
    names: tuple, out: str | None, dtype: str, operand: str | None = None, left_out: tuple[str, ...] = ()
) -> Epilogue:
    """An epilogue whose operands for elements and columns are all of one dtype."""
    pieces = pieces_named(names)
    kind = BY_NAME[operand or dtype]
    dtypes = tuple(
        None if o.name in left_out else kind if o.shape in (ELEMENT, COLUMN) else BY_NAME["float32"]
        for o in operands_of(pieces)
    )
    return Epilogue(pieces, check_numbers(pieces, NUMBERS), dtypes, result_dtype(pieces, BY_NAME[dtype], out))


class RowsWanted:
    """Calls, and what each rank's arrays must be after them."""

    def __init__(self, host: RowHost, seed: int) -> None:
        self.host, self.random = host, np.random.default_rng(seed)
        self.calls: list[Any] = []
        self.want: list[Any] = []

    def add(
        self,
        form: str,
        epilogue: Epilogue,
        dtype: str,
        rows: int,
        columns: int,
        in_place: bool = False,
        cluster: int = 1,
        aligned: bool = False,
    ) -> None:
        """A call with data that differs in every (rank, row, column); operands are the same on all ranks."""
        self._aligned = aligned
        size = 1 if form == LOCAL else self.host.ranks
        data = [self._numbers((rows, columns), dtype) for _ in range(size)]
        shapes = {ELEMENT: (rows, columns), COLUMN: (columns,), ROW: (rows, 1), ONE: (1,)}
        arrays = [
            None if kind is None else self._operand(operand, shapes[operand.shape], kind.name)
            for operand, kind in zip(epilogue.operands, epilogue.dtypes, strict=True)
        ]
        total = data[0].astype(np.float32)
        for x in data[1:]:
            total = total + x.astype(np.float32)
        if form == "two_shot":
            total = total.astype(data[0].dtype)
        want = [None if a is None else a.copy() for a in arrays]
        result = np.zeros((rows, columns), epilogue.out.numpy)
        with np.errstate(all="ignore"):
            epilogue.apply(total, want, result)
        given = [self._placed(x) for x in data]
        out = given if in_place else [self._placed(np.zeros_like(result)) for _ in range(size)]
        each = [[None if a is None else self._placed(a) for a in arrays] for _ in range(size)]
        grid = cluster * int(self.random.integers(1, max(min(BLOCKS // cluster, rows), 1) + 1))
        ahead = columns % 3
        self.calls.append(RowCall(form, epilogue, given, each, out, grid, ahead, cluster, aligned))
        self.want.append((result, want))

    def _operand(self, operand: Operand, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if operand.shape == ONE:
            return np.array([0.03125], np.float32)
        return self._numbers(shape, dtype)

    def _numbers(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return self.random.normal(0, 2, shape).astype(BY_NAME[dtype].numpy)

    def _placed(self, array: np.ndarray) -> np.ndarray:
        """A copy that begins at a multiple of 16 bytes, or a few elements after one."""
        start = int(self.random.integers(0, 2) * self.random.integers(0, 4)) * array.itemsize
        start = 0 if self._aligned else start
        memory = np.zeros(array.nbytes + start + 32, np.uint8)
        begin = -memory.ctypes.data % 16 + start
        view = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view

    def faults(self, seed: int) -> list[str]:
        """Runs all calls; what is wrong."""
        found = [] if self.host.run(self.calls, seed) else ["the calls did not end"]
        for i, (call, wanted) in enumerate(zip(self.calls, self.want, strict=True)):
            if not isinstance(call, RowCall):
                continue
            result, arrays = wanted
            for rank, out in enumerate(call.result):
                where = f"call {i}, {call.form} of {out.shape} to {out.dtype}, rank {rank}"
                found += differences(where, out, result)
                for operand, got, want in zip(call.epilogue.operands, call.arrays[rank], arrays, strict=True):
                    if got is not None:
                        found += differences(f"{where}: {operand.name}", got, want)
                if out.tobytes() != call.result[0].tobytes():
                    found.append(f"{where}: other bits than rank 0's")
        return found


def differences(where: str, got: np.ndarray, want: np.ndarray) -> list[str]:
    """What is wrong with an array, beyond the last bit of its dtype and sums in another order."""
    last = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3, "float8_e4m3fn": 0.13, "int8": 0.0}
    a, b = got.astype(np.float32), want.astype(np.float32)
    allowed = last[got.dtype.name] * np.abs(b) + (1.0 if got.dtype.name == "int8" else 4e-6)
    far = ~(np.abs(a - b) <= allowed)
    if not far.any():
        return []
    return [f"{where}: {far.sum()} of {far.size} differ, first {a[far][:3]}, expected {b[far][:3]}"]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "form", "size"),
    [
        pytest.param(name, form, size, marks=() if first and size == 3 else pytest.mark.exhaustive)
        for name in EPILOGUES
        for form in ("one_shot", "two_shot")
        for first in [(name, form) in FIRST]
        for size in ((3, 2, 9) if first else (3,))
    ],
)
def test_rows_in_any_interleaving(directory, name, form, size):
    host = RowHost(directory, size)
    epilogue = epilogue_of(*EPILOGUES[name], "float32")
    for seed in range(3):
        wanted = RowsWanted(host, seed)
        for columns, cluster, aligned in ((61, 1, False), (64, 2, True), (61, 1, False), (64, 2, True)):
            rows = int(wanted.random.integers(1, 8))
            wanted.add(form, epilogue, "float32", rows, columns, False, cluster, aligned)
        assert wanted.faults(seed) == []


@needs_compiler
@pytest.mark.parametrize("form", ["one_shot", "two_shot"])
@pytest.mark.parametrize(
    "shape",
    [
        (96, 3, True),
        (32, 1, True),
        (100, 1, True),
        *exhaustive([(92, 2, True), (93, 3, False), (8, 2, True)]),
    ],
)
def test_blocks_that_share_rows(directory, shape, form):
    columns, cluster, aligned = shape
    wanted = RowsWanted(RowHost(directory, 2), 5)
    epilogue = epilogue_of(("residual", "layernorm", "quantize_rows"), "int8", "float32")
    for rows in (1, 4):
        wanted.add(form, epilogue, "float32", rows, columns, False, cluster, aligned)
    assert wanted.faults(5) == []


@needs_compiler
@pytest.mark.parametrize("form", ["one_shot", LOCAL, *exhaustive(["two_shot"])])
@pytest.mark.parametrize(
    ("dtype", "operand"), [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "bfloat16")]
)
def test_dtypes_of_rows_and_operands(directory, dtype, operand, form):
    wanted = RowsWanted(RowHost(directory, 1 if form == LOCAL else 3), 1)
    epilogue = epilogue_of(("residual", "rmsnorm"), None, dtype, operand)
    most = 64 * 4 // BY_NAME[dtype].numpy.itemsize
    for columns, aligned in ((most, True), (most - 7, False)):
        wanted.add(form, epilogue, dtype, 4, columns, aligned=aligned)
        wanted.add(form, epilogue, dtype, 3, columns, in_place=True, aligned=aligned)
    assert wanted.faults(1) == []


@needs_compiler
@pytest.mark.parametrize("columns", [3, *exhaustive([1, 4, 31])])
def test_short_rows(directory, columns):
    wanted = RowsWanted(RowHost(directory, 2), 2)
    for form in ("one_shot", "two_shot"):
        wanted.add(form, epilogue_of(("residual", "layernorm"), None, "float32"), "float32", 5, columns)
    assert wanted.faults(2) == []


@needs_compiler
def test_calls_of_rows_and_other_calls_follow_each_other(directory):
    host = RowHost(directory, 3)
    host.grow_old(2**32 - 3)
    epilogue = epilogue_of(*EPILOGUES["norm"], "float32")
    for seed in range(3):
        rows, others = RowsWanted(host, seed), Wanted(host, seed)
        for form in ("one_shot", "two_shot", "one_shot"):
            rows.add(form, epilogue, "float32", 6, 64)
            others.add("one_shot", True, True)
            others.add("two_shot", False)
            others.add("two_shot", True, True)
            rows.calls += others.calls[-3:]
            rows.want += [None] * 3
        assert rows.faults(seed) == []
        for call, want in zip(others.calls, others.want, strict=True):
            assert all(np.array_equal(got, one) for got, one in zip(call.result, want, strict=True))


@needs_compiler
def test_operands_that_a_call_does_not_have(directory):
    wanted = RowsWanted(RowHost(directory, 2), 3)
    for left_out in (("weight",), ("shift",), ("weight", "shift")):
        epilogue = epilogue_of(("layernorm",), None, "float32", left_out=left_out)
        wanted.add("one_shot", epilogue, "float32", 3, 40)
    assert wanted.faults(3) == []


@needs_compiler
def test_a_piece_of_the_callers_own(directory):
    piece = Piece(
        "soft_cap",
        "cap * tanhf(x / cap)",
        lambda x, cap: cap * np.tanh(x / np.float32(cap)),
        numbers=("cap",),
    )
    pieces = pieces_named((piece, "rmsnorm"))
    dtypes = tuple(BY_NAME["float32"] for _ in operands_of(pieces))
    epilogue = Epilogue(pieces, check_numbers(pieces, {"cap": 3.0, "eps": 0.0}), dtypes, BY_NAME["float32"])
    wanted = RowsWanted(RowHost(directory, 2), 4)
    wanted.add("one_shot", epilogue, "float32", 3, 64)
    assert wanted.faults(4) == []


@needs_compiler
@pytest.mark.parametrize("form", ["one_shot", "two_shot"])
def test_a_rank_that_stays_away_is_named_and_nothing_looks_right(directory, form):
    host = RowHost(directory, 3, limit_ns=30_000)
    wanted = RowsWanted(host, 4)
    wanted.add(form, epilogue_of(("residual", "rmsnorm"), None, "float32"), "float32", 4, 64)
    absent = replace(wanted.calls[0], absent=(1,))
    assert host.run([absent], 4)
    assert host.run([absent], 5), "a later call ends at once"
    for rank in (0, 2):
        assert host.words[rank][1:3].tolist() == [1, 1]
        assert np.isnan(absent.result[rank]).all() and np.isnan(absent.arrays[rank][1]).all()
    assert not host.words[1].any()


MUTANTS = {
    "a pack is left out": ("if (first + g == 0) widen_pack", "if (first + g == 1) widen_pack"),
    "rows overwrite each other": ("r.a.rank) + j * PLACES", "r.a.rank)"),
    "what was read is not cleared": ("uint4{~0u, ~0u, ~0u, ~0u}", "uint4{0u, 0u, 0u, 0u}"),
    "threads do not wait for each other": ("parts[warp] = x;\n  join_block();", "parts[warp] = x;"),
    "blocks do not wait for each other": ("  arrive_in_cluster();\n  await_cluster();", ""),
    "both hops use the same slots": ("+ SECOND + j * SHARE + k, made", "+ j * SHARE + k, made"),
    "columns beyond the end count": ("if (has_value(i, e))", "if (true)"),
    "the two halves of scratch are one": ("(turn & 1) * ROW_PARTS", "0"),
    "a block writes the row of another": ("block_index() % CLUSTER * PLACES", "0"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", [*list(MUTANTS)[:4], *exhaustive(list(MUTANTS)[4:])])
def test_a_faulty_kernel_is_noticed(tmp_path, monkeypatch, name):
    source, changed = RowKernel.source, []

    def mutated(self, *args, **constants):
        text = source(self, *args, **constants)
        changed.append(MUTANTS[name][0] in text)
        return text.replace(*MUTANTS[name])

    monkeypatch.setattr(RowKernel, "source", mutated)
    host = RowHost(tmp_path, 3)
    host.limit_ns = 40_000
    noticed = False
    for seed in range(30):
        wanted = RowsWanted(host, seed)
        for form in ("one_shot", "two_shot"):
            for _ in range(3):
                epilogue = epilogue_of(("layernorm", "bias"), None, "float32")
                wanted.add(form, epilogue, "float32", 6, 61)
            wanted.add(form, epilogue, "float32", 6, 64, False, 2, True)
        noticed = bool(wanted.faults(seed)) or any(w.any() for w in host.words)
        if noticed:
            break
    assert any(changed), "the mutant changes nothing"
    assert noticed


def _kernels() -> list[RowKernel]:
    """Each form and epilogue with some dtypes, numbers of ranks and lengths of rows."""
    made = []
    for i, (names, out) in enumerate(EPILOGUES.values()):
        for k, form in enumerate(("one_shot", "two_shot", LOCAL)):
            dtype, operand = FLOATS[(i + k) % 3], FLOATS[(i + 2 * k) % 3]
            layout = PeerLayout(1 if form == LOCAL else (2, 4, 8, 16)[(i + k) % 4], 16, i % 2 == 0)
            epilogue = epilogue_of(names, out, dtype, operand)
            columns = (4096, 1000, 16384, 4095)[(i + 2 * k) % 4]
            cluster = 4 if form != LOCAL and i % 2 == 0 else 1
            shape = RowShape.of(columns, BY_NAME[dtype].numpy.itemsize, cluster)
            made.append(RowKernel(form, BY_NAME[dtype], epilogue, layout, shape, columns != 4095))
    return made


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kernels"),
    [
        pytest.param("sm_90", slice(0, None, 4), id="sm_90-some"),
        pytest.param("sm_90", slice(1, None, 2), id="sm_90", marks=pytest.mark.exhaustive),
        pytest.param("sm_80", slice(0, None, 2), id="sm_80", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_compile_without_a_warning(architecture, kernels):
    def compiled(kernel):
        target = nvrtc.target(architecture, kernel.layout.ranks)
        return nvrtc.compile_for(kernel.source(), target, OPTIONS, quickly=True)

    has_clusters = architecture == "sm_90"
    kernels = [k for k in _kernels() if has_clusters or k.shape.cluster == 1][kernels]
    with ThreadPoolExecutor(2) as pool:
        for kernel, made in zip(kernels, pool.map(compiled, kernels), strict=True):
            assert made.status == 0, f"{kernel}: {made.log}"
            assert made.log == "", f"{kernel} warns: {made.log}"
            assert NAME.encode() in made.code


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("rms",), "no piece 'rms'; expected some of bias"),
        (("rmsnorm", "layernorm"), "take 'weight'"),
        (("quantize_rows", "bias"), "quantize_rows must be the last piece"),
    ],
)
def test_pieces_that_do_not_fit_together(names, message):
    with pytest.raises(ArgumentError, match=message):
        pieces_named(names)


def test_dtypes_and_numbers_that_do_not_fit():
    norm, quantised = pieces_named(("rmsnorm",)), pieces_named(("quantize",))
    assert result_dtype(quantised, BY_NAME["float16"], ml_dtypes.float8_e5m2) == dtype_of(
        ml_dtypes.float8_e5m2
    )
    with pytest.raises(ArgumentError, match="expected one of int8, float8_e4m3fn, float8_e5m2"):
        result_dtype(quantised, BY_NAME["float16"], None)
    with pytest.raises(ArgumentError, match="expected none, since no piece quantises"):
        result_dtype(norm, BY_NAME["float16"], "int8")
    for wrong in (None, "x", float("nan"), -1.0):
        with pytest.raises(ArgumentError, match="rmsnorm needs eps=a number from 0 up"):
            check_numbers(norm, {"eps": wrong})


def test_words_tell_epilogues_apart():
    one = epilogue_of(*EPILOGUES["norm"], "bfloat16")
    assert one.describe() == "residual | rmsnorm eps=1e-05 (bfloat16, bfloat16, bfloat16) to bfloat16"
    assert replace(one, numbers=(1e-6,)).describe() != one.describe()
