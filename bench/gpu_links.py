"""What the links between the GPUs of one host give, with all GPUs at it at once.

    python bench/gpu_links.py --gpus 2,4 --sizes 4M,128M --blocks 16,32,64,132,264 --out results.jsonl

Every GPU moves ``--sizes`` bytes to each other one (or from it), by

* ``stores``: a kernel that reads its own memory and writes the peers', 16 bytes a thread;
* ``reads``: the same kernel the other way, from the peers' memory into its own;
* ``bulk stores``, ``bulk reads``: bulk copies of Hopper's tensor memory accelerator through shared memory;
* ``copy engine``: copies that no kernel has a part in.

One process drives all GPUs. Each replays a graph of several such moves; the time is that of the GPU that took
longest, and every byte is checked. This is what bounds an all-reduce in the peers' memory: of n ranks each
sends 2(n-1)/n of the message.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_common import need_gpu, versions
from report import format_table, list_of, write_json_lines

from flagcx.arguments import format_nbytes
from flagcx.cli.sizes import parse_nbytes
from flagcx.kernels.compile import compile_kernel

ROUNDS, WARM_UP = 7, 2
_ANY_WAY = 4  # cudaMemcpyDefault: from where to where is seen by the addresses
THREADS, STAGES, BOX = 512, 4, 8192
PLAIN = r"""
typedef unsigned long long u64;
extern "C" __global__ void plain(const u64* from, const u64* to, int moves, u64 nbytes) {
  u64 packs = nbytes / 16, all = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += 4 * all)
    for (int m = 0; m < moves; m++) {
      const uint4* source = (const uint4*)from[m];
      uint4 *target = (uint4*)to[m], held[4];
#pragma unroll
      for (int u = 0; u < 4; u++) if (i + u * all < packs) held[u] = __ldcs(source + i + u * all);
#pragma unroll
      for (int u = 0; u < 4; u++) if (i + u * all < packs) target[i + u * all] = held[u];
    }
}
"""
BULK = r"""
typedef unsigned long long u64;
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// One thread a block: boxes go from global into shared memory and from there to global memory, two of them
// on their way in and two on their way out.
extern "C" __global__ void bulk(const u64* from, const u64* to, int moves, u64 nbytes) {
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(8) u64 arrived[STAGES];
  for (int s = 0; s < STAGES; s++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(arrived + s)));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  u64 total = nbytes / BOX * moves, step = gridDim.x;
  auto load = [&](u64 box) {
    int s = box / step % STAGES;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(arrived + s)), "n"(BOX));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(at(shared + s * BOX)), "l"(from[box % moves] + box / moves * BOX), "n"(BOX),
                 "r"(at(arrived + s)) : "memory");
  };
  for (u64 box = blockIdx.x; box < total && box < 2 * step; box += step) load(box);
  for (u64 box = blockIdx.x, turn = 0; box < total; box += step, turn++) {
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");  // the stage of the next load is free
    if (box + 2 * step < total) load(box + 2 * step);
    unsigned there = 0, s = turn % STAGES, phase = turn / STAGES & 1;
    while (!there)
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                   " selp.u32 %0, 1, 0, p; }" : "=r"(there) : "r"(at(arrived + s)), "r"(phase) : "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to[box % moves] + box / moves * BOX), "r"(at(shared + s * BOX)), "n"(BOX) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
""".replace("STAGES", str(STAGES)).replace("BOX", str(BOX))
KERNELS = {"plain": (PLAIN, THREADS, 0), "bulk": (BULK, 1, STAGES * BOX), "": ("", 0, 0)}
WAYS = {  # the kernel, none for the copy engines, and whether it is the peers' memory that is read
    "stores": ("plain", False),
    "reads": ("plain", True),
    "bulk stores": ("bulk", False),
    "bulk reads": ("bulk", True),
    "copy engines": ("", False),
}


def moves(outboxes: Sequence[int], inboxes: Sequence[int], nbytes: int, me: int, reads: bool) -> np.ndarray:
    """The addresses that GPU ``me`` moves from and to: uint64 of shape (2, GPUs - 1).

    Block q of GPU p's outbox ends as block p of GPU q's inbox. No GPU is all others' first.
    """
    others = [(me + k) % len(outboxes) for k in range(1, len(outboxes))]
    pairs = [(peer, me) if reads else (me, peer) for peer in others]
    found = [(outboxes[a] + b * nbytes, inboxes[b] + a * nbytes) for a, b in pairs]
    return np.array(found, np.uint64).T.copy()


class Links:
    """Memory, streams and events of some GPUs, for one size.

    Args:
        cupy: The CuPy module.
        gpus: How many GPUs take part.
        nbytes: Bytes from each to each other one.
    """

    def __init__(self, cupy: Any, gpus: int, nbytes: int) -> None:
        self.cupy, self.gpus, self.nbytes = cupy, gpus, nbytes
        self.streams, self.outboxes, self.inboxes = [], [], []
        for gpu in range(gpus):
            with cupy.cuda.Device(gpu):
                self.streams.append(cupy.cuda.Stream(non_blocking=True))
                self.outboxes.append(self.filled(gpu))
                self.inboxes.append(cupy.empty_like(self.outboxes[-1]))
                cupy.cuda.Device().synchronize()

    def filled(self, gpu: int) -> Any:
        """What a GPU sends: words that differ in every (GPU, peer, place), shape (GPUs, words)."""
        word = self.cupy.uint32
        place = self.cupy.arange(self.gpus * self.nbytes // 4, dtype=word)
        return (place * word(2654435761) + word(gpu)).reshape(self.gpus, -1)

    def measure(self, way: str, blocks: int) -> dict[str, Any]:
        """One row: bytes that a GPU sends over the time of the GPU that takes longest."""
        cupy, runs = self.cupy, max(4, min(100, (1 << 30) // (self.nbytes * (self.gpus - 1))))
        at = [[box.data.ptr for box in boxes] for boxes in (self.outboxes, self.inboxes)]
        graphs, kept, events = [], [], []
        for gpu, stream in enumerate(self.streams):
            with cupy.cuda.Device(gpu), stream:
                self.inboxes[gpu].fill(0)
                kept.append(cupy.asarray(moves(*at, self.nbytes, gpu, WAYS[way][1])))
                events.append([cupy.cuda.Event() for _ in range(2)])
                graphs.append(self._graph(WAYS[way][0], blocks, runs, kept[-1], stream))
                stream.synchronize()
        times = [self._replay(graphs, events) / runs for _ in range(ROUNDS + WARM_UP)][WARM_UP:]
        us, nbytes = statistics.median(times), self.nbytes * (self.gpus - 1)
        row = {"way": way, "gpus": self.gpus, "nbytes": self.nbytes, "blocks": blocks, "us": round(us, 2)}
        row |= {"spread_us": [round(min(times), 2), round(max(times), 2)], "wrong": self._wrong()}
        return {**row, "gb_per_s": round(nbytes / us / 1e3, 1)}

    def _graph(self, name: str, blocks: int, runs: int, between: Any, stream: Any) -> Any:
        source, threads, shared = KERNELS[name]
        kernel = compile_kernel(self.cupy, source, name) if name else None
        given = (between[0], between[1], np.int32(self.gpus - 1), np.uint64(self.nbytes))
        pairs = between.T.tolist()
        stream.begin_capture()
        for _ in range(runs):
            if kernel is not None:
                kernel((blocks,), (threads,), given, shared, stream=stream)
                continue
            for start, end in pairs:
                self.cupy.cuda.runtime.memcpyAsync(end, start, self.nbytes, _ANY_WAY, stream.ptr)
        graph = stream.end_capture()
        graph.upload(stream)
        return graph

    def _replay(self, graphs: Sequence[Any], events: Sequence[Sequence[Any]]) -> float:
        """Microseconds of the GPU that takes longest."""
        for gpu, stream in enumerate(self.streams):
            with self.cupy.cuda.Device(gpu):
                events[gpu][0].record(stream)
                graphs[gpu].launch(stream)
                events[gpu][1].record(stream)
        for stream in self.streams:
            stream.synchronize()
        return max(self.cupy.cuda.get_elapsed_time(*pair) * 1e3 for pair in events)

    def _wrong(self) -> int:
        wrong = 0
        for gpu, inbox in enumerate(self.inboxes):
            with self.cupy.cuda.Device(gpu):
                for peer in range(self.gpus):
                    if peer != gpu:
                        wrong += int(self.cupy.count_nonzero(inbox[peer] != self.filled(peer)[gpu]))
        return wrong


def measured(counts: Sequence[int], sizes: Sequence[int], blocks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """All rows."""
    import cupy

    have = cupy.cuda.runtime.getDeviceCount()
    for gpu in range(have):
        with cupy.cuda.Device(gpu):
            for peer in set(range(have)) - {gpu}:
                cupy.cuda.runtime.deviceEnablePeerAccess(peer)
    hopper = int(cupy.cuda.device.get_compute_capability()) >= 90
    for count in [count for count in counts if 1 < count <= have]:
        for nbytes in sizes:
            links = Links(cupy, count, nbytes)
            for way in [way for way in WAYS if hopper or WAYS[way][0] != "bulk"]:
                for some in blocks if WAYS[way][0] else (0,):
                    yield links.measure(way, some)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """GB/s that each GPU sends: one line a way, one column a number of blocks."""
    blocks = sorted({row["blocks"] for row in rows} - {0})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        key = (f"{row['gpus']} GPUs, {format_nbytes(row['nbytes'])} to each", row["way"])
        text = f"{row['gb_per_s']:.1f}{'*' if row['wrong'] else ''}"
        lines.setdefault(key, {}).update(dict.fromkeys([row["blocks"]] if row["blocks"] else blocks, text))
    cells = [[*key, *(own.get(n, "") for n in blocks)] for key, own in lines.items()]
    return format_table(["GB/s sent by each (*: wrong)", "", *(f"{n} blocks" for n in blocks)], cells)


def main() -> None:
    """Measures, prints a table, and writes JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = list_of(int)
    parser.add_argument("--gpus", type=numbers, default="2,4,8", help="numbers of GPUs")
    parser.add_argument(
        "--sizes",
        type=list_of(parse_nbytes),
        default="1M,4M,16M,128M",
        help="bytes to each other GPU, multiples of 8K",
    )
    parser.add_argument(
        "--blocks", type=numbers, default="16,32,64,132,264", help="numbers of blocks of threads"
    )
    parser.add_argument("--out", type=Path, help="file that JSON lines are added to")
    given = parser.parse_args()
    need_gpu()
    rows = []
    for row in measured(given.gpus, given.sizes, given.blocks):
        rows.append({**row, "versions": versions()})
        if given.out:
            write_json_lines(given.out, rows[-1:])
    print(table(rows) if rows else "links are between GPUs, and there are fewer than two")


if __name__ == "__main__":
    main()
