"""The kernel for small messages: the receiver polls a flag inside each packet.

Each rank pushes its data straight into the peers' memory and polls its own memory for the data that the peers
push: one hop, no fence, no barrier. Two-shot takes two hops: a rank that has reduced its part pushes the sum
to all peers, into the second half of each slot. There are two kinds of packets:

* *Flagged* (NCCL's LL): a pack of 16 bytes travels as two packets of {4 bytes, flag, 4 bytes, flag}; the
  first and the second ones lie apart, so that a warp writes whole lines. The flag is the number of the call.
  Any element type, at half the bandwidth.
* *Bare*: all bits of an empty slot are set, which as a floating-point number is one of many NaNs. The sender
  replaces that NaN by another; the receiver sets all bits again after it has read a packet. Floating-point
  element types only.

Two halves of the memory alternate from call to call, so that no packet overwrites one that is still being
read: a rank in call k + 2 has received every peer's packets of call k + 1, so every peer has finished call k.
"""

from __future__ import annotations

SLOTS = r"""
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
// Bare packets never contain the NaN that marks an empty slot.
FLAGCX_DEVICE uint4 without_mark(uint4 v) {
#if BARE
  v.x = v.x == ~0u ? OTHER_NAN : v.x;
  v.y = v.y == ~0u ? OTHER_NAN : v.y;
  v.z = v.z == ~0u ? OTHER_NAN : v.z;
  v.w = v.w == ~0u ? OTHER_NAN : v.w;
#endif
  return v;
}
FLAGCX_DEVICE void send_pack(uint4* to, uint4 v, u32 flag) {
#if BARE
  (void)flag;
  store_packet(to, v);
#else
  store_flagged(to, MOST_PACKETS, v, flag);
#endif
}
// Reads a slot; returns whether all of the packet has arrived.
FLAGCX_DEVICE bool see_pack(const uint4* from, u32 flag, uint4* v) {
#if BARE
  (void)flag;
  const uint4 x = *v = load_packet(from);
  return x.x != ~0u && x.y != ~0u && x.z != ~0u && x.w != ~0u;
#else
  return see_flagged(from, MOST_PACKETS, flag, v);
#endif
}
FLAGCX_DEVICE uint4 load_run(const Run& run, i64 pack) {
  return without_mark(load_any(run, pack));
}
FLAGCX_DEVICE void store_run(const Run& run, i64 pack, uint4 v) {
  if (whole(run, pack + 1)) store_pack((uint4*)run.at + pack, v);
  else store_elements(run, pack, v);
}
const int GROUP = RANKS < 8 ? RANKS : 8;  // ranks whose packets are polled together

// Waits for the packs at j in the slots of ranks first to first + GROUP, except this rank's own. A rank that
// has nothing for a peer sends it the first pack all the same.
FLAGCX_DEVICE bool take_packets(const Args& a, u32 flag, u32 j, int first, uint4* v) {
  uint4* const from = packets_of(a, a.rank, flag & 1, 0) + j;
  Wait wait = {0, 0};
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int g = 0; g < GROUP; g++)
      if (first + g < RANKS && first + g != a.rank && (j == 0 || takes_from(a, first + g)))
        if (!see_pack(from + (u64)(first + g) * SLOT_PACKS, flag, v + g)) missing = first + g;
    if (missing < 0) break;
    if (!keep_waiting(a, wait, missing)) return false;
  }
#if BARE
#pragma unroll
  for (int g = 0; g < GROUP; g++)
    if (first + g < RANKS && first + g != a.rank && (j == 0 || takes_from(a, first + g)))
      store_pack(from + (u64)(first + g) * SLOT_PACKS, uint4{~0u, ~0u, ~0u, ~0u});
#endif
  return true;
}
// Offset of the second hop's packets in a slot.
#define SECOND ((BARE ? MOST_BARE : MOST_PACKETS) / 2)
"""
"""The slots of packets, and how a thread sends and takes one."""

_KERNEL = r"""
// All packs for the peers are loaded before the first packet is sent; the first ones before the kernel has
// read the number of the call.
#define SAME_TO_ALL (FORM != TWO_SHOT && FORM != REDUCE_SCATTER && FORM != ALLTOALL)
const int OUTGOING = SAME_TO_ALL ? 1 : RANKS - 1;
FLAGCX_DEVICE void load_outgoing(const Args& a, i64 pack, uint4* v) {
#pragma unroll
  for (int k = 0; k < OUTGOING; k++) v[k] = load_run(send_run(a, peer_after(a, k + 1)), pack);
}
FLAGCX_DEVICE void push_outgoing(const Args& a, u32 flag, u32 j, const uint4* v) {
#pragma unroll
  for (int k = 1; k < RANKS; k++) {
    const int p = peer_after(a, k);
    if (j == 0 || sends_to(a, p))
      send_pack(packets_of(a, p, flag & 1, a.rank) + j, v[OUTGOING == 1 ? 0 : k - 1], flag);
  }
}
// Waits for the packs at j in all slots and stores them to their places in recvbuf.
FLAGCX_DEVICE bool collect_pack(const Args& a, u32 flag, u32 j, i64 pack) {
#pragma unroll
  for (int first = 0; first < RANKS; first += GROUP) {
    uint4 v[GROUP];
    if (!take_packets(a, flag, j, first, v)) return false;
#pragma unroll
    for (int g = 0; g < GROUP; g++)
      if (first + g < RANKS && first + g != a.rank && takes_from(a, first + g))
        store_run(recv_run(a, first + g), pack, v[g]);
  }
  return true;
}
#if REDUCES
FLAGCX_DEVICE bool finish_pack(const Args& a, u32 flag, u32 j, i64 pack) {
  A sum[N];
  const uint4 own = load_run(send_run(a, a.rank), pack);
#pragma unroll
  for (int first = 0; first < RANKS; first += GROUP) {
    uint4 v[GROUP];
    if (!take_packets(a, flag, j, first, v)) return false;
#pragma unroll
    for (int g = 0; g < GROUP; g++)
      if (first + g < RANKS) {
        if (first + g == a.rank) v[g] = own;
        if (!takes_from(a, first + g)) continue;
        if (first + g == 0) widen_pack(sum, v[g]);
        else combine_pack(sum, v[g]);
      }
  }
  if (FORM == REDUCE && a.rank != a.root) return true;
  uint4 made = narrow_pack(sum, a);
#if FORM == TWO_SHOT
  made = without_mark(made);
#pragma unroll
  for (int k = 1; k < RANKS; k++)
    send_pack(packets_of(a, peer_after(a, k), flag & 1, a.rank) + SECOND + j, made, flag);
#endif
  store_run(recv_run(a, a.rank), pack, made);
  return true;
}
#else
FLAGCX_DEVICE bool finish_pack(const Args& a, u32 flag, u32 j, i64 pack) {
  const Run from = send_run(a, a.rank), to = recv_run(a, a.rank);
  if (FORM != BARRIER && FORM != BROADCAST && from.at != to.at) store_run(to, pack, load_run(from, pack));
  return collect_pack(a, flag, j, pack);
}
#endif

FLAGCX_KERNEL(PACKET_THREADS, 1) flagcx_packets(FLAGCX_PARAMETER Args a) {
  const u32 t = (u32)thread_index(), threads = (u32)block_size();
  const i64 first = (i64)block_index() * a.chunk;
  const u32 packs = first + a.chunk < a.part ? a.chunk : (u32)(a.part - first);
  uint4 outgoing[OUTGOING];
  if (t < packs) load_outgoing(a, first + t, outgoing);
  State* const state = state_of(a);
  const u32 busy = t == 0 ? begin_launch(state) : 0;
  const u32 dead = ((State*)(memory_of(a, a.rank) + AT_STATE))->dead;
  u32* const count = BARE ? &state->bare : &state->packets;
  u32 flag = *count + 1;
  if (flag == 0) flag = 2;  // Memory that was never written is 0.
  if (dead) {
    poison(a);
  } else {
    // Packets are received ``lag`` packs after they were sent, so that sends and receives overlap.
    const u32 lag = 2 * threads, hops = FORM == TWO_SHOT ? 2 : 1;
    for (u32 j = t; j < packs + hops * lag; j += threads) {
      if (j < packs) {
        if (j != t) load_outgoing(a, first + j, outgoing);
        push_outgoing(a, flag, j, outgoing);
      }
      const u32 k = j - lag;
      if (j >= lag && k < packs && !finish_pack(a, flag, k, first + k)) break;
#if FORM == TWO_SHOT
      const u32 l = k - lag;
      if (k >= lag && k < j && !collect_pack(a, flag, SECOND + l, first + l)) break;
#endif
    }
  }
  join_block();
  if (t != 0) return;
  *count = flag;
  end_launch(a, state, busy);
}
"""

PACKETS = SLOTS + _KERNEL
