"""The parts that all peer kernels share: access to memory that other GPUs see, flags, and bounded waits.

``INTRINSICS`` is CUDA with PTX. A kernel reaches other threads only through the functions there, so that all
other text also compiles for a host that defines these few in its own way, as the tests do.
"""

from __future__ import annotations

INTRINSICS = r"""
#define FLAGCX_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define FLAGCX_PARAMETER const __grid_constant__
#define FLAGCX_SHARED(type, name, count) __shared__ type name[count]
const int WARP = 32;

FLAGCX_DEVICE int thread_index() { return (int)threadIdx.x; }
FLAGCX_DEVICE int block_index() { return (int)blockIdx.x; }
FLAGCX_DEVICE int block_size() { return (int)blockDim.x; }
FLAGCX_DEVICE int grid_size() { return (int)gridDim.x; }
FLAGCX_DEVICE void join_block() { __syncthreads(); }
FLAGCX_DEVICE void join_warp() { __syncwarp(); }
// When these return, what one lane of the warp has seen is visible to all of them.
FLAGCX_DEVICE bool all_of_warp(bool x) {
  x = __all_sync(0xffffffffu, x) != 0;
  __syncwarp();
  return x;
}
FLAGCX_DEVICE u32 least_of_warp(u32 x) {
#if __CUDA_ARCH__ >= 800
  x = __reduce_min_sync(0xffffffffu, x);
#else
  for (int apart = WARP / 2; apart > 0; apart /= 2) {
    const u32 theirs = __shfl_xor_sync(0xffffffffu, x, apart);
    x = theirs < x ? theirs : x;
  }
#endif
  __syncwarp();
  return x;
}
// Words that the warps of a block exchange: atomic accesses, so that there is no data race.
FLAGCX_DEVICE void store_shared(u32* at, u32 x) {
  __threadfence_block();
  atomicExch(at, x);
}
FLAGCX_DEVICE u32 load_shared(const u32* at) { return atomicOr((u32*)at, 0u); }
FLAGCX_DEVICE u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Reads a flag, and makes visible what its writer wrote before release().
FLAGCX_DEVICE u32 load_flag(const u32* at) {
  u32 v;
  asm volatile("ld.acquire." SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
FLAGCX_DEVICE u32 peek_flag(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed." SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}
FLAGCX_DEVICE u32 swap_word(u32* at, u32 v) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(v) : "memory");
  return before;
}
FLAGCX_DEVICE void store_flag(u32* at, u32 v) {
  asm volatile("st.relaxed." SCOPE ".global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
FLAGCX_DEVICE void release() { asm volatile("fence.acq_rel." SCOPE ";" ::: "memory"); }
FLAGCX_DEVICE void release_to_host() { __threadfence_system(); }

// A word of the host's memory.
FLAGCX_DEVICE u32 load_host(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
FLAGCX_DEVICE void store_host(u32* at, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// 16 bytes that other GPUs write: never read from the L1 cache, which is not coherent with them.
FLAGCX_DEVICE uint4 load_shared_pack(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed." SCOPE ".global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}
// 16 bytes with flags inside; each half of 8 bytes arrives whole.
FLAGCX_DEVICE uint4 load_packet(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
FLAGCX_DEVICE void store_packet(uint4* at, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
FLAGCX_DEVICE void store_pack(uint4* at, uint4 v) { *at = v; }
// Callers' arrays are used once: streamed, so that they do not evict the boxes from the cache.
FLAGCX_DEVICE uint4 load_own_pack(const uint4* at) { return __ldcs(at); }
FLAGCX_DEVICE void store_own_pack(uint4* at, uint4 v) { __stcs(at, v); }
"""
"""Threads, flags and memory of the GPU. ``SCOPE`` is "gpu" where all ranks share one GPU, else "sys"."""

ARGS = r"""
struct Args {
  u64 peer[MOST_RANKS];  // address of each rank's memory in this process
  u64 sendbuf, recvbuf;
  u64 sendbuf_handle, recvbuf_handle;  // segment and offset of an array that the peers see; else 0
  u64 segments;                        // address in this process of each segment of each rank
  u64 control;                         // words of the host: stop, whether a wait timed out, for which peer
  u64 limit_ns;
  i64 count;  // elements of the message, or of a block where there is one a rank
  i64 part;   // packs that one rank processes
  double factor;
  u32 chunk;  // packs of a chunk
  u32 steps;  // chunks of each block of threads
  int rank, root, finish;
  int pull;  // whether arrays that all ranks see are read in place between GPUs too
#if FORM == REDUCE_SCATTER
  i64 starts[RANKS + 1];  // where each rank's block begins, which may differ in size, and the end of the last
#endif
};
"""

WAITS = r"""
// The progress of a block of threads over all launches.
struct State { u32 chunks, calls, packets, bare, dead, slot, pulls, busy; };

FLAGCX_DEVICE u8* memory_of(const Args& a, int rank) { return (u8*)a.peer[rank]; }
FLAGCX_DEVICE State* state_of(const Args& a) {
  return (State*)(memory_of(a, a.rank) + AT_STATE) + block_index();
}
FLAGCX_DEVICE u32* flags_of(const Args& a, int rank, u64 kind) {
  return (u32*)(memory_of(a, rank) + kind) + block_index() * MOST_RANKS;
}
// The k-th rank after this one, cyclically.
FLAGCX_DEVICE int peer_after(const Args& a, int k) {
  const int rank = a.rank + k;
  return rank < RANKS ? rank : rank - RANKS;
}

// A wait ends without success when the time limit passes, when the host says so, or when another wait of this
// rank has ended so.
struct Wait { u64 start; u32 polls; };
FLAGCX_DEVICE bool keep_waiting(const Args& a, Wait& p, int peer) {
  if (++p.polls & POLLS) return true;
  const u64 now = now_ns();
  if (p.start == 0) p.start = now;
  u32* const control = (u32*)a.control;
  u32* const dead = &((State*)(memory_of(a, a.rank) + AT_STATE))->dead;
  const bool late = now - p.start >= a.limit_ns;
  if (!late && load_host(control) == 0 && load_flag(dead) == 0) return true;
  if (late && load_flag(dead) == 0) {
    store_host(control + 2, (u32)peer);
    release_to_host();
    store_host(control + 1, 1u);
  }
  store_flag(dead, 1u);
  return false;
}
// Ends all waits of this rank, and tells the host why.
FLAGCX_DEVICE void give_up(const Args& a, u32 why, int peer) {
  u32* const control = (u32*)a.control;
  store_host(control + 2, (u32)peer);
  release_to_host();
  store_host(control + 1, why);
  store_flag(&((State*)(memory_of(a, a.rank) + AT_STATE))->dead, 1u);
}
// Two launches of a communicator that run at once count the same calls and use the same memory: neither is
// right. Its order keeps the host's launches apart, but not those of replayed graphs. By one thread of each
// block; what begin_launch() returns is not needed, and not waited for, before end_launch().
FLAGCX_DEVICE u32 begin_launch(State* state) { return swap_word(&state->busy, 1u); }
FLAGCX_DEVICE void end_launch(const Args& a, State* state, u32 busy) {
  if (busy) give_up(a, TWO_AT_ONCE, a.rank);
  state->busy = 0;
}
// Waits until a flag has reached ``want``, counted with wrap-around.
FLAGCX_DEVICE bool await(const Args& a, const u32* flag, u32 want, int peer) {
  Wait wait = {0, 0};
  while ((int)(load_flag(flag) - want) < 0)
    if (!keep_waiting(a, wait, peer)) return false;
  return true;
}
// The same for the flags of all peers, by one warp.
FLAGCX_DEVICE bool await_all(const Args& a, u64 kind, u32 want, int lane) {
  const u32* const flags = flags_of(a, a.rank, kind);
  bool reached = true;
  for (int q = lane; q < RANKS; q += WARP)
    if (q != a.rank) reached = await(a, flags + q, want, q) && reached;
  return all_of_warp(reached);
}
// Whether they have reached it already, without waiting; by one warp. It orders no reads of data.
FLAGCX_DEVICE bool peek_all(const Args& a, u64 kind, u32 want, int lane) {
  bool reached = true;
  for (int q = lane; q < RANKS; q += WARP)
    if (q != a.rank) reached = reached && (int)(peek_flag(flags_of(a, a.rank, kind) + q) - want) >= 0;
  return all_of_warp(reached);
}
// Sends the flag to all peers; by one warp, after release().
FLAGCX_DEVICE void tell_all(const Args& a, u64 kind, u32 value, int lane) {
  for (int k = lane + 1; k < RANKS; k += WARP) {
    const int q = peer_after(a, k);
    store_flag(flags_of(a, q, kind) + a.rank, value);
  }
}

// A pack with flags travels as two packets of {4 bytes, flag, 4 bytes, flag}, which lie ``apart``.
FLAGCX_DEVICE void store_flagged(uint4* to, int apart, uint4 v, u32 flag) {
  store_packet(to, uint4{v.x, flag, v.y, flag});
  store_packet(to + apart, uint4{v.z, flag, v.w, flag});
}
// Reads one; returns whether all of it has arrived.
FLAGCX_DEVICE bool see_flagged(const uint4* from, int apart, u32 flag, uint4* v) {
  const uint4 x = load_packet(from), y = load_packet(from + apart);
  *v = uint4{x.x, x.z, y.x, y.z};
  return x.y == flag && x.w == flag && y.y == flag && y.w == flag;
}

// The chunks that each warp has finished in two stages, and whether a wait of any warp has failed.
#define WARPS (WORK / WARP)
struct Progress { u32 chunks[2][WARPS]; u32 failed; };
FLAGCX_DEVICE void arrive(Progress* progress, int stage, u32 chunks, bool ok, int t) {
  join_warp();
  if (t % WARP != 0) return;
  if (!ok) store_shared(&progress->failed, 1u);
  store_shared(&progress->chunks[stage][t / WARP], chunks);
}
FLAGCX_DEVICE u32 progress_of(const Progress* progress, int stage, int lane) {
  u32 least = ~0u;
  for (int w = lane; w < WARPS; w += WARP) {
    const u32 chunks = load_shared(&progress->chunks[stage][w]);
    least = chunks < least ? chunks : least;
  }
  return least_of_warp(least);
}
"""

RUNS = r"""
// A run of elements in a caller's array, of any alignment and count.
struct Run { T* at; i64 count; };
FLAGCX_DEVICE bool whole(const Run& run, i64 stop) {
  return ((u64)run.at & 15) == 0 && stop * N <= run.count;
}
// Loads and stores one pack by elements: where the run is not aligned, or ends inside the pack.
FLAGCX_DEVICE uint4 load_elements(const Run& run, i64 pack) {
  Pack x;
#pragma unroll
  for (int e = 0; e < N; e++) {
    x.at()[e] = T();
    if (pack * N + e < run.count) x.at()[e] = run.at[pack * N + e];
  }
  return x.raw;
}
FLAGCX_DEVICE uint4 load_any(const Run& run, i64 pack) {
  return whole(run, pack + 1) ? load_own_pack((const uint4*)run.at + pack) : load_elements(run, pack);
}
FLAGCX_DEVICE void store_elements(const Run& run, i64 pack, uint4 v) {
  Pack x;
  x.raw = v;
#pragma unroll
  for (int e = 0; e < N; e++)
    if (pack * N + e < run.count) run.at[pack * N + e] = x.at()[e];
}
FLAGCX_DEVICE Run block_run(u64 array, int block, i64 count) { return Run{(T*)array + block * count, count}; }
// Whether the root of a broadcast or reduction in chunks has no part: its links carry the message anyway. Of
// two ranks it has half, and where ranks share a GPU it has one too, which is faster there (H200).
#define ROOT_APART (!PACKETS_ONLY && !PULLS && (FORM == BROADCAST || FORM == REDUCE) && RANKS > 2)
FLAGCX_DEVICE bool has_part(const Args& a, int rank) { return !ROOT_APART || rank != a.root; }
// The part of a message that a rank processes: whole packs, except the last. The root's, after all others, is
// empty where it has none.
FLAGCX_DEVICE Run part_run(const Args& a, u64 array, int rank) {
  const int number = ROOT_APART ? (rank - a.root - 1 + RANKS) % RANKS : rank;
  const i64 most = a.part * N, left = a.count - number * most;
  return Run{(T*)array + number * most, left < 0 ? 0 : left > most ? most : left};
}
// Whether each rank processes a part of the message; else all of the message or of a block. In chunks a
// broadcast scatters the parts first, and a reduction gathers them last.
#define PARTS (FORM == TWO_SHOT || (!PACKETS_ONLY && (FORM == BROADCAST || FORM == REDUCE)))
// Whether this rank has something for a peer, and whether it gets something from a peer.
FLAGCX_DEVICE bool sends_to(const Args& a, int peer) {
  (void)peer;
  if (FORM == BROADCAST) return a.rank == a.root;
  if (FORM == REDUCE) return peer == a.root;
  return FORM != BARRIER;
}
FLAGCX_DEVICE bool takes_from(const Args& a, int peer) {
  (void)peer;
  if (FORM == BROADCAST) return peer == a.root;
  if (FORM == REDUCE) return a.rank == a.root;
  return FORM != BARRIER;
}
// What this rank sends to a peer first; for its own rank, what it contributes itself.
FLAGCX_DEVICE Run send_run(const Args& a, int peer) {
#if FORM == BROADCAST
  if (a.rank != a.root) return Run{(T*)a.recvbuf, 0};
  return PARTS ? part_run(a, a.recvbuf, peer) : Run{(T*)a.recvbuf, a.count};
#elif PARTS
  return part_run(a, a.sendbuf, peer);
#elif FORM == REDUCE_SCATTER
  return Run{(T*)a.sendbuf + a.starts[peer], a.starts[peer + 1] - a.starts[peer]};
#elif FORM == ONE_SHOT || FORM == ALLGATHER || FORM == REDUCE || FORM == BARRIER
  (void)peer;
  return Run{(T*)a.sendbuf, a.count};
#else
  return block_run(a.sendbuf, peer, a.count);
#endif
}
// Where this rank puts what came from a peer; for its own rank, what it combines.
FLAGCX_DEVICE Run recv_run(const Args& a, int peer) {
#if PARTS
  return part_run(a, a.recvbuf, peer);
#elif FORM != ALLGATHER && FORM != ALLTOALL
  (void)peer;
  return Run{(T*)a.recvbuf, a.count};
#else
  return block_run(a.recvbuf, peer, a.count);
#endif
}
// After a wait that timed out, a replayed graph cannot raise an error: its results are overwritten with NaN.
FLAGCX_DEVICE void poison(const Args& a) {
  const bool blocks = FORM == ALLGATHER || FORM == ALLTOALL;
  const bool none = (FORM == BROADCAST && a.rank == a.root) || (FORM == REDUCE && a.rank != a.root);
  u8* const at = (u8*)(none ? 0 : a.recvbuf);
  const i64 nbytes = at ? a.count * (blocks ? RANKS : 1) * (i64)sizeof(T) : 0;
  const i64 threads = (i64)grid_size() * block_size();
  for (i64 i = (i64)block_index() * block_size() + thread_index(); i < nbytes; i += threads) at[i] = 0xff;
}
#if FORM == ONE_SHOT || FORM == TWO_SHOT || FORM == REDUCE_SCATTER || FORM == REDUCE
#define REDUCES 1
FLAGCX_DEVICE void widen_pack(A* sum, uint4 v) {
  Pack x;
  x.raw = v;
#pragma unroll
  for (int e = 0; e < N; e++) sum[e] = widen(x.at()[e]);
}
FLAGCX_DEVICE void combine_pack(A* sum, uint4 v) {
  Pack x;
  x.raw = v;
#pragma unroll
  for (int e = 0; e < N; e++) sum[e] = combine(sum[e], widen(x.at()[e]));
}
FLAGCX_DEVICE uint4 narrow_pack(const A* sum, const Args& a) {
  Pack x;
#pragma unroll
  for (int e = 0; e < N; e++) x.at()[e] = narrow(finished(sum[e], a.finish, a.factor));
  return x.raw;
}
#else
#define REDUCES 0
#endif
"""

COMMON = ARGS + WAITS + RUNS
