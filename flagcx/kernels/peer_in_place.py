"""Two-shot without boxes, where the arrays of all ranks lie in memory that the peers see.

The ranks exchange the handles of their arrays first. Then each rank writes its part of the result to every
rank's recvbuf, so there is no third stage. On one GPU it reads its part of every rank's sendbuf too, and
there are no chunks. Between GPUs pushing through inboxes is faster than reading, but reading takes fewer
blocks and less memory bandwidth, so it is used there for calls that overlap with a computation.
"""

from __future__ import annotations

IN_PLACE = r"""
#if FORM == TWO_SHOT
FLAGCX_DEVICE bool pulls(const Args& a) { return PULLS || a.pull; }
// Sends the handles of this rank's arrays to all peers and waits for theirs; by one warp. Returns whether all
// arrays can be used in place, and their addresses.
FLAGCX_DEVICE bool exchange_handles(const Args& a, u32 flag, int lane, u64* sendbufs, u64* recvbufs) {
  bool in_place = true;
  for (int q = lane; q < RANKS; q += WARP) {
    u64 handles[2] = {a.sendbuf_handle, a.recvbuf_handle};
    if (q != a.rank) {
      uint4* const to = (uint4*)(memory_of(a, q) + AT_HANDLES) + (block_index() * MOST_RANKS + a.rank) * 2;
      uint4* const from = (uint4*)(memory_of(a, a.rank) + AT_HANDLES) + (block_index() * MOST_RANKS + q) * 2;
      for (int i = 0; i < 2; i++)
        store_packet(to + i, uint4{(u32)handles[i], flag, (u32)(handles[i] >> 32), flag});
      Wait wait = {0, 0};
      for (int i = 0; i < 2; i++) {
        uint4 x = load_packet(from + i);
        while (x.y != flag || x.w != flag) {
          if (!keep_waiting(a, wait, q)) break;
          x = load_packet(from + i);
        }
        handles[i] = x.y == flag && x.w == flag ? (u64)x.z << 32 | x.x : 0;
      }
    }
    const u64* const segments = (const u64*)a.segments;
    const u64 mask = ((u64)1 << OFFSET_BITS) - 1;
    in_place = in_place && handles[1] != 0 && (pulls(a) ? handles[0] != 0 : (handles[1] & 15) == 0);
    if (in_place) {
      const u64 from = handles[0], to = handles[1];
      if (pulls(a)) sendbufs[q] = segments[((from >> OFFSET_BITS) - 1) * RANKS + q] + (from & mask);
      recvbufs[q] = segments[((to >> OFFSET_BITS) - 1) * RANKS + q] + (to & mask);
    }
  }
  return all_of_warp(in_place);
}
// Reduces packs of this rank's part of all arrays, in place.
template <int U>
FLAGCX_DEVICE void reduce_packs(const Args& a, const u64* sendbufs, const u64* recvbufs, i64 begin, i64 i) {
  uint4 made[U];
  sum_packs<U>(a, [&](int q) { return (const uint4*)((const T*)sendbufs[q] + begin) + i; }, made);
#pragma unroll
  for (int k = 0; k < RANKS; k++) {
    uint4* const to = (uint4*)((T*)recvbufs[peer_after(a, k)] + begin) + i;
#pragma unroll
    for (int u = 0; u < U; u++) store_pack(to + u * WORK, made[u]);
  }
}
FLAGCX_DEVICE void reduce_in_place(const Args& a, int t, const u64* sendbufs, const u64* recvbufs) {
  const i64 stride = (i64)grid_size() * WORK * SUM_UNROLL;
  const i64 begin = a.rank * a.part * N;
  const i64 count = part_run(a, 0, a.rank).count;
  bool aligned = true;
  for (int q = 0; q < RANKS; q++) aligned = aligned && ((sendbufs[q] | recvbufs[q]) & 15) == 0;
  const i64 packs = aligned ? count / N : 0;
  for (i64 i = (i64)block_index() * WORK * SUM_UNROLL + t; i < packs; i += stride) {
    if (i + (SUM_UNROLL - 1) * WORK < packs) {
      reduce_packs<SUM_UNROLL>(a, sendbufs, recvbufs, begin, i);
      continue;
    }
    for (int u = 0; u < SUM_UNROLL && i + u * WORK < packs; u++)
      reduce_packs<1>(a, sendbufs, recvbufs, begin, i + u * WORK);
  }
  const i64 threads = (i64)grid_size() * WORK;
  for (i64 e = packs * N + (i64)block_index() * WORK + t; e < count; e += threads) {
    A sum = widen(((const T*)sendbufs[0])[begin + e]);
    for (int q = 1; q < RANKS; q++) sum = combine(sum, widen(((const T*)sendbufs[q])[begin + e]));
    const T made = narrow(finished(sum, a.finish, a.factor));
    for (int q = 0; q < RANKS; q++) ((T*)recvbufs[q])[begin + e] = made;
  }
}
#endif
"""
