"""The peer kernels: on the host, in any interleaving of their threads; and compiled for GPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flagcx.dtypes import DTYPES, OPS, dtype_of, scaled_sum
from flagcx.errors import OperationError
from flagcx.kernels import peer
from flagcx.kernels.peer import (
    CHUNK_FORMS,
    FORMS,
    REDUCING,
    TWO_AT_ONCE,
    PeerKernel,
    PeerLayout,
    may_be_bare,
)
from flagcx.kernels.source import OPTIONS
from flagcx.transport.peer_memory.grids import parts_of
from tests.kernels import nvrtc, peer_host
from tests.kernels.peer_host import BLOCKS, WORK, Host, Made

needs_compiler = pytest.mark.skipif(peer_host.COMPILER is None, reason="no C++ compiler on this machine")
needs_nvrtc = pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
)
SHAPES = [
    *((form, True, False) for form in FORMS),
    *((form, False, False) for form in CHUNK_FORMS),
    *((form, True, True) for form in REDUCING),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("peer")


class Wanted:
    """Calls for a host, and what each rank's result must be."""

    def __init__(self, host: Host, seed: int) -> None:
        self.host, self.size, self.random = host, host.ranks, np.random.default_rng(seed)
        self.calls: list[Made] = []
        self.want: list[list[np.ndarray]] = []

    def add(
        self,
        form: str,
        packets: bool,
        bare: bool = False,
        dtype: str = "float32",
        op: str = "sum",
        most: int = 400,
    ) -> None:
        """A call with data that differs in every (rank, index), and arrays of any alignment."""
        count = int(self.random.integers(1, most))
        blocks = self.size if form in ("reduce_scatter", "alltoall") else 1
        data = [self._numbers(count * blocks, dtype, q) for q in range(self.size)]
        root = int(self.random.integers(0, self.size))
        want = self._expected(form, data, count, root, op)
        given, result = self._arrays(form, data, want, count, root)
        reduction = op if form in REDUCING else None
        grid, chunk = self._grid(form, packets, count, np.dtype(data[0].dtype).itemsize)
        self.calls.append(Made(form, packets, given, result, count, grid, chunk, reduction, root, bare=bare))
        self.want.append(want)

    def add_seen(self, segment: int, plain: bool) -> None:
        """An all-reduce of arrays that lie in a segment, but for one rank's if ``plain``."""
        count = int(self.random.integers(1, 400))
        data = [self._numbers(count, "float32", q) for q in range(self.size)]
        where, handles = [], []
        for q in range(self.size):
            begin = 4 * int(self.random.integers(0, 2)) * int(self.random.integers(0, 40))
            array = self.host.segments[segment][q][begin : begin + 4 * count].view(np.float32)
            array[...] = data[q]
            where.append(array)
            handles.append((self.host.handle(segment, begin),) * 2)
        if plain:
            handles[-1] = (0, 0)
        grid, chunk = self._grid("two_shot", False, count, 4)
        self.calls.append(Made("two_shot", False, where, where, count, grid, chunk, "sum", 0, handles))
        self.want.append([np.sum(data, axis=0)] * self.size)

    def add_uneven(self, packets: bool, bare: bool) -> None:
        """A reduce-scatter with blocks of different sizes, some of them empty."""
        blocks = self.random.choice([0, 1, 4, 16, 90, 200, 333], self.size).tolist()
        blocks[0] += 1
        data = [self._numbers(sum(blocks), "float32", q) for q in range(self.size)]
        total, ends = np.sum(data, axis=0), np.cumsum(blocks)
        want = [total[end - count : end] for end, count in zip(ends, blocks, strict=True)]
        given, result = [self._placed(x) for x in data], [self._placed(np.zeros_like(x)) for x in want]
        grid, chunk = self._grid("reduce_scatter", packets, max(blocks), 4)
        made = Made(
            "reduce_scatter", packets, given, result, max(blocks), grid, chunk, bare=bare, blocks=blocks
        )
        self.calls.append(made)
        self.want.append(want)

    def _numbers(self, count: int, dtype: str, rank: int) -> np.ndarray:
        element = next(d for d in DTYPES.values() if d.name == dtype).numpy
        return ((np.arange(count) * (2 * rank + 3) + self.random.integers(0, 9)) % 5 + 1).astype(element)

    def _expected(self, form: str, data: list, count: int, root: int, op: str) -> list[np.ndarray]:
        size = self.size
        if form in REDUCING:
            wide = [x.astype(np.float32) if x.dtype.kind in "Vf" and x.itemsize < 4 else x for x in data]
            total = wide[0]
            for x in wide[1:]:
                total = OPS[op].ufunc(total, x)
            total = (total / size if OPS[op].average else total).astype(data[0].dtype)
            if form == "reduce":
                return [total if q == root else np.zeros_like(total) for q in range(size)]
            if form == "reduce_scatter":
                return [total[q * count : (q + 1) * count] for q in range(size)]
            return [total] * size
        if form == "allgather":
            return [np.concatenate(data)] * size
        if form == "broadcast":
            return [data[root]] * size
        if form == "barrier":
            return [np.zeros_like(x) for x in data]
        return [np.concatenate([x[q * count : (q + 1) * count] for x in data]) for q in range(size)]

    def _arrays(self, form: str, data: list, want: list, count: int, root: int) -> tuple[list, list]:
        size, in_place = self.size, self.random.random() < 0.5
        if form == "broadcast":
            result = [self._placed(data[q] if q == root else np.zeros_like(data[q])) for q in range(size)]
            return [result[q] if q == root else None for q in range(size)], result
        given = [self._placed(x) for x in data]
        if form in ("reduce", "barrier"):
            own = in_place and form == "reduce"
            result = [self._placed(np.zeros_like(x)) for x in data]
            result[root] = given[root] if own else result[root]
            return given, result
        if not in_place or form == "alltoall":
            return given, [self._placed(np.zeros_like(x)) for x in want]
        if form == "reduce_scatter":
            return given, [given[q][q * count : (q + 1) * count] for q in range(size)]
        if form == "allgather":
            result = [self._placed(np.zeros_like(x)) for x in want]
            own = [result[q][q * count : (q + 1) * count] for q in range(size)]
            for q in range(size):
                own[q][...] = data[q]
            return own, result
        return given, given

    def _placed(self, array: np.ndarray) -> np.ndarray:
        """A copy that begins at a multiple of 16 bytes, or a few elements behind one."""
        start = int(self.random.integers(0, 2) * self.random.integers(0, 4)) * array.itemsize
        memory = np.zeros(array.nbytes + start + 32, np.uint8)
        begin = -memory.ctypes.data % 16 + start
        view = memory[begin : begin + array.nbytes].view(array.dtype)
        view[...] = array
        return view

    def _grid(self, form: str, packets: bool, count: int, itemsize: int) -> tuple[int, int]:
        packs = parts_of(form, count, itemsize, self.host.layout, packets)
        if not packets:
            return int(self.random.integers(1, BLOCKS + 1)), int(self.random.integers(1, 4)) * WORK
        chunk = -(-packs // min(int(self.random.integers(1, BLOCKS + 1)), packs))
        return -(-packs // chunk), chunk

    def faults(self, seed: int) -> list[str]:
        """Runs all calls; what is wrong."""
        ended = self.host.run(self.calls, seed)
        found = [] if ended else ["the calls did not end"]
        for i, (call, want) in enumerate(zip(self.calls, self.want, strict=True)):
            for rank, got in enumerate(call.result):
                if got is not None and not np.array_equal(got.view(np.uint8), want[rank].view(np.uint8)):
                    found.append(f"call {i}, {call.form} of {call.count}, {call.packets=}: rank {rank}")
        return found


@needs_compiler
@pytest.mark.parametrize(
    ("size", "one_gpu"),
    [
        pytest.param(size, one_gpu, marks=marks, id=f"{size}-{'together' if one_gpu else 'apart'}")
        for marks, cases in (
            ((), [(2, True), (3, False), (8, True)]),
            (pytest.mark.exhaustive, [(2, False), (3, True), (8, False)]),
        )
        for size, one_gpu in cases
    ],
)
def test_calls_back_to_back_in_any_interleaving(directory, size, one_gpu):
    host = Host(directory, size, one_gpu)
    for seed in range(4):
        wanted = Wanted(host, seed)
        for i in wanted.random.integers(0, len(SHAPES), 14):
            wanted.add(*SHAPES[i])
        assert wanted.faults(seed) == []


@needs_compiler
@pytest.mark.parametrize(("packets", "bare"), [(False, False), (True, False), (True, True)])
def test_blocks_of_different_sizes_are_added_up(directory, packets, bare):
    for seed in range(3):
        wanted = Wanted(Host(directory, 3, one_gpu=seed > 0), seed)
        for _ in range(4):
            wanted.add_uneven(packets, bare)
        assert wanted.faults(seed) == []


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_each_form_with_a_rank_more_than_are_looked_at_together(directory, shape):
    wanted = Wanted(Host(directory, 9), 1)
    for _ in range(3):
        wanted.add(*shape)
    assert wanted.faults(1) == []


@needs_compiler
@pytest.mark.parametrize("one_gpu", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_may_wrap_around_in_the_middle_of_a_call(directory, shape, one_gpu):
    for seed in range(4):
        host = Host(directory, 3, one_gpu)
        host.grow_old(2**32 - 1 - 2 * seed)
        wanted = Wanted(host, seed)
        for _ in range(3):
            wanted.add(*shape)
            if not wanted.calls[-1].packets:  # as many chunks as there can be
                wanted.calls[-1] = replace(wanted.calls[-1], grid=1, chunk=WORK)
        assert wanted.faults(seed) == []


@needs_compiler
@pytest.mark.parametrize("pull", [False, True], ids=["pushed", "pulled"])
@pytest.mark.parametrize("age", [2**31 - 2, 2**32 - 2])
def test_numbers_may_wrap_around_where_arrays_are_used_in_place(directory, age, pull):
    host = Host(directory, 3, one_gpu=False)
    host.grow_old(age)
    wanted = Wanted(host, 5)
    for i in range(6):
        wanted.add_seen(host.segment(4096), plain=False)
        wanted.calls[-1] = replace(wanted.calls[-1], pull=pull and i != 2)
        wanted.add("two_shot", False)
    assert wanted.faults(5) == []


@needs_compiler
@pytest.mark.parametrize("packets", [True, False])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("bfloat16", "avg"), ("float16", "sum"), ("float8_e4m3fn", "max"), ("float8_e5m2", "sum"),
        ("float64", "min"), ("int8", "sum"), ("uint16", "prod"), ("int64", "sum"), ("complex128", "sum"),
        ("bool", "max"), ("uint8", "avg"), ("int32", "avg"), ("int64", "avg"),
    ],
)  # fmt: skip
def test_elements_of_every_width(directory, dtype, op, packets):
    wanted = Wanted(Host(directory, 3), 2)
    for _ in range(4):
        wanted.add("one_shot" if packets else "two_shot", packets, False, dtype, op)
    assert wanted.faults(2) == []


@needs_compiler
@pytest.mark.parametrize(
    "name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"]
)
def test_bare_packets_carry_every_number(directory, name):
    """All bits set is NaN, which arrives as NaN; everything else arrives as it is."""
    dtype = next(d for d in DTYPES.values() if d.name == name).numpy
    patterns = np.array(
        [0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0, 0xFFFFFFFE, 0x3C003C00, 0xFF7FFF7F], np.uint32
    )
    data = np.tile(patterns, 8).view(dtype)
    zeros = np.full_like(data.view(np.uint8), 0).view(dtype)
    assert may_be_bare("one_shot", dtype_of(dtype))
    host = Host(directory, 2)
    results = [peer_host.aligned_like(data) for _ in range(2)]
    givens = [peer_host.aligned_like(data), peer_host.aligned_like(zeros)]
    call = Made("one_shot", True, givens, results, len(data), 2, -(-data.nbytes // 32), "sum", bare=True)
    assert host.run([call, call, call], 7)
    parts = data.view(np.float32) if name == "complex64" else data.astype(np.float32)
    for result in results:
        got = result.view(np.float32) if name == "complex64" else result.astype(np.float32)
        np.testing.assert_array_equal(got, parts)


@needs_compiler
@pytest.mark.parametrize("pull", [False, True], ids=["pushed", "pulled"])
@pytest.mark.parametrize("one_gpu", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_arrays_that_peers_see_are_used_in_place(directory, size, one_gpu, pull):
    host = Host(directory, size, one_gpu)
    segments = [host.segment(4096) for _ in range(8)]
    wanted = Wanted(host, 3)
    for i, segment in enumerate(segments):
        wanted.add_seen(segment, plain=i % 3 == 2)
        wanted.calls[-1] = replace(wanted.calls[-1], pull=pull)
        wanted.add("two_shot", False)
    assert wanted.faults(3) == []


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_that_stays_away_is_named_and_nobody_waits_for_ever(directory, shape):
    host = Host(directory, 3, limit_ns=30_000)
    wanted = Wanted(host, 4)
    wanted.add(*shape)
    absent = replace(wanted.calls[0], absent=(1,), root=0)
    assert host.run([absent], 4)
    assert host.run([absent], 5), "a later call ends at once"
    for rank in (0, 2):
        assert host.words[rank][1:3].tolist() == [1, 1]
        if (shape[0], rank) not in (("broadcast", 0), ("reduce", 2)):  # they have no result
            assert np.isnan(absent.result[rank]).all(), "it looks as if it were right"
    assert not host.words[1].any()


@needs_compiler
@pytest.mark.parametrize("shape", [("two_shot", True, True), ("two_shot", False, False)])
def test_two_launches_of_a_rank_at_once_are_told(directory, shape):
    """The second finds the mark that the first, which has not ended, has left in the memory of its block."""
    host = Host(directory, 2)
    busy = host.memory[1][host.layout.places["AT_STATE"] :].view(np.uint32)[7:8]
    wanted = Wanted(host, 6)
    wanted.add(*shape)
    assert host.run(wanted.calls, 6)
    assert busy[0] == 0 and not host.words[1].any(), "it has ended"
    busy[0] = 1
    assert host.run(wanted.calls, 7)
    assert host.words[1][1:3].tolist() == [TWO_AT_ONCE, 1]


@needs_compiler
def test_the_host_can_stop_a_wait(directory):
    host = Host(directory, 2)
    host.words[0][0] = 1
    wanted = Wanted(host, 5)
    wanted.add("two_shot", False)
    assert host.run([Made(**{**wanted.calls[0].__dict__, "absent": (1,)})], 5)
    assert host.words[0].tolist() == [1, 0, 0, 0], "nobody's time ran out"


MUTANTS = {
    "boxes are used again too soon": ("await_all(a, AT_SECOND, base + i + 1 - SLOTS, lane)", "true"),
    "nobody waits for what is combined": (
        "ok = ok && await_all(a, AT_FIRST, base + i + 1 - LAG, lane);",
        "",
    ),
    "nobody waits for what is collected": (
        "ok = ok && await_all(a, AT_SECOND, base + i + 1 - 2 * LAG, lane);",
        "",
    ),
    "packets have one half": ("flag & 1", "0"),
    "a pack is looked at before it is whole": ("&& y.w == flag", ""),
    "a bare packet is looked at before it is whole": ("&& x.z != ~0u && x.w != ~0u", ""),
    "what was read is not cleared": ("uint4{~0u, ~0u, ~0u, ~0u}", "uint4{0u, 0u, 0u, 0u}"),
    "both hops use the same slots": ("+ SECOND + j, made", "+ j, made"),
    "the second hop is looked for in the first": ("SECOND + l, first", "l, first"),
    "the order of ranks is turned": ("const int rank = a.rank + k;", "const int rank = a.rank + RANKS - k;"),
}


OF_MUTANTS = [
    ("one_shot", True, False), ("one_shot", False, False), ("two_shot", False, False),
    ("one_shot", True, True), ("two_shot", True, True),
]  # fmt: skip
"""The calls in which a faulty kernel is noticed."""


def mutate(monkeypatch, before: str, after: str) -> list[bool]:
    """Changes the kernels' source; whether each source had what is changed."""
    source = PeerKernel.source
    changed = []

    def mutated(self, *args, **constants):
        text = source(self, *args, **constants)
        changed.append(before in text)
        return text.replace(before, after)

    monkeypatch.setattr(PeerKernel, "source", mutated)
    return changed


@needs_compiler
def test_a_kernel_that_does_not_await_what_peers_write_to_its_arrays_is_noticed(tmp_path, monkeypatch):
    await_them = "if (direct && ok) await_all(a, AT_SECOND, base + a.steps, lane);"
    changed = mutate(monkeypatch, await_them, "")
    host = Host(tmp_path, 3, one_gpu=False)
    host.limit_ns = 40_000
    noticed = False
    for seed in range(12):
        wanted = Wanted(host, seed)
        for _ in range(3):
            wanted.add_seen(host.segment(4096), plain=False)
            first = wanted.calls[-1]  # a second call, in packets, adds up what the first has left there
            grid, chunk = wanted._grid("one_shot", True, first.count, 4)
            wanted.calls.append(
                replace(first, form="one_shot", packets=True, grid=grid, chunk=chunk, handles=None)
            )
            twice = [host.ranks * total for total in wanted.want.pop()]
            wanted.want += [twice, twice]
        noticed = noticed or bool(wanted.faults(seed)) or any(w.any() for w in host.words)
    assert any(changed) and noticed


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_a_faulty_kernel_is_noticed(tmp_path, monkeypatch, name):
    changed = mutate(monkeypatch, *MUTANTS[name])
    host = Host(tmp_path, 3)
    host.limit_ns = 40_000
    noticed = False
    for seed in range(12):
        wanted = Wanted(host, seed)
        for form, packets, bare in OF_MUTANTS:
            for _ in range(3):
                wanted.add(form, packets, bare)
        noticed = bool(wanted.faults(seed)) or any(w.any() for w in host.words)
        if noticed:
            break
    assert any(changed), "the mutant changes nothing"
    # Ranks that go through their peers in the other order are as right.
    assert noticed == (name != "the order of ranks is turned")


def _kernels() -> list[PeerKernel]:
    """Each form and number of ranks once; each width and kind of element with one of them."""
    made = []
    for i, (form, packets, bare) in enumerate(SHAPES):
        for ranks in (2, 4, 8, 16)[i % 2 :: 2]:
            op = OPS["sum"] if form in REDUCING else None
            layout = PeerLayout(ranks, 16, i % 2 == 0)
            made.append(PeerKernel(form, packets, dtype_of("float32"), op, layout, bare))
    for i, dtype in enumerate(DTYPES.values()):
        op = [op for op in OPS.values() if dtype.kind in op.kinds and not op.average][i % 4]
        made.append(PeerKernel("two_shot", False, dtype, op, PeerLayout(3, 16, i % 2 == 0)))
        made.append(PeerKernel("one_shot", True, dtype, op, PeerLayout(2, 16, i % 2 == 1)))
    return made


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kernels"),
    [
        # Each form with one number of ranks; then it with another, and each width and kind of element.
        pytest.param("sm_90", slice(0, 2 * len(SHAPES), 2), id="sm_90-each-form"),
        *(
            pytest.param(name, slice(start, None, 3), id=name, marks=pytest.mark.exhaustive)
            for start, name in enumerate(("sm_75", "sm_80", "sm_90"))
        ),
    ],
)
def test_kernels_compile_without_a_warning(architecture, kernels):
    every, forms = _kernels(), 2 * len(SHAPES)
    kernels = every[kernels] if kernels.stop else [*every[1:forms:2], *every[forms:]][kernels]

    def compiled(kernel):
        target = nvrtc.target(architecture, kernel.layout.ranks)
        return nvrtc.compile_for(kernel.source(), target, OPTIONS, quickly=True)

    with ThreadPoolExecutor(2) as pool:
        for kernel, made in zip(kernels, pool.map(compiled, kernels), strict=True):
            assert made.status == 0, f"{kernel}: {made.log}"
            assert made.log == "", f"{kernel} warns: {made.log}"
            assert kernel.name.encode() in made.code


def test_an_operation_that_has_no_kernel_is_named():
    kernel = PeerKernel("two_shot", False, dtype_of("float32"), OPS["band"], PeerLayout(2, 8, True))
    with pytest.raises(OperationError, match="no kernel for op='band' of float32"):
        kernel.source()


def test_what_is_moved_is_taken_apart_as_far_as_its_alignment_asks():
    parts = {
        name: PeerKernel("allgather", False, dtype_of(name), None, PeerLayout(2, 8, True))._elements()
        for name in ("bool", "bfloat16", "float64", "complex64", "complex128")
    }
    assert parts == {
        "bool": "typedef u8 T;\n",
        "bfloat16": "typedef u16 T;\n",
        "float64": "typedef u64 T;\n",
        "complex64": "typedef struct { u32 a, b; } T;\n",
        "complex128": "typedef struct { u64 a, b; } T;\n",
    }


def test_what_has_a_kernel():
    assert peer.has_peer_kernel("two_shot", dtype_of(ml_dtypes.bfloat16), OPS["avg"])
    assert peer.has_peer_kernel("allgather", dtype_of("complex128"), None)
    assert not peer.has_peer_kernel("one_shot", dtype_of("float32"), scaled_sum(0.5))
    assert not peer.has_peer_kernel("one_shot", dtype_of("float32"), OPS["bxor"])


@pytest.mark.parametrize("one_gpu", [True, False])
@pytest.mark.parametrize("ranks", range(2, 17))
def test_places_do_not_overlap_and_slots_do(ranks, one_gpu):
    layout = PeerLayout(ranks, 24, one_gpu)
    offsets = list(layout.places.values())
    assert offsets == sorted(offsets) and all(at % 4096 == 0 for at in offsets)
    assert layout.shape.slots > 2 * layout.shape.lag, "a box would be used again before it is empty"
    assert layout.most_chunk % layout.shape.work == 0
    assert layout.cleared_nbytes == layout.places["AT_BARE"]
