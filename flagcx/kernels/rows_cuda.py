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
