"""What the peer kernels need of the GPU: access to memory that other GPUs see, flags, and patience.

The text is CUDA with PTX. Whatever a kernel does with other threads goes through the functions here, so that
the kernels' own text also compiles for a host that stands in for these few (the tests do that).
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
// What one lane has seen is behind all of them when these return.
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
// Words between the warps of a block: atomics, which are no race.
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

// A flag, and with it all that its writer wrote before release().
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

// 16 bytes that others write: never from the first cache, which does not see them.
FLAGCX_DEVICE uint4 load_shared_pack(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed." SCOPE ".global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}
// 16 bytes with flags among the data; each half of 8 bytes arrives whole.
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
// Callers' arrays are used once: they should not drive from the cache what goes through the boxes.
FLAGCX_DEVICE uint4 load_own_pack(const uint4* at) { return __ldcs(at); }
FLAGCX_DEVICE void store_own_pack(uint4* at, uint4 v) { __stcs(at, v); }
"""
"""PTX for what CUDA C++ lacks. ``SCOPE`` is "gpu" where all ranks share one GPU, else "sys"."""

COMMON = r"""
struct Args {
  u64 peer[MOST_RANKS];  // the ranks' memories, where this process sees them
  u64 given, result;
  u64 given_name, result_name;  // segment and offset, if the peers see that array too; else 0
  u64 segments;                 // where this process sees each segment of each rank
  u64 words;                    // of the host: whether to stop; whether time ran out; for whom
  u64 limit_ns;
  i64 count;  // elements of the message, or of a block where there is one a rank
  i64 part;   // packs of what one rank deals with
  double factor;
  u32 chunk;  // packs of a chunk
  u32 steps;  // chunks of each block of threads
  int rank, root, finish;
  int pull;  // whether arrays that all ranks see are read in place, between GPUs too
};
// How far a block of threads has come, over all launches.
struct State { u32 chunks, calls, packets, bare, dead, slot, pulls, unused; };

const int N = 16 / sizeof(T);  // elements of a pack
union Pack { uint4 raw; u8 bytes[16]; FLAGCX_DEVICE T* at() { return (T*)bytes; } };

FLAGCX_DEVICE u8* memory_of(const Args& a, int rank) { return (u8*)a.peer[rank]; }
FLAGCX_DEVICE State* state_of(const Args& a) {
  return (State*)(memory_of(a, a.rank) + AT_STATE) + block_index();
}
FLAGCX_DEVICE u32* flags_of(const Args& a, int rank, u64 kind) {
  return (u32*)(memory_of(a, rank) + kind) + block_index() * MOST_RANKS;
}
FLAGCX_DEVICE int other(const Args& a, int k) {
  const int rank = a.rank + k;
  return rank < RANKS ? rank : rank - RANKS;
}

// A wait that is in vain ends by the clock, by the host's word, or because another one of this rank did.
struct Patience { u64 start; u32 polls; };
FLAGCX_DEVICE bool lasts(const Args& a, Patience& p, int peer) {
  if (++p.polls & POLLS) return true;
  const u64 now = now_ns();
  if (p.start == 0) p.start = now;
  u32* const words = (u32*)a.words;
  u32* const dead = &((State*)(memory_of(a, a.rank) + AT_STATE))->dead;
  const bool late = now - p.start >= a.limit_ns;
  if (!late && load_host(words) == 0 && load_flag(dead) == 0) return true;
  if (late && load_flag(dead) == 0) {
    store_host(words + 2, (u32)peer);
    release_to_host();
    store_host(words + 1, 1u);
  }
  store_flag(dead, 1u);
  return false;
}
// Whether a flag has come to ``want``, counted with wrap-around.
FLAGCX_DEVICE bool await(const Args& a, const u32* flag, u32 want, int peer) {
  Patience patience = {0, 0};
  while ((int)(load_flag(flag) - want) < 0)
    if (!lasts(a, patience, peer)) return false;
  return true;
}
// The same for the flags of all peers, by one warp.
FLAGCX_DEVICE bool await_all(const Args& a, u64 kind, u32 want, int lane) {
  const u32* const flags = flags_of(a, a.rank, kind);
  bool come = true;
  for (int q = lane; q < RANKS; q += WARP)
    if (q != a.rank) come = await(a, flags + q, want, q) && come;
  return all_of_warp(come);
}
// Whether they have come already; by one warp, without waiting. Nothing is read on the strength of this.
FLAGCX_DEVICE bool peek_all(const Args& a, u64 kind, u32 want, int lane) {
  bool come = true;
  for (int q = lane; q < RANKS; q += WARP)
    if (q != a.rank) come = come && (int)(peek_flag(flags_of(a, a.rank, kind) + q) - want) >= 0;
  return all_of_warp(come);
}
// By one warp, behind release(): the flag to all peers.
FLAGCX_DEVICE void tell_all(const Args& a, u64 kind, u32 value, int lane) {
  for (int k = lane + 1; k < RANKS; k += WARP) {
    const int q = other(a, k);
    store_flag(flags_of(a, q, kind) + a.rank, value);
  }
}

// A run of elements in a caller's array: of any alignment, and any count.
struct Run { T* at; i64 count; };
FLAGCX_DEVICE bool whole(const Run& run, i64 stop) {
  return ((u64)run.at & 15) == 0 && stop * N <= run.count;
}
FLAGCX_DEVICE uint4 load_loose(const Run& run, i64 pack) {
  Pack x;
#pragma unroll
  for (int e = 0; e < N; e++) {
    x.at()[e] = T();
    if (pack * N + e < run.count) x.at()[e] = run.at[pack * N + e];
  }
  return x.raw;
}
FLAGCX_DEVICE void store_loose(const Run& run, i64 pack, uint4 v) {
  Pack x;
  x.raw = v;
#pragma unroll
  for (int e = 0; e < N; e++)
    if (pack * N + e < run.count) run.at[pack * N + e] = x.at()[e];
}
FLAGCX_DEVICE Run block_run(u64 array, int block, i64 count) { return Run{(T*)array + block * count, count}; }
// The part of a message that a rank deals with: whole packs, but for the last.
FLAGCX_DEVICE Run part_run(const Args& a, u64 array, int rank) {
  const i64 most = a.part * N, left = a.count - rank * most;
  return Run{(T*)array + rank * most, left < 0 ? 0 : left > most ? most : left};
}
// What goes to a peer first, and what one's own result is made of.
FLAGCX_DEVICE Run departure(const Args& a, int peer) {
#if FORM == TWO_SHOT
  return part_run(a, a.given, peer);
#elif FORM == BROADCAST
  return a.rank == a.root ? part_run(a, a.result, peer) : Run{(T*)a.result, 0};
#elif FORM == ONE_SHOT || FORM == ALLGATHER
  (void)peer;
  return Run{(T*)a.given, a.count};
#else
  return block_run(a.given, peer, a.count);
#endif
}
// Where the rank puts what it combines, or what came from a peer.
FLAGCX_DEVICE Run arrival(const Args& a, int peer) {
#if FORM == TWO_SHOT || FORM == BROADCAST
  return part_run(a, a.result, peer);
#elif FORM == ONE_SHOT || FORM == REDUCE_SCATTER
  (void)peer;
  return Run{(T*)a.result, a.count};
#else
  return block_run(a.result, peer, a.count);
#endif
}
// Where a wait was given up before, a graph that is replayed has nobody to tell: its results are made NaN.
FLAGCX_DEVICE void spoil(const Args& a) {
  const bool blocks = FORM == ALLGATHER || FORM == ALLTOALL;
  u8* const at = (u8*)(FORM == BROADCAST && a.rank == a.root ? 0 : a.result);
  const i64 nbytes = at ? a.count * (blocks ? RANKS : 1) * (i64)sizeof(T) : 0;
  const i64 threads = (i64)grid_size() * block_size();
  for (i64 i = (i64)block_index() * block_size() + thread_index(); i < nbytes; i += threads) at[i] = 0xff;
}
#if FORM == ONE_SHOT || FORM == TWO_SHOT || FORM == REDUCE_SCATTER
#define REDUCES 1
FLAGCX_DEVICE A finished(A x, int finish, double factor) {
  return finish == 0 ? x : finish == 1 ? scaled(x, factor) : divided(x, factor);
}
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
