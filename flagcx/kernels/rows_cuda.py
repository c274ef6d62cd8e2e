"""The CUDA text of the kernel that adds up rows, but for what is generated from an epilogue.

The generated part defines ``Columns`` and ``Elements``, what a thread keeps of the operands; ``load_columns``
and ``load_elements_of``; and ``finish_row``, which turns the sums of a row in ``values`` into the result.

These kernels run for a few microseconds, and one multiprocessor has many threads of a row to serve, so every
instruction counts: lengths are constants, and arrays that begin at multiples of 16 bytes have a kernel of
their own (ALIGNED). Where there are fewer rows than multiprocessors, the blocks of a cluster share a row.
"""

from __future__ import annotations

ROW_INTRINSICS = r"""
#define FLAGCX_ROW_KERNEL extern "C" __global__ void FLAGCX_CLUSTERS __launch_bounds__(ROW_THREADS, 1)
#if CLUSTER > 1
#define FLAGCX_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define FLAGCX_CLUSTERS
#endif

// What the lane ``apart`` lanes away has; by all lanes of a warp.
FLAGCX_DEVICE float from_lane(float x, int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); }

#if CLUSTER > 1
// Where the shared memory at ``at`` lies in another block of the cluster.
FLAGCX_DEVICE float* in_block(float* at, int block) {
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(at), "r"(block));
  return (float*)there;
}
// What the threads of a cluster wrote before they arrived is visible after the wait for all of them.
FLAGCX_DEVICE void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
FLAGCX_DEVICE void await_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
#endif

// Two numbers in 16 bits each, the first in the lower half.
FLAGCX_DEVICE u32 two_bfloat16(float a, float b) {
#if __CUDA_ARCH__ >= 800
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
#else
  return (u32)to_bfloat16(b) << 16 | to_bfloat16(a);
#endif
}
FLAGCX_DEVICE u32 two_float16(float a, float b) {
#if __CUDA_ARCH__ >= 800
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
#else
  return (u32)to_float16(b) << 16 | to_float16(a);
#endif
}
"""
"""What the kernel needs of the GPU besides ``INTRINSICS``."""

ELEMENTS = r"""
struct RowArgs {
  Args a;                   // sendbuf: the rows; recvbuf: the result
  u64 arrays[MOST_ARRAYS];  // the operands
  i64 rows;
  float numbers[MOST_NUMBERS];
};

// Kinds of elements: how they are stored, and read as float32.
struct Float32 {
  typedef float S;
  static FLAGCX_DEVICE float widen(S x) { return x; }
  static FLAGCX_DEVICE void narrow(S* to, const float* x) {
    for (int e = 0; e < N; e++) to[e] = x[e];
  }
};
struct Float16 {
  typedef u16 S;
  static FLAGCX_DEVICE float widen(S x) { return from_float16(x); }
  static FLAGCX_DEVICE void narrow(S* to, const float* x) {
    for (int e = 0; e < N; e += 2) ((u32*)to)[e / 2] = two_float16(x[e], x[e + 1]);
  }
};
struct Bfloat16 {
  typedef u16 S;
  static FLAGCX_DEVICE float widen(S x) { return from_bfloat16(x); }
  static FLAGCX_DEVICE void narrow(S* to, const float* x) {
    for (int e = 0; e < N; e += 2) ((u32*)to)[e / 2] = two_bfloat16(x[e], x[e + 1]);
  }
};
struct Float8E4m3fn {
  typedef u8 S;
  static FLAGCX_DEVICE void narrow(S* to, const float* x) {
    for (int e = 0; e < N; e++) to[e] = to_float8_e4m3fn(x[e]);
  }
};
struct Float8E5m2 {
  typedef u8 S;
  static FLAGCX_DEVICE void narrow(S* to, const float* x) {
    for (int e = 0; e < N; e++) to[e] = to_float8_e5m2(x[e]);
  }
};
struct Int8 {
  typedef signed char S;
  static FLAGCX_DEVICE void narrow(S* to, const float* x) {
    for (int e = 0; e < N; e++) to[e] = x[e] != x[e] ? (S)-1 : (S)rintf(x[e]);
  }
};

#define UNROLL _Pragma("unroll")
#define EACH_PACK UNROLL for (int i = 0; i < PIECES; i++)
#define EACH_VALUE EACH_PACK UNROLL for (int e = 0; e < N; e++)

// A block has PIECES * ROW_THREADS places for packs of a row, which are numbered in it from 0. Those of the
// blocks of a cluster follow each other.
const int PLACES = PIECES * ROW_THREADS;
FLAGCX_DEVICE int place_of(int i) { return thread_index() + i * ROW_THREADS; }
FLAGCX_DEVICE int first_of_block() { return CLUSTER > 1 ? block_index() % CLUSTER * PLACES : 0; }
FLAGCX_DEVICE bool has_pack(int place) { return FULL || first_of_block() + place < PACKS; }
FLAGCX_DEVICE int column_of(int i) { return (first_of_block() + place_of(i)) * N; }
// Whether the row has an element e in the i-th pack of this thread.
FLAGCX_DEVICE bool has_value(int i, int e) {
  return ALIGNED ? has_pack(place_of(i)) : column_of(i) + e < COLUMNS;
}

// The elements of one pack of a row, in an array of any kind.
template <class K> struct Few {
  static const int SIZE = N * sizeof(typename K::S);
  static const int WORDS = SIZE / 4;
  union {
    u32 words[WORDS];
    typename K::S at[N];
  };
};
template <class K> FLAGCX_DEVICE void load_words(const void* at, Few<K>& few) {
  if (Few<K>::SIZE >= 16) {
    UNROLL for (int w = 0; w < Few<K>::WORDS; w += 4) {
      const uint4 v = ((const uint4*)at)[w / 4];
      few.words[w] = v.x;
      few.words[w + 1] = v.y;
      few.words[w + 2] = v.z;
      few.words[w + 3] = v.w;
    }
  } else {
    UNROLL for (int w = 0; w < Few<K>::WORDS; w++) few.words[w] = ((const u32*)at)[w];
  }
}
template <class K> FLAGCX_DEVICE void store_words(void* at, const Few<K>& few) {
  if (Few<K>::SIZE >= 16) {
    UNROLL for (int w = 0; w < Few<K>::WORDS; w += 4)
      ((uint4*)at)[w / 4] = uint4{few.words[w], few.words[w + 1], few.words[w + 2], few.words[w + 3]};
  } else if (Few<K>::SIZE == 8) {
    *(u64*)at = (u64)few.words[1] << 32 | few.words[0];
  } else {
    UNROLL for (int w = 0; w < Few<K>::WORDS; w++) ((u32*)at)[w] = few.words[w];
  }
}
// The i-th pack of this thread, of a row that begins at ``row``; beyond its end there are zeros.
template <class K> FLAGCX_DEVICE Few<K> load_few(const typename K::S* row, int i) {
  Few<K> few;
  if (ALIGNED && has_pack(place_of(i))) {
    load_words<K>(row + column_of(i), few);
  } else if (ALIGNED) {
    UNROLL for (int w = 0; w < Few<K>::WORDS; w++) few.words[w] = 0;
  } else {
    UNROLL for (int e = 0; e < N; e++) {
      few.at[e] = 0;
      if (has_value(i, e)) few.at[e] = row[column_of(i) + e];
    }
  }
  return few;
}
template <class K> FLAGCX_DEVICE void store_few(typename K::S* row, int i, const float* x) {
  Few<K> few;
  K::narrow(few.at, x);
  if (ALIGNED) {
    if (has_pack(place_of(i))) store_words<K>(row + column_of(i), few);
  } else {
    UNROLL for (int e = 0; e < N; e++)
      if (has_value(i, e)) row[column_of(i) + e] = few.at[e];
  }
}

// A number of the whole row from one of each thread: the same bits in all threads of all blocks that have the
// row. Each warp's goes to all blocks; every other call has the other half of ``scratch``, so that one
// barrier is enough.
FLAGCX_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }
FLAGCX_DEVICE float not_below(float x, float least) { return x < least ? least : x; }
const int ROW_WARPS = ROW_THREADS / WARP;
const int ROW_PARTS = CLUSTER * ROW_WARPS;
template <class Combine> FLAGCX_DEVICE float of_row(float x, float* scratch, u32 turn, Combine combine) {
  UNROLL for (int apart = WARP / 2; apart > 0; apart /= 2) x = combine(x, from_lane(x, apart));
  if (ROW_PARTS == 1) return x;
  float* const parts = scratch + (turn & 1) * ROW_PARTS;
  const int lane = thread_index() % WARP, warp = thread_index() / WARP;
#if CLUSTER > 1
  float* const mine = parts + block_index() % CLUSTER * ROW_WARPS + warp;
  for (int block = lane; block < CLUSTER; block += WARP) *in_block(mine, block) = x;
  arrive_in_cluster();
  await_cluster();
#else
  if (lane == 0) parts[warp] = x;
  join_block();
#endif
  const bool even = ROW_PARTS < WARP && (ROW_PARTS & (ROW_PARTS - 1)) == 0;
  x = even ? parts[lane % ROW_PARTS] : lane < ROW_PARTS ? parts[lane] : 0.0f;
  for (int part = lane + WARP; part < ROW_PARTS; part += WARP) x = combine(x, parts[part]);
  UNROLL for (int apart = WARP / 2; apart > 0; apart /= 2)
    if (!even || apart < ROW_PARTS) x = combine(x, from_lane(x, apart));
  return x;
}
FLAGCX_DEVICE float sum_of_row(float x, float* scratch, u32 turn) {
  return of_row(x, scratch, turn, [](float a, float b) { return a + b; });
}
FLAGCX_DEVICE float max_of_row(float x, float* scratch, u32 turn) {
  return of_row(x, scratch, turn, [](float a, float b) { return larger(a, b); });
}
FLAGCX_DEVICE float limited(float x) { return x > LIMIT ? LIMIT : x < -LIMIT ? -LIMIT : x; }
FLAGCX_DEVICE bool is_first() { return thread_index() == 0 && first_of_block() == 0; }
FLAGCX_DEVICE const T* row_at(const RowArgs& r, i64 row) { return (const T*)r.a.sendbuf + row * COLUMNS; }
"""

LOCAL_ROWS = r"""
FLAGCX_ROW_KERNEL flagcx_rows(FLAGCX_PARAMETER RowArgs r) {
  FLAGCX_SHARED(float, scratch, 2 * ROW_PARTS);
  Columns columns;
  load_columns(r, columns);
  u32 turn = 0;
  for (i64 row = block_index(); row < r.rows; row += grid_size()) {
    float values[PIECES][N];
    Elements elements;
    load_elements_of(r, row, elements);
    EACH_PACK {
      const Few<ROWS> few = load_few<ROWS>(row_at(r, row), i);
      UNROLL for (int e = 0; e < N; e++) values[i][e] = ROWS::widen(few.at[e]);
    }
    finish_row(r, row, values, columns, elements, scratch, turn);
  }
}
"""

EXCHANGED = r"""
#define MISSING __uint_as_float(0x7fc00000u)

// The pack at a place of this block, as it travels.
FLAGCX_DEVICE uint4 load_place(const RowArgs& r, i64 row, int place) {
  const i64 pack = first_of_block() + place;
  if (ALIGNED) return without_mark(load_own_pack((const uint4*)row_at(r, row) + pack));
  return load_run(Run{(T*)row_at(r, row), COLUMNS}, pack);
}
FLAGCX_DEVICE void load_row(const RowArgs& r, i64 row, uint4* outgoing) {
  EACH_PACK if (has_pack(place_of(i))) outgoing[i] = load_place(r, row, place_of(i));
}
// Where packs lie that rank ``from`` sends to ``rank``.
FLAGCX_DEVICE uint4* slot_of(const RowArgs& r, u32 flag, int rank, int from) {
  return packets_of(r.a, rank, flag & 1, from);
}
// ``j``: the number of the row among those of the block.
FLAGCX_DEVICE void push_row(const RowArgs& r, u32 flag, u32 j, const uint4* outgoing) {
#if FORM == TWO_SHOT
  EACH_PACK {
    const int owner = place_of(i) / SHARE;
    uint4* const to = slot_of(r, flag, owner, r.a.rank) + j * SHARE + place_of(i) - owner * SHARE;
    if (owner != r.a.rank && has_pack(place_of(i))) send_pack(to, outgoing[i], flag);
  }
#else
  UNROLL for (int k = 1; k < RANKS; k++) {
    uint4* const to = slot_of(r, flag, peer_after(r.a, k), r.a.rank) + j * PLACES;
    EACH_PACK if (has_pack(place_of(i))) send_pack(to + place_of(i), outgoing[i], flag);
  }
#endif
}
// Adds up, in the order of ranks, the packs that arrive at U places, ``apart`` from each other; this rank's
// are ``own``. All of them are polled together.
template <int U>
FLAGCX_DEVICE bool sum_packs(
    const RowArgs& r, u32 flag, u32 slot, u32 apart, int count, const uint4* own, A (*sum)[N]) {
  uint4* const from = slot_of(r, flag, r.a.rank, 0) + slot;
#pragma unroll
  for (int first = 0; first < RANKS; first += GROUP) {
    uint4 v[U][GROUP];
    Wait wait = {0, 0};
    for (;;) {
      int missing = -1;
#pragma unroll
      for (int g = 0; g < GROUP; g++)
        if (first + g < RANKS && first + g != r.a.rank)
#pragma unroll
          for (int u = 0; u < U; u++)
            if (u < count && !see_pack(from + (u64)(first + g) * SLOT_PACKS + u * apart, flag, &v[u][g]))
              missing = first + g;
      if (missing < 0) break;
      if (!keep_waiting(r.a, wait, missing)) return false;
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++)
      if (first + g < RANKS) {
#pragma unroll
        for (int u = 0; u < U; u++)
          if (u < count) {
            uint4 one = own[u];
            if (first + g != r.a.rank) {
              one = v[u][g];
              store_pack(from + (u64)(first + g) * SLOT_PACKS + u * apart, uint4{~0u, ~0u, ~0u, ~0u});
            }
            if (first + g == 0) widen_pack(sum[u], one);
            else combine_pack(sum[u], one);
          }
      }
  }
  return true;
}
#if FORM == TWO_SHOT
// Adds up this rank's share of a row, and sends the sums to all ranks, itself too.
FLAGCX_DEVICE bool share_row(const RowArgs& r, u32 flag, u32 j, i64 row) {
  for (int k = thread_index(); k < SHARE; k += ROW_THREADS) {
    const int place = r.a.rank * SHARE + k;
    if (place >= PLACES || !has_pack(place)) break;
    A sum[1][N];
    const uint4 own = load_place(r, row, place);
    if (!sum_packs<1>(r, flag, j * SHARE + k, 0, 1, &own, sum)) return false;
    Few<ROWS> few;
    ROWS::narrow(few.at, sum[0]);
    const uint4 made = without_mark(uint4{few.words[0], few.words[1], few.words[2], few.words[3]});
    UNROLL for (int p = 0; p < RANKS; p++)
      send_pack(slot_of(r, flag, peer_after(r.a, p), r.a.rank) + SECOND + j * SHARE + k, made, flag);
  }
  return true;
}
FLAGCX_DEVICE bool take_sums(const RowArgs& r, u32 flag, u32 j, A (*sum)[N]) {
  uint4* from[PIECES];
  EACH_PACK {
    const int owner = place_of(i) / SHARE;
    from[i] = slot_of(r, flag, r.a.rank, owner) + SECOND + j * SHARE + place_of(i) - owner * SHARE;
  }
  uint4 v[PIECES];
  Wait wait = {0, 0};
  for (;;) {
    int missing = -1;
    EACH_PACK
      if (has_pack(place_of(i)) && !see_pack(from[i], flag, v + i)) missing = place_of(i) / SHARE;
    if (missing < 0) break;
    if (!keep_waiting(r.a, wait, missing)) return false;
  }
  EACH_PACK if (has_pack(place_of(i))) {
    store_pack(from[i], uint4{~0u, ~0u, ~0u, ~0u});
    widen_pack(sum[i], v[i]);
  }
  return true;
}
#endif
#if FORM != TWO_SHOT
// Packs that are polled together, so that their registers are not too many.
const int TOGETHER = PIECES * GROUP <= 8 ? PIECES : GROUP >= 8 ? 1 : 8 / GROUP;
#endif
// Where a rank has not come, all of the result is NaN: the threads of a block must not part before a barrier.
FLAGCX_DEVICE void receive_row(const RowArgs& r, u32 flag, u32 j, i64 row, bool ok, float (*values)[N]) {
  A sum[PIECES][N];
#if FORM == TWO_SHOT
  ok = ok && share_row(r, flag, j, row);
  join_block();  // Threads without a share must not blame a rank that waits for another.
  ok = ok && take_sums(r, flag, j, sum);
#else
  UNROLL for (int i = 0; i < PIECES; i += TOGETHER) {
    uint4 own[TOGETHER];
    int count = 0;
    UNROLL for (int u = 0; u < TOGETHER; u++)
      if (i + u < PIECES && has_pack(place_of(i + u))) {
        own[u] = load_place(r, row, place_of(i + u));
        count = u + 1;
      }
    if ((count || FULL) && ok)
      ok = sum_packs<TOGETHER>(r, flag, j * PLACES + place_of(i), ROW_THREADS, count, own, sum + i);
  }
#endif
  EACH_VALUE values[i][e] = !ok ? MISSING : has_pack(place_of(i)) ? (float)sum[i][e] : 0.0f;
}

FLAGCX_ROW_KERNEL flagcx_rows(FLAGCX_PARAMETER RowArgs r) {
  FLAGCX_SHARED(float, scratch, 2 * ROW_PARTS);
#if CLUSTER > 1
  arrive_in_cluster();  // A block must have begun before another writes to its shared memory.
#endif
  const i64 first = block_index() / CLUSTER, stride = grid_size() / CLUSTER;
  const u32 rows = (u32)((r.rows - first + stride - 1) / stride);
  uint4 outgoing[PIECES];
  load_row(r, first, outgoing);
  State* const state = state_of(r.a);
  const u32 dead = ((State*)(memory_of(r.a, r.a.rank) + AT_STATE))->dead;
  u32 flag = state->bare + 1;
  if (flag == 0) flag = 2;
  Columns columns;
  u32 sent = 0, turn = 0;
  for (u32 j = 0; j < rows; j++) {
    const i64 row = first + j * stride;
    for (; sent < rows && sent <= j + AHEAD; sent++) {
      if (sent) load_row(r, first + sent * stride, outgoing);
      if (dead == 0) push_row(r, flag, sent, outgoing);
    }
    Elements elements;
    load_elements_of(r, row, elements);
    if (j == 0) load_columns(r, columns);
    float values[PIECES][N];
    receive_row(r, flag, j, row, dead == 0, values);
#if CLUSTER > 1
    if (j == 0) await_cluster();
#endif
    finish_row(r, row, values, columns, elements, scratch, turn);
  }
  join_block();
  if (thread_index() == 0) state->bare = flag;
}
"""
