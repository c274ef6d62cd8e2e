"""The peer kernels on the host: their own text, with every GPU thread a fiber and every rank a set of them.

Fibers change places at each look at a flag, at barriers and, now and then, at accesses to memory, in an order
drawn from a seed. So indices, counts, waits and the reuse of memory are tested for any interleaving; what
a weak memory order may do is not.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from flagcx.dtypes import DTYPES, OPS, dtype_of
from flagcx.kernels.peer import MOST_RANKS, OFFSET_BITS, BlockArgs, PeerArgs, PeerKernel, PeerLayout
from flagcx.kernels.peer_move import MoveKernel
from flagcx.transport.peer_memory.grids import parts_of

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
ALONE = ("-O0", "-fvisibility=hidden", "-nostdlib", "-fno-exceptions", "-fno-asynchronous-unwind-tables")
"""For kernels, which call nothing but each other: linking all libraries takes a quarter of the time."""
_QUICK = ("-O1", "-U_FORTIFY_SOURCE")
"""For what runs the fibers. (The check of _longjmp that glibc makes otherwise knows no other stacks.)"""
WARP, WORK = 4, 8
CONSTANTS = {"WORK": WORK, "PACKET_THREADS": WORK, "POLLS": 15}
BLOCKS = 3

_HEAD = r"""
#include <cstring>
#define FLAGCX_DEVICE inline
static inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned x; memcpy(&x, &f, 4); return x; }
static inline float from_float16(unsigned short x) { _Float16 f; memcpy(&f, &x, 2); return (float)f; }
static inline unsigned short to_float16(float f) {
  _Float16 h = (_Float16)f; unsigned short x; memcpy(&x, &h, 2); return x;
}
struct uint4 { unsigned x, y, z, w; };
"""

_INTRINSICS = r"""
#define FLAGCX_KERNEL(threads, blocks) extern "C" __attribute__((visibility("default"))) void
#define FLAGCX_PARAMETER const
#define FLAGCX_SHARED(type, name, count) \
  type* const name = (type*)host_shared(__LINE__, sizeof(type) * (count))
const int WARP = HOST_WARP;
#pragma GCC visibility push(default)
extern "C" {
int host_thread(); int host_block(); int host_grid();
void host_yield(); void host_sometimes(); void host_join_block(); unsigned host_join_warp(unsigned x);
int host_threads();
void* host_shared(int line, unsigned long nbytes); unsigned long long host_now();
}
#pragma GCC visibility pop
FLAGCX_DEVICE int thread_index() { return host_thread(); }
FLAGCX_DEVICE int block_index() { return host_block(); }
FLAGCX_DEVICE int grid_size() { return host_grid(); }
FLAGCX_DEVICE void join_block() { host_join_block(); }
FLAGCX_DEVICE void join_warp() { host_join_warp(true); }
FLAGCX_DEVICE bool all_of_warp(bool x) { return host_join_warp(x) != 0; }
FLAGCX_DEVICE u32 least_of_warp(u32 x) { return host_join_warp(x); }
FLAGCX_DEVICE int block_size() { return host_threads(); }
FLAGCX_DEVICE u32 peek_flag(const u32* at) { return *(const volatile u32*)at; }
FLAGCX_DEVICE u32 swap_word(u32* at, u32 x) { const u32 v = *at; *at = x; return v; }
FLAGCX_DEVICE void store_shared(u32* at, u32 x) { *(volatile u32*)at = x; host_sometimes(); }
FLAGCX_DEVICE u32 load_shared(const u32* at) { host_yield(); return *(const volatile u32*)at; }
FLAGCX_DEVICE u64 now_ns() { return host_now(); }
FLAGCX_DEVICE u32 load_flag(const u32* at) { host_yield(); return *(const volatile u32*)at; }
FLAGCX_DEVICE void store_flag(u32* at, u32 v) { *(volatile u32*)at = v; host_sometimes(); }
FLAGCX_DEVICE void release() { host_sometimes(); }
FLAGCX_DEVICE void release_to_host() {}
FLAGCX_DEVICE u32 load_host(const u32* at) { return *(const volatile u32*)at; }
FLAGCX_DEVICE void store_host(u32* at, u32 v) { *(volatile u32*)at = v; }
FLAGCX_DEVICE uint4 load_shared_pack(const uint4* at) {
  if ((u64)at & 15) __builtin_trap();
  host_sometimes(); return *at;
}
FLAGCX_DEVICE uint4 load_packet(const uint4* at) { host_yield(); return load_shared_pack(at); }
FLAGCX_DEVICE void store_packet(uint4* at, uint4 v) {
  at->x = v.x; at->y = v.y; host_sometimes(); at->z = v.z; at->w = v.w; host_sometimes();
}
FLAGCX_DEVICE uint4 load_own_pack(const uint4* at) { return load_shared_pack(at); }
FLAGCX_DEVICE void store_pack(uint4* at, uint4 v) {
  if ((u64)at & 15) __builtin_trap();
  *at = v;
  host_sometimes();
}
FLAGCX_DEVICE void store_own_pack(uint4* at, uint4 v) { store_pack(at, v); }
"""

_FIBERS = r"""
#include <setjmp.h>
#include <ucontext.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>
typedef unsigned long long u64;

struct Job { u64 kernel; void* args; int nbytes, grid, threads; };
struct Block {
  int arrived = 0; unsigned generation = 0, threads = 0;
  struct Warp { int arrived = 0; unsigned generation = 0, least = ~0u, result = 0; };
  std::vector<Warp> warps;
  std::map<int, std::vector<char>> shared;
  std::vector<Block*>* blocks = nullptr;  // of the launch
  int come = 0; unsigned round = 0;       // of a cluster, in its first block
};
struct Fiber {
  ucontext_t start; jmp_buf here; std::vector<char> stack; int rank, thread, block; Job* job; Block* at;
  unsigned awaited = 0;
  bool begun = false, done = false;
};
struct World {
  std::mt19937_64 random; jmp_buf home; Fiber* self = nullptr; u64 steps = 0;
  std::vector<std::unique_ptr<Fiber>> fibers; std::vector<std::vector<char>> stacks;
};
static World* world;
struct Params { char bytes[2048]; };  // no kernel has a larger argument

extern "C" {
int host_thread() { return world->self->thread; }
int host_block() { return world->self->block; }
int host_grid() { return world->self->job->grid; }
int host_threads() { return world->self->job->threads; }
u64 host_now() { return world->steps + 1; }
// Without a system call, unlike swapcontext.
void host_yield() { if (!_setjmp(world->self->here)) _longjmp(world->home, 1); }
void host_sometimes() { if (world->random() % 16 == 0) host_yield(); }
void host_join_block() {
  Block& b = *world->self->at;
  unsigned generation = b.generation;
  if (++b.arrived == (int)b.threads) { b.arrived = 0; b.generation++; return; }
  while (b.generation == generation) host_yield();
}
unsigned host_join_warp(unsigned x) {
  Block::Warp& w = world->self->at->warps[world->self->thread / HOST_WARP];
  unsigned generation = w.generation;
  w.least = x < w.least ? x : w.least;
  if (++w.arrived == HOST_WARP) { w.result = w.least; w.least = ~0u; w.arrived = 0; w.generation++; }
  while (w.generation == generation) host_yield();
  return w.result;
}
void* host_shared(int line, unsigned long nbytes) {
  std::vector<char>& m = world->self->at->shared[line];
  if (m.empty()) m.resize(nbytes, 0x5a);
  return m.data();
}
// The same memory of another block, and the two halves of a barrier of some blocks that follow each other.
void* host_in_block(void* at, int block) {
  Block& mine = *world->self->at;
  for (auto& one : mine.shared) {
    const long offset = (char*)at - one.second.data();
    if (offset < 0 || offset >= (long)one.second.size()) continue;
    std::vector<char>& theirs = (*mine.blocks)[block]->shared[one.first];
    if (theirs.empty()) theirs.resize(one.second.size(), 0x5a);
    return theirs.data() + offset;
  }
  return nullptr;
}
void host_arrive(int blocks) {
  Fiber& f = *world->self;
  Block& first = *(*f.at->blocks)[f.block / blocks * blocks];
  f.awaited = first.round;
  if (++first.come == blocks * (int)first.threads) { first.come = 0; first.round++; }
}
void host_await(int blocks) {
  Fiber& f = *world->self;
  while ((*f.at->blocks)[f.block / blocks * blocks]->round == f.awaited) host_yield();
}
}
static void enter() {
  Fiber* f = world->self;
  Params p;
  memcpy(&p, f->job->args, f->job->nbytes);
  ((void (*)(Params))f->job->kernel)(p);
  f->done = true;
  _longjmp(world->home, 1);
}
static void go_on(Fiber* f) {
  if (_setjmp(world->home)) return;
  if (f->begun) _longjmp(f->here, 1);
  f->begun = true;
  setcontext(&f->start);
}
// Every rank makes its calls one after the other. Returns the steps taken, or 0 if ``limit`` did not do.
extern "C" u64 host_run(int ranks, int calls, Job* jobs, u64 seed, u64 limit) {
  World w;
  world = &w;
  w.random.seed(seed);
  std::vector<int> next(ranks, 0), left(ranks, 0);
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<std::vector<Block*>>> launches;
  for (;;) {
    for (int r = 0; r < ranks; r++) {
      if (left[r] || next[r] == calls) continue;
      Job* job = jobs + r * calls + next[r]++;
      if (job->kernel == 0) continue;  // This rank stays away.
      launches.emplace_back(new std::vector<Block*>);
      for (int b = 0; b < job->grid; b++) {
        blocks.emplace_back(new Block);
        launches.back()->push_back(blocks.back().get());
        blocks.back()->blocks = launches.back().get();
        blocks.back()->threads = job->threads;
        blocks.back()->warps.resize(job->threads / HOST_WARP);
        for (int t = 0; t < job->threads; t++) {
          std::unique_ptr<Fiber> f(new Fiber);
          if (w.stacks.empty()) f->stack.resize(32 << 10);
          else { f->stack.swap(w.stacks.back()); w.stacks.pop_back(); }
          f->rank = r; f->thread = t; f->block = b; f->job = job; f->at = blocks.back().get();
          getcontext(&f->start);
          f->start.uc_stack.ss_sp = f->stack.data();
          f->start.uc_stack.ss_size = f->stack.size();
          f->start.uc_link = nullptr;
          makecontext(&f->start, enter, 0);
          w.fibers.push_back(std::move(f));
          left[r]++;
        }
      }
    }
    if (w.fibers.empty()) return w.steps + 1;
    if (++w.steps > limit) return 0;
    size_t i = w.random() % w.fibers.size();
    // Now and then one rank runs ahead of all others.
    int ahead = w.steps / 4096 % 2 ? w.steps / 8192 % ranks : -1;
    for (int tries = 0; tries < 4 && ahead >= 0 && w.fibers[i]->rank != ahead; tries++)
      i = w.random() % w.fibers.size();
    w.self = w.fibers[i].get();
    go_on(w.self);
    if (w.fibers[i]->done) {
      left[w.fibers[i]->rank]--;
      w.stacks.push_back(std::move(w.fibers[i]->stack));
      w.fibers[i].swap(w.fibers.back());
      w.fibers.pop_back();
    }
  }
}
"""


class _Job(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_uint64),
        ("args", ctypes.c_void_p),
        ("nbytes", ctypes.c_int),
        ("grid", ctypes.c_int),
        ("threads", ctypes.c_int),
    )


def compile_library(source: str, made: Path, mode: int = ctypes.RTLD_LOCAL, *flags: str) -> ctypes.CDLL:
    """Compiles C++ text to a library, and loads it."""
    text = made.with_suffix(".cpp")
    text.write_text(source)
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-w", "-shared", "-fPIC", f"-DHOST_WARP={WARP}"]
    command += [*flags, "-o", str(made), str(text), "-lgcc"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(made), mode=mode)


@dataclass(frozen=True)
class Made:
    """One call as the ranks of a test make it.

    ``given`` and ``result`` are each rank's arrays; ``handles`` says where they lie in the ranks' segments.
    """

    form: str
    packets: bool
    given: list[np.ndarray | None]
    result: list[np.ndarray | None]
    count: int
    grid: int
    chunk: int
    op: str | None = "sum"
    root: int = 0
    handles: list[tuple[int, int]] | None = None
    absent: tuple[int, ...] = ()
    bare: bool = False
    pull: bool = False
    blocks: list[int] | None = None

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WORK if self.packets else WORK + WARP


@dataclass(frozen=True)
class Launch:
    """A launch of one rank; without a kernel the rank stays away."""

    kernel: Any
    args: ctypes.Structure
    grid: int
    threads: int


@dataclass
class Host:
    """Ranks whose memory goes on from call to call."""

    directory: Path
    ranks: int
    one_gpu: bool = True
    limit_ns: int = 1 << 40
    segments: list[list[np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = PeerLayout(self.ranks, BLOCKS, self.one_gpu)
        self.memory = [_aligned(self.layout.nbytes, 0x77) for _ in range(self.ranks)]
        for memory in self.memory:
            memory[: self.layout.cleared_nbytes] = 0
            memory[self.layout.cleared_nbytes : self.layout.places["AT_INBOX"]] = 255
        self.words = [np.zeros(4, np.uint32) for _ in range(self.ranks)]

    def grow_old(self, age: int) -> None:
        """Sets the ranks' counts, and the flags that go with them, to what they are after so many."""
        fields = ("chunks", "calls", "packets", "bare", "dead", "slot", "pulls", "unused")
        for memory in self.memory:
            start = self.layout.places["AT_STATE"]
            state = memory[start : start + 32 * BLOCKS].view(np.uint32).reshape(BLOCKS, len(fields))
            for name in ("chunks", "calls", "packets", "bare", "pulls"):
                state[:, fields.index(name)] = age
            for name, nbytes in {"AT_FIRST": 4, "AT_SECOND": 4, "AT_END": 4, "AT_HANDLES": 32}.items():
                start = self.layout.places[name]
                memory[start : start + BLOCKS * MOST_RANKS * nbytes].view(np.uint32)[...] = age

    def segment(self, nbytes: int) -> int:
        """Adds a segment of every rank; returns its number."""
        self.segments.append([_aligned(nbytes, 0) for _ in range(self.ranks)])
        return len(self.segments) - 1

    def handle(self, segment: int, offset: int) -> int:
        """The handle of an array in a segment."""
        return (segment + 1) << OFFSET_BITS | offset

    def run(self, calls: list, seed: int = 0, limit: int = 1 << 24) -> bool:
        """Lets all ranks make all calls, one behind the other. Returns whether they came to an end."""
        self._table = np.array([[m.ctypes.data for m in s] for s in self.segments] or [0], np.uint64)
        self._compile(calls)
        made = []
        for r in range(self.ranks):
            made.append([])
            for call in calls:
                here = None if r in call.absent else self._kernel(call)
                made[-1].append(Launch(here, self._args(call, r), call.grid, call.threads))
        return self.launch(made, seed, limit)

    def launch(self, made: list[list[Launch]], seed: int = 0, limit: int = 1 << 24) -> bool:
        """Lets each rank make its launches, one behind the other. Returns whether they came to an end."""
        most = max(map(len, made))
        jobs, kept = (_Job * (self.ranks * most))(), []
        for r, launches in enumerate(made):
            for i, one in enumerate(launches):
                if one.kernel is not None:
                    kept.append(one.args)
                    at = ctypes.cast(ctypes.pointer(one.args), ctypes.c_void_p)
                    address = ctypes.cast(one.kernel, ctypes.c_void_p).value
                    jobs[r * most + i] = _Job(address, at, ctypes.sizeof(one.args), one.grid, one.threads)
        fibers = _fibers()
        return bool(fibers(self.ranks, most, jobs, ctypes.c_uint64(seed), ctypes.c_uint64(limit)))

    def _compile(self, calls: list[Made]) -> None:
        """Compiles the kernels of all calls, two at a time."""
        _fibers()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda kernel: _kernel(*kernel), {self._parts(call) for call in calls}))

    def _kernel(self, call: Made):
        return _kernel(*self._parts(call))

    def _parts(self, call: Made) -> tuple:
        some = next(a for a in (*call.given, *call.result) if a is not None)
        dtype = dtype_of(some.dtype)
        return self.directory, call.form, call.packets, dtype.name, call.op, self.layout, call.bare

    def _args(self, call: Made, rank: int) -> PeerArgs:
        args = BlockArgs()
        for q, memory in enumerate(self.memory):
            args.peer[q] = memory.ctypes.data
        args.sendbuf, args.recvbuf = _at(call.given[rank]), _at(call.result[rank])
        if call.handles is not None:
            args.sendbuf_handle, args.recvbuf_handle = call.handles[rank]
        args.segments, args.control = self._table.ctypes.data, self.words[rank].ctypes.data
        args.limit_ns, args.count, args.rank, args.root = self.limit_ns, call.count, rank, call.root
        blocks = call.blocks or [call.count] * self.ranks
        args.starts[: self.ranks + 1] = [0, *accumulate(blocks)]
        args.count = blocks[rank]
        some = next(a for a in (*call.given, *call.result) if a is not None)
        args.part = parts_of(call.form, call.count, some.itemsize, self.layout, call.packets)
        args.chunk, args.pull = call.chunk, call.pull
        args.steps = -(-args.part // (call.grid * call.chunk))
        args.finish, args.factor = (2, float(self.ranks)) if call.op == "avg" else (0, 1.0)
        return args


def _aligned(nbytes: int, value: int) -> np.ndarray:
    memory = np.full(nbytes + 16, value, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + nbytes]


def aligned_like(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 16 bytes."""
    copy = _aligned(array.nbytes, 0).view(array.dtype)
    copy[...] = array
    return copy


def _at(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


@lru_cache(maxsize=1)
def _fibers():
    """What runs the fibers; once in a process, since all kernels find the first one that was loaded."""
    with tempfile.TemporaryDirectory() as directory:
        run = compile_library(_FIBERS, Path(directory) / "fibers.so", ctypes.RTLD_GLOBAL, *_QUICK).host_run
    run.restype = ctypes.c_uint64
    return run


@cache
def _kernel(
    directory: Path, form: str, packets: bool, dtype: str, op: str | None, layout: PeerLayout, bare: bool
):
    _fibers()
    element = next(d for d in DTYPES.values() if d.name == dtype)
    kernel = PeerKernel(form, packets, element, OPS[op] if op else None, layout, bare)
    source = _HEAD + kernel.source(_INTRINSICS, **CONSTANTS)
    name = f"{form}_{packets}_{dtype}_{op}_{layout.ranks}_{layout.one_gpu}_{bare}.so"
    library = compile_library(source, directory / name, ctypes.RTLD_LOCAL, *ALONE)
    return getattr(library, kernel.name)


@cache
def move_kernel(directory: Path, layout: PeerLayout, name: str = "flagcx_move", **changed: int):
    """``flagcx_move``, or another kernel of its source, with constants that are replaced."""
    _fibers()
    kernel = MoveKernel(layout)
    constants = {**CONSTANTS, "CUT_WORK": WORK, **changed}
    source = _HEAD + kernel.source(_INTRINSICS, **constants)
    file = f"move_{layout.ranks}_{layout.one_gpu}_{'_'.join(map(str, changed.values()))}.so"
    library = compile_library(source, directory / file, ctypes.RTLD_LOCAL, *ALONE)
    return getattr(library, name)
