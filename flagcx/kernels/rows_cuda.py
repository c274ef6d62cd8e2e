"""The CUDA text of the kernel that adds up rows, but for what is generated from an epilogue.

The generated part defines ``Columns`` and ``Elements``, what a thread keeps of the operands; ``load_columns``
and ``load_elements_of``; and ``finish_row``, which turns the sums of a row in ``values`` into the result.
"""

from __future__ import annotations

WARPS = r"""
// What the lane ``apart`` lanes away has; by all lanes of a warp.
FLAGCX_DEVICE float from_lane(float x, int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); }
"""
"""What the kernel needs of the GPU besides ``INTRINSICS``."""

ELEMENTS = r"""
struct RowArgs {
  Args a;                   // sendbuf: the rows; recvbuf: the result
  u64 arrays[MOST_ARRAYS];  // the operands
  i64 rows, columns;
  float numbers[MOST_NUMBERS];
  u32 packs;  // packs of a row
  u32 share;  // packs of a row that a rank adds up
  u32 ahead;  // rows that a block sends before it finishes one
  u32 unused;
};

// Kinds of elements: how they are stored, and read as float32.
struct Float32 {
  typedef float S;
  static FLAGCX_DEVICE float widen(S x) { return x; }
  static FLAGCX_DEVICE S narrow(float x) { return x; }
};
struct Float16 {
  typedef u16 S;
  static FLAGCX_DEVICE float widen(S x) { return from_float16(x); }
  static FLAGCX_DEVICE S narrow(float x) { return to_float16(x); }
};
struct Bfloat16 {
  typedef u16 S;
  static FLAGCX_DEVICE float widen(S x) { return from_bfloat16(x); }
  static FLAGCX_DEVICE S narrow(float x) { return to_bfloat16(x); }
};
struct Float8E4m3fn {
  typedef u8 S;
  static FLAGCX_DEVICE S narrow(float x) { return to_float8_e4m3fn(x); }
};
struct Float8E5m2 {
  typedef u8 S;
  static FLAGCX_DEVICE S narrow(float x) { return to_float8_e5m2(x); }
};
struct Int8 {
  typedef signed char S;
  static FLAGCX_DEVICE S narrow(float x) { return x != x ? (S)0 : (S)rintf(x); }
};

// The elements of one pack of a row, in an array of any kind.
template <class K> struct Few {
  static const int WIDTH = N * sizeof(typename K::S);
  union {
    uint4 packs[(WIDTH + 15) / 16];
    u64 eight;
    u32 four;
    typename K::S at[N];
  };
};
template <class K> FLAGCX_DEVICE bool together(const typename K::S* at, i64 left) {
  const int unit = Few<K>::WIDTH < 16 ? Few<K>::WIDTH : 16;
  return left >= N && ((u64)at & (unit - 1)) == 0;
}
// ``left``: elements from ``at`` to the end of the row; in place of those beyond it there are zeros.
template <class K> FLAGCX_DEVICE Few<K> load_few(const typename K::S* at, i64 left) {
  Few<K> few;
  if (together<K>(at, left)) {
    if (Few<K>::WIDTH == 8) few.eight = *(const u64*)at;
    else
#pragma unroll
      for (int i = 0; i < (Few<K>::WIDTH + 15) / 16; i++) few.packs[i] = ((const uint4*)at)[i];
    return few;
  }
#pragma unroll
  for (int e = 0; e < N; e++) few.at[e] = e < left ? at[e] : (typename K::S)0;
  return few;
}
template <class K> FLAGCX_DEVICE void store_few(typename K::S* at, i64 left, const float* x) {
  Few<K> few;
#pragma unroll
  for (int e = 0; e < N; e++) few.at[e] = K::narrow(x[e]);
  if (together<K>(at, left)) {
    if (Few<K>::WIDTH == 4) *(u32*)at = few.four;
    else if (Few<K>::WIDTH == 8) *(u64*)at = few.eight;
    else
#pragma unroll
      for (int i = 0; i < (Few<K>::WIDTH + 15) / 16; i++) ((uint4*)at)[i] = few.packs[i];
    return;
  }
#pragma unroll
  for (int e = 0; e < N; e++)
    if (e < left) at[e] = few.at[e];
}

#define UNROLL _Pragma("unroll")
#define EACH_PACK UNROLL for (int i = 0; i < PIECES; i++)
#define EACH_VALUE EACH_PACK UNROLL for (int e = 0; e < N; e++)

FLAGCX_DEVICE u32 pack_of(int i) { return (u32)(thread_index() + i * block_size()); }
FLAGCX_DEVICE i64 column_of(int i) { return (i64)pack_of(i) * N; }

// A number of the whole row from one of each thread: the same bits in all threads. Every other call of a
// block has the other half of ``scratch``, so that one barrier is enough.
FLAGCX_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }
FLAGCX_DEVICE float not_below(float x, float least) { return x < least ? least : x; }
template <class Combine> FLAGCX_DEVICE float of_row(float x, float* scratch, u32 turn, Combine combine) {
#pragma unroll
  for (int apart = WARP / 2; apart > 0; apart /= 2) x = combine(x, from_lane(x, apart));
  const int warps = block_size() / WARP;
  if (warps == 1) return x;
  float* const of_warps = scratch + (turn & 1) * (ROW_THREADS / WARP);
  if (thread_index() % WARP == 0) of_warps[thread_index() / WARP] = x;
  join_block();
  x = of_warps[0];
  for (int w = 1; w < warps; w++) x = combine(x, of_warps[w]);
  return x;
}
FLAGCX_DEVICE float sum_of_row(float x, float* scratch, u32 turn) {
  return of_row(x, scratch, turn, [](float a, float b) { return a + b; });
}
FLAGCX_DEVICE float max_of_row(float x, float* scratch, u32 turn) {
  return of_row(x, scratch, turn, [](float a, float b) { return larger(a, b); });
}
FLAGCX_DEVICE float limited(float x) { return x > LIMIT ? LIMIT : x < -LIMIT ? -LIMIT : x; }
FLAGCX_DEVICE const T* row_at(const RowArgs& r, i64 row) { return (const T*)r.a.sendbuf + row * r.columns; }
"""

LOCAL_ROWS = r"""
FLAGCX_KERNEL(ROW_THREADS, 1) flagcx_rows(FLAGCX_PARAMETER RowArgs r) {
  FLAGCX_SHARED(float, scratch, 2 * (ROW_THREADS / WARP));
  Columns columns;
  load_columns(r, columns);
  u32 turn = 0;
  for (i64 row = block_index(); row < r.rows; row += grid_size()) {
    float values[PIECES][N];
    Elements elements;
    load_elements_of(r, row, elements);
    EACH_PACK {
      const Few<ROWS> few = load_few<ROWS>(row_at(r, row) + column_of(i), r.columns - column_of(i));
      UNROLL for (int e = 0; e < N; e++) values[i][e] = ROWS::widen(few.at[e]);
    }
    finish_row(r, row, values, columns, elements, scratch, turn);
  }
}
"""

EXCHANGED = r"""
#define MISSING __uint_as_float(0x7fc00000u)

FLAGCX_DEVICE Run run_of(const RowArgs& r, i64 row) { return Run{(T*)row_at(r, row), r.columns}; }
FLAGCX_DEVICE void load_row(const RowArgs& r, i64 row, uint4* outgoing) {
  EACH_PACK if (pack_of(i) < r.packs) outgoing[i] = load_run(run_of(r, row), pack_of(i));
}
// Where packs lie that rank ``from`` sends to ``rank``.
FLAGCX_DEVICE uint4* slot_of(const RowArgs& r, u32 flag, int rank, int from) {
  return packets_of(r.a, rank, flag & 1, from);
}
// ``j``: the number of the row among those of the block.
FLAGCX_DEVICE void push_row(const RowArgs& r, u32 flag, u32 j, const uint4* outgoing) {
  EACH_PACK {
    const u32 pack = pack_of(i);
    if (pack >= r.packs) continue;
#if FORM == TWO_SHOT
    const u32 owner = pack / r.share;
    uint4* const to = slot_of(r, flag, (int)owner, r.a.rank) + j * r.share + pack - owner * r.share;
    if ((int)owner != r.a.rank) send_pack(to, outgoing[i], flag);
#else
    UNROLL for (int k = 1; k < RANKS; k++)
      send_pack(slot_of(r, flag, peer_after(r.a, k), r.a.rank) + j * r.packs + pack, outgoing[i], flag);
#endif
  }
}
// The sum of the packs at ``slot`` of all ranks, in their order; of this rank ``own``.
FLAGCX_DEVICE bool sum_pack(const RowArgs& r, u32 flag, u32 slot, uint4 own, A* sum) {
#pragma unroll
  for (int first = 0; first < RANKS; first += GROUP) {
    uint4 v[GROUP];
    if (!take_packets(r.a, flag, slot, first, v)) return false;
#pragma unroll
    for (int g = 0; g < GROUP; g++)
      if (first + g < RANKS) {
        if (first + g == r.a.rank) v[g] = own;
        if (first + g == 0) widen_pack(sum, v[g]);
        else combine_pack(sum, v[g]);
      }
  }
  return true;
}
#if FORM == TWO_SHOT
// Adds up this rank's share of a row, and sends the sums to all ranks, itself too.
FLAGCX_DEVICE bool share_row(const RowArgs& r, u32 flag, u32 j, i64 row) {
  const u32 begin = r.share * r.a.rank;
  const u32 packs = begin >= r.packs ? 0 : r.packs - begin < r.share ? r.packs - begin : r.share;
  for (u32 k = thread_index(); k < packs; k += block_size()) {
    A sum[N];
    if (!sum_pack(r, flag, j * r.share + k, load_run(run_of(r, row), begin + k), sum)) return false;
    const uint4 made = without_mark(narrow_pack(sum, r.a));
    UNROLL for (int p = 0; p < RANKS; p++)
      send_pack(slot_of(r, flag, peer_after(r.a, p), r.a.rank) + SECOND + j * r.share + k, made, flag);
  }
  return true;
}
FLAGCX_DEVICE bool take_sum(const RowArgs& r, u32 flag, u32 j, u32 pack, A* sum) {
  const u32 owner = pack / r.share;
  const u32 place = j * r.share + pack - owner * r.share;
  uint4* const from = slot_of(r, flag, r.a.rank, (int)owner) + SECOND + place;
  Wait wait = {0, 0};
  uint4 v;
  while (!see_pack(from, flag, &v))
    if (!keep_waiting(r.a, wait, (int)owner)) return false;
  store_pack(from, uint4{~0u, ~0u, ~0u, ~0u});
  widen_pack(sum, v);
  return true;
}
#endif
FLAGCX_DEVICE void receive_row(const RowArgs& r, u32 flag, u32 j, i64 row, float (*values)[N]) {
#if FORM == TWO_SHOT
  share_row(r, flag, j, row);
#endif
  EACH_PACK {
    A sum[N];
    bool ok = true;
    const u32 pack = pack_of(i);
    if (pack < r.packs) {
#if FORM == TWO_SHOT
      ok = take_sum(r, flag, j, pack, sum);
#else
      ok = sum_pack(r, flag, j * r.packs + pack, load_run(run_of(r, row), pack), sum);
#endif
    }
    UNROLL for (int e = 0; e < N; e++) values[i][e] = !ok ? MISSING : pack < r.packs ? (float)sum[e] : 0.0f;
  }
}

FLAGCX_KERNEL(ROW_THREADS, 1) flagcx_rows(FLAGCX_PARAMETER RowArgs r) {
  FLAGCX_SHARED(float, scratch, 2 * (ROW_THREADS / WARP));
  const i64 first = block_index(), stride = grid_size();
  const u32 rows = (u32)((r.rows - first + stride - 1) / stride);
  uint4 outgoing[PIECES];
  load_row(r, first, outgoing);
  State* const state = state_of(r.a);
  const u32 dead = ((State*)(memory_of(r.a, r.a.rank) + AT_STATE))->dead;
  u32 flag = state->bare + 1;
  if (flag == 0) flag = 2;
  if (dead) {
    poison_rows(r);
  } else {
    Columns columns;
    u32 sent = 0, turn = 0;
    for (u32 j = 0; j < rows; j++) {
      const i64 row = first + j * stride;
      for (; sent < rows && sent <= j + r.ahead; sent++) {
        if (sent) load_row(r, first + sent * stride, outgoing);
        push_row(r, flag, sent, outgoing);
      }
      Elements elements;
      load_elements_of(r, row, elements);
      if (j == 0) load_columns(r, columns);
      float values[PIECES][N];
      receive_row(r, flag, j, row, values);
      finish_row(r, row, values, columns, elements, scratch, turn);
    }
  }
  join_block();
  if (thread_index() == 0) state->bare = flag;
}
"""

POISON = r"""
FLAGCX_DEVICE void poison_array(u64 array, i64 nbytes) {
  const i64 threads = (i64)grid_size() * block_size();
  for (i64 i = (i64)block_index() * block_size() + thread_index(); i < nbytes; i += threads)
    ((u8*)array)[i] = 0xff;
}
"""
