"""The kernel for small messages: packets that say themselves that they have come.

Each rank pushes what is meant for a peer straight into the peer's memory and watches its own memory for what
the peers push: one hop, no fence, no barrier. There are two kinds of packets.

* *Flagged*: a pack of 16 bytes travels as two packets of {4 bytes, flag, 4 bytes, flag}, each among its like,
  so that a warp writes whole lines. The flag is the number of the call. For all elements, at half the speed.
* *Bare*: memory that is waiting has all bits set, which as a number is one NaN out of many. Who sends it
  sends another NaN in its place; who has read a packet sets all bits again. For floating-point numbers.

Two halves of the memory take turns, so nobody overwrites what is still being read: a rank that is in call
k + 2 has got every peer's packets of call k + 1, so every peer has finished call k.
"""

from __future__ import annotations

PACKETS = r"""
#if BARE
#define AT_SLOTS AT_BARE
#define SLOT_PACKS MOST_BARE
#else
#define AT_SLOTS AT_PACKETS
#define SLOT_PACKS (2 * MOST_PACKETS)
#endif
FLAGCX_DEVICE uint4* packets_of(const Args& a, int rank, u32 half, int from) {
  const u64 slot = ((u64)block_index() * 2 + half) * RANKS + from;
  return (uint4*)(memory_of(a, rank) + AT_SLOTS) + slot * SLOT_PACKS;
}
FLAGCX_DEVICE void send_pack(uint4* to, uint4 v, u32 flag) {
#if BARE
  (void)flag;
  v.x = v.x == ~0u ? OTHER_NAN : v.x;
  v.y = v.y == ~0u ? OTHER_NAN : v.y;
  v.z = v.z == ~0u ? OTHER_NAN : v.z;
  v.w = v.w == ~0u ? OTHER_NAN : v.w;
  store_packet(to, v);
#else
  store_packet(to, uint4{v.x, flag, v.y, flag});
  store_packet(to + MOST_PACKETS, uint4{v.z, flag, v.w, flag});
#endif
}
// What lies in a slot, and whether all of it has come.
FLAGCX_DEVICE bool see_pack(const uint4* from, u32 flag, uint4* v) {
  const uint4 x = load_packet(from);
#if BARE
  (void)flag;
  *v = x;
  return x.x != ~0u && x.y != ~0u && x.z != ~0u && x.w != ~0u;
#else
  const uint4 y = load_packet(from + MOST_PACKETS);
  *v = uint4{x.x, x.z, y.x, y.z};
  return x.y == flag && x.w == flag && y.y == flag && y.w == flag;
#endif
}
FLAGCX_DEVICE uint4 load_run(const Run& run, i64 pack) {
  return whole(run, pack + 1) ? load_own_pack((const uint4*)run.at + pack) : load_loose(run, pack);
}
FLAGCX_DEVICE void store_run(const Run& run, i64 pack, uint4 v) {
  if (whole(run, pack + 1)) store_pack((uint4*)run.at + pack, v);
  else store_loose(run, pack, v);
}
// What goes to all peers alike is loaded before anything is known of the call.
#define ALIKE (FORM == ONE_SHOT || FORM == ALLGATHER)
FLAGCX_DEVICE void push_packets(const Args& a, u32 flag, u32 j, i64 pack, uint4 v) {
#pragma unroll
  for (int k = 1; k < RANKS; k++) {
    const int p = other(a, k);
    if (!ALIKE) v = load_run(departure(a, p), pack);
    uint4* const to = packets_of(a, p, flag & 1, a.rank) + j;
    send_pack(to, v, flag);
  }
}
const int GROUP = RANKS < 8 ? RANKS : 8;  // ranks whose packets are looked at together

// The packs of ranks first to first + GROUP, once they have all come.
FLAGCX_DEVICE bool take_packets(const Args& a, u32 flag, u32 j, i64 pack, int first, uint4* v) {
  uint4* const from = packets_of(a, a.rank, flag & 1, 0) + j;
  Patience patience = {0, 0};
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int g = 0; g < GROUP; g++)
      if (first + g < RANKS && first + g != a.rank)
        if (!see_pack(from + (u64)(first + g) * SLOT_PACKS, flag, v + g)) missing = first + g;
    if (missing < 0) break;
    if (!lasts(a, patience, missing)) return false;
  }
#pragma unroll
  for (int g = 0; g < GROUP; g++)
    if (first + g < RANKS) {
      if (first + g == a.rank) v[g] = load_run(departure(a, a.rank), pack);
#if BARE
      else store_pack(from + (u64)(first + g) * SLOT_PACKS, uint4{~0u, ~0u, ~0u, ~0u});
#endif
    }
  return true;
}
FLAGCX_DEVICE bool finish_pack(const Args& a, u32 flag, u32 j, i64 pack) {
#if REDUCES
  A sum[N];
#endif
#pragma unroll
  for (int first = 0; first < RANKS; first += GROUP) {
    uint4 v[GROUP];
    if (!take_packets(a, flag, j, pack, first, v)) return false;
#pragma unroll
    for (int g = 0; g < GROUP; g++)
      if (first + g < RANKS) {
#if REDUCES
        if (first + g == 0) widen_pack(sum, v[g]);
        else combine_pack(sum, v[g]);
#else
        store_run(arrival(a, first + g), pack, v[g]);
#endif
      }
  }
#if REDUCES
  store_run(arrival(a, a.rank), pack, narrow_pack(sum, a));
#endif
  return true;
}

FLAGCX_KERNEL(PACKET_THREADS, 1) flagcx_packets(FLAGCX_PARAMETER Args a) {
  const u32 t = (u32)thread_index(), threads = (u32)block_size();
  const i64 first = (i64)block_index() * a.chunk;
  const u32 packs = first + a.chunk < a.part ? a.chunk : (u32)(a.part - first);
  uint4 own = {0, 0, 0, 0};
  if (ALIKE && t < packs) own = load_run(departure(a, a.rank), first + t);
  State* const state = state_of(a);
  const u32 dead = ((State*)(memory_of(a, a.rank) + AT_STATE))->dead;
  u32* const count = BARE ? &state->bare : &state->packets;
  u32 flag = *count + 1;
  if (flag == 0) flag = 2;  // What was never written is 0.
  if (dead == 0) {
    // What has come is looked at when the next ones have left.
    for (u32 j = t; j < packs + 2 * threads; j += threads) {
      if (j < packs) {
        if (ALIKE && j != t) own = load_run(departure(a, a.rank), first + j);
        push_packets(a, flag, j, first + j, own);
      }
      const u32 k = j - 2 * threads;
      if (j >= 2 * threads && !finish_pack(a, flag, k, first + k)) break;
    }
  }
  join_block();
  if (t == 0) *count = flag;
}
"""
