"""The CUDA text of the kernel that adds up rows over ranks: packets through the peers' memory, row after row.

It sends the packs of some rows ahead, then adds up and finishes one row after the other; see
``flagcx.kernels.rows``.
"""

from __future__ import annotations

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
  const u32 busy = thread_index() == 0 ? begin_launch(state) : 0;
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
  if (thread_index() != 0) return;
  state->bare = flag;
  end_launch(r.a, state, busy);
}
"""
