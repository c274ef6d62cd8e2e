"""The kernel for larger messages: chunks flow through boxes in the peers' memory, and a flag follows each.

Block b of threads communicates only with block b of every peer, chunk after chunk, in up to three stages:

1. push: the chunk for peer p goes into p's inbox, one slot after the other; then the first flag is sent.
   Before that, p's second flag must say that p has emptied the slot.
2. combine: once the peers' first flags have arrived, the chunks of ranks 0 to n - 1 are combined in that
   order and put into recvbuf, and for two-shot into outboxes; then the second flag is sent.
3. collect (two-shot, broadcast, and the root of a reduction): once the peers' second flags have arrived,
   their parts are copied from the outbox into recvbuf. Of more than two GPUs, the root of a broadcast or
   reduction has no part itself, so that its links carry the message once. The outbox needs no flag of its
   own: a peer's first flag of chunk g + SLOTS follows its third stage of chunk g.

Stage 2 lags LAG chunks behind stage 1, and stage 3 as many behind stage 2, so that other chunks hide the
latency of a flag; 2 LAG + 1 slots are enough for that. Data is pushed, and a rank polls flags in its own
memory, so that no read crosses a link. One warp of a block only sends the flags: it alone waits until the
data before a flag has arrived.

All counters go on over all launches and lie in the GPU's memory, so a launch can be replayed from a graph.
Two-shot does without boxes where it can: see ``flagcx.kernels.peer_in_place``.
"""

from __future__ import annotations

from flagcx.kernels.peer_in_place import IN_PLACE

_STAGES = r"""
const int OTHERS = RANKS - 1;
#if PARTS
#define COLLECTS 1
#else
#define COLLECTS 0
#endif

// ``box`` counts from the slot that the launch begins with. Flags carry the numbers of chunks, which wrap
// around at 2^32, where the slots do not.
FLAGCX_DEVICE uint4* box_of(const Args& a, int rank, u64 kind, u32 box, int from) {
  const u64 slot = ((u64)block_index() * SLOTS + box % SLOTS) * RANKS + from;
  return (uint4*)(memory_of(a, rank) + kind) + slot * MOST_CHUNK;
}

#if COLLECTS
// On one GPU the peers read a part from its owner's outbox; on several the owner writes it to every peer's.
#define RECIPIENTS (PULLS ? 2 : RANKS)
FLAGCX_DEVICE uint4* outbox_for(const Args& a, int rank, u32 box) {
  return box_of(a, PULLS ? a.rank : rank, AT_OUTBOX, box, a.rank);
}
#endif
FLAGCX_DEVICE uint4* filled_box(const Args& a, u64 kind, u32 box, int from) {
  return box_of(a, PULLS && kind == AT_OUTBOX ? from : a.rank, kind, box, from);
}

// Stage 1. A thread issues FLIGHT loads before the first store.
const int PIECE = OTHERS < FLIGHT ? OTHERS : FLIGHT;
const int UNROLL = FLIGHT / PIECE;
template <int U> FLAGCX_DEVICE void push_packs(const Args& a, u32 box, i64 first, int i, int k0) {
  uint4 v[PIECE][U];
#pragma unroll
  for (int k = 0; k < PIECE; k++)
    if (k0 + k < RANKS && has_part(a, peer_after(a, k0 + k))) {
      const uint4* const from = (const uint4*)send_run(a, peer_after(a, k0 + k)).at + first + i;
#pragma unroll
      for (int u = 0; u < U; u++) v[k][u] = load_own_pack(from + u * WORK);
    }
#pragma unroll
  for (int k = 0; k < PIECE; k++)
    if (k0 + k < RANKS && has_part(a, peer_after(a, k0 + k))) {
      uint4* const to = box_of(a, peer_after(a, k0 + k), AT_INBOX, box, a.rank) + i;
#pragma unroll
      for (int u = 0; u < U; u++) store_pack(to + u * WORK, v[k][u]);
    }
}
FLAGCX_DEVICE void push(const Args& a, int t, u32 box, i64 first, int length) {
#if FORM == BROADCAST
  if (a.rank != a.root) return;
#endif
  bool fast = true;
  for (int k = 1; k < RANKS; k++)
    if (has_part(a, peer_after(a, k))) fast = fast && whole(send_run(a, peer_after(a, k)), first + length);
  if (fast) {
#pragma unroll
    for (int k0 = 1; k0 < RANKS; k0 += PIECE) {
      int i = t;
      if (UNROLL > 1)
        for (; i + (UNROLL - 1) * WORK < length; i += UNROLL * WORK)
          push_packs<UNROLL>(a, box, first, i, k0);
      for (; i < length; i += WORK) push_packs<1>(a, box, first, i, k0);
    }
    return;
  }
  for (int k = 1; k < RANKS; k++) {
    const int p = peer_after(a, k);
    if (!has_part(a, p)) continue;
    const Run run = send_run(a, p);
    uint4* const to = box_of(a, p, AT_INBOX, box, a.rank);
    for (int i = t; i < length; i += WORK)
      store_pack(to + i, load_any(run, first + i));
  }
}

// Copies the chunks that the peers have put into boxes to their places in recvbuf.
template <int U>
FLAGCX_DEVICE void unpack_packs(const Args& a, u64 kind, u32 box, i64 first, int i, int k0) {
  uint4 v[PIECE][U];
#pragma unroll
  for (int k = 0; k < PIECE; k++)
    if (k0 + k < RANKS && has_part(a, peer_after(a, k0 + k))) {
      const uint4* const from = filled_box(a, kind, box, peer_after(a, k0 + k)) + i;
#pragma unroll
      for (int u = 0; u < U; u++) v[k][u] = load_shared_pack(from + u * WORK);
    }
#pragma unroll
  for (int k = 0; k < PIECE; k++)
    if (k0 + k < RANKS && has_part(a, peer_after(a, k0 + k))) {
      uint4* const to = (uint4*)recv_run(a, peer_after(a, k0 + k)).at + first + i;
#pragma unroll
      for (int u = 0; u < U; u++) store_own_pack(to + u * WORK, v[k][u]);
    }
}
FLAGCX_DEVICE void unpack(const Args& a, int t, u64 kind, u32 box, i64 first, int length) {
  bool fast = true;
  for (int k = 1; k < RANKS; k++)
    if (has_part(a, peer_after(a, k))) fast = fast && whole(recv_run(a, peer_after(a, k)), first + length);
  if (fast) {
#pragma unroll
    for (int k0 = 1; k0 < RANKS; k0 += PIECE) {
      int i = t;
      if (UNROLL > 1)
        for (; i + (UNROLL - 1) * WORK < length; i += UNROLL * WORK)
          unpack_packs<UNROLL>(a, kind, box, first, i, k0);
      for (; i < length; i += WORK) unpack_packs<1>(a, kind, box, first, i, k0);
    }
    return;
  }
  for (int k = 1; k < RANKS; k++) {
    const int q = peer_after(a, k);
    if (!has_part(a, q)) continue;
    const uint4* const from = filled_box(a, kind, box, q);
    for (int i = t; i < length; i += WORK)
      store_elements(recv_run(a, q), first + i, load_shared_pack(from + i));
  }
}

#if REDUCES
// Combines packs i, i + WORK, ... of ``sources(q)`` of all ranks q, in their order.
const int SUM_PIECE = RANKS < FLIGHT ? RANKS : FLIGHT;
const int SUM_UNROLL = FLIGHT / SUM_PIECE;
template <int U, class Sources> FLAGCX_DEVICE void sum_packs(const Args& a, Sources sources, uint4* made) {
  A sum[U][N];
#pragma unroll
  for (int q0 = 0; q0 < RANKS; q0 += SUM_PIECE) {
    uint4 v[SUM_PIECE][U];
#pragma unroll
    for (int q = 0; q < SUM_PIECE; q++)
      if (q0 + q < RANKS) {
        const uint4* const from = sources(q0 + q);
#pragma unroll
        for (int u = 0; u < U; u++) v[q][u] = load_shared_pack(from + u * WORK);
      }
#pragma unroll
    for (int q = 0; q < SUM_PIECE; q++)
#pragma unroll
      for (int u = 0; u < U; u++) {
        if (q0 + q == 0) widen_pack(sum[u], v[q][u]);
        else if (q0 + q < RANKS) combine_pack(sum[u], v[q][u]);
      }
  }
#pragma unroll
  for (int u = 0; u < U; u++) made[u] = narrow_pack(sum[u], a);
}

// This rank's part of peer p's recvbuf, whose address is in ``direct``.
FLAGCX_DEVICE Run part_of(const Args& a, const u64* direct, int p) { return part_run(a, direct[p], a.rank); }

// Stage 2 of the forms that reduce.
template <int U>
FLAGCX_DEVICE void combine_packs(const Args& a, u32 box, i64 first, int i, const u64* direct) {
  const uint4* const own = (const uint4*)send_run(a, a.rank).at + first + i;
  const uint4* const boxes = box_of(a, a.rank, AT_INBOX, box, 0) + i;
  uint4 made[U];
  sum_packs<U>(a, [&](int q) { return q == a.rank ? own : boxes + q * MOST_CHUNK; }, made);
#if FORM == REDUCE
  const bool at_root = a.rank == a.root;
  uint4* const to = at_root ? (uint4*)recv_run(a, a.rank).at + first + i : outbox_for(a, a.root, box) + i;
#pragma unroll
  for (int u = 0; u < U; u++) {
    if (at_root) store_own_pack(to + u * WORK, made[u]);
    else store_pack(to + u * WORK, made[u]);
  }
#else
  uint4* const to = (uint4*)recv_run(a, a.rank).at + first + i;
#pragma unroll
  for (int u = 0; u < U; u++) store_own_pack(to + u * WORK, made[u]);
#endif
#if FORM == TWO_SHOT
#pragma unroll
  for (int k = 1; k < RECIPIENTS; k++) {
    const int p = peer_after(a, k);
    uint4* const out = direct ? (uint4*)part_of(a, direct, p).at + first + i : outbox_for(a, p, box) + i;
#pragma unroll
    for (int u = 0; u < U; u++) store_pack(out + u * WORK, made[u]);
  }
#endif
}
FLAGCX_DEVICE void sum_elements(const Args& a, int t, u32 box, i64 first, int length, const u64* direct) {
  const Run own = send_run(a, a.rank), to = recv_run(a, a.rank);
  for (int i = t; i < length; i += WORK) {
    A sum[N];
    for (int q = 0; q < RANKS; q++) {
      const uint4 v = q == a.rank ? load_any(own, first + i)
                                  : load_shared_pack(box_of(a, a.rank, AT_INBOX, box, q) + i);
      if (q == 0) widen_pack(sum, v);
      else combine_pack(sum, v);
    }
    const uint4 made = narrow_pack(sum, a);
#if FORM == REDUCE
    if (a.rank != a.root) {
      store_pack(outbox_for(a, a.root, box) + i, made);
      continue;
    }
#endif
    store_elements(to, first + i, made);
#if FORM == TWO_SHOT
    for (int k = 1; k < RECIPIENTS; k++) {
      const int p = peer_after(a, k);
      if (direct) store_elements(part_of(a, direct, p), first + i, made);
      else store_pack(outbox_for(a, p, box) + i, made);
    }
#endif
  }
}
FLAGCX_DEVICE void combine_chunk(
    const Args& a, int t, u32 box, i64 first, int length, const u64* direct) {
  const bool fast = whole(send_run(a, a.rank), first + length) && whole(recv_run(a, a.rank), first + length);
  if (!fast) {
    sum_elements(a, t, box, first, length, direct);
    return;
  }
  int i = t;
  if (SUM_UNROLL > 1)
    for (; i + (SUM_UNROLL - 1) * WORK < length; i += SUM_UNROLL * WORK)
      combine_packs<SUM_UNROLL>(a, box, first, i, direct);
  for (; i < length; i += WORK) combine_packs<1>(a, box, first, i, direct);
}
#elif FORM == BROADCAST
// The root sends its part from its array, every other rank from its inbox; the root has the message already.
FLAGCX_DEVICE void combine_chunk(const Args& a, int t, u32 box, i64 first, int length, const u64*) {
  const Run run = recv_run(a, a.rank);
  const uint4* const inbox = box_of(a, a.rank, AT_INBOX, box, a.root);
  const bool fast = whole(run, first + length), root = a.rank == a.root;
  for (int i = t; i < length; i += WORK) {
    uint4 v;
    if (!root) v = load_shared_pack(inbox + i);
    else if (fast) v = load_own_pack((const uint4*)run.at + first + i);
    else v = load_elements(run, first + i);
#pragma unroll
    for (int k = 1; k < RECIPIENTS; k++) {
      const int p = peer_after(a, k);
      if (PULLS || p != a.root) store_pack(outbox_for(a, p, box) + i, v);
    }
    if (root) continue;
    if (fast) store_own_pack((uint4*)run.at + first + i, v);
    else store_elements(run, first + i, v);
  }
}
#else
FLAGCX_DEVICE void combine_chunk(const Args& a, int t, u32 box, i64 first, int length, const u64*) {
  const Run from = send_run(a, a.rank), to = recv_run(a, a.rank);
  unpack(a, t, AT_INBOX, box, first, length);
  if (from.at == to.at) return;
  const bool fast = whole(from, first + length) && whole(to, first + length);
  for (int i = t; i < length; i += WORK) {
    if (fast) store_own_pack((uint4*)to.at + first + i, load_own_pack((const uint4*)from.at + first + i));
    else store_elements(to, first + i, load_elements(from, first + i));
  }
}
#endif

// The warp that sends flags: one fence serves all chunks that are finished by then. After a warp has failed,
// it sends no further flag.
FLAGCX_DEVICE void send_flags(const Args& a, Progress* progress, u32 base, int lane) {
  u32 sent[2] = {0, 0};
  while (sent[0] < a.steps || sent[1] < a.steps) {
    const u32 done[2] = {progress_of(progress, 0, lane), progress_of(progress, 1, lane)};
    if (done[0] == sent[0] && done[1] == sent[1]) continue;
    if (load_shared(&progress->failed) == 0) {
      release();
      if (done[0] != sent[0]) tell_all(a, AT_FIRST, base + done[0], lane);
      if (done[1] != sent[1]) tell_all(a, AT_SECOND, base + done[1], lane);
    }
    sent[0] = done[0];
    sent[1] = done[1];
  }
}
FLAGCX_DEVICE int length_of(const Args& a, i64 first) {
  return a.part - first < (i64)a.chunk ? (int)(a.part - first) : (int)a.chunk;
}
// ``base`` and ``box``: chunks and slots before this launch; ``direct``: the peers' recvbufs, if the second
// stage is to write there, else 0.
FLAGCX_DEVICE void work(const Args& a, Progress* progress, u32 base, u32 box, int t, const u64* direct) {
  const bool collects = COLLECTS && !direct;
  const int lane = t % WARP;
  const i64 stride = (i64)grid_size() * a.chunk;
  bool ok = true;
  for (u32 i = 0; i < a.steps + LAG + collects * LAG; i++) {
    i64 first = i * stride + (i64)block_index() * a.chunk;
    if (i < a.steps) {
      // All slots must be empty at first, then this one. A third stage implies that.
      if (i == 0) ok = peek_all(a, AT_SECOND, base, lane) || await_all(a, AT_SECOND, base, lane);
      else if (i >= SLOTS && !collects) ok = ok && await_all(a, AT_SECOND, base + i + 1 - SLOTS, lane);
      if (ok && first < a.part) push(a, t, box + i, first, length_of(a, first));
      arrive(progress, 0, i + 1, ok, t);
    }
    first -= LAG * stride;
    if (i >= LAG && i < a.steps + LAG) {
      ok = ok && await_all(a, AT_FIRST, base + i + 1 - LAG, lane);
      if (ok && first < a.part && has_part(a, a.rank))
        combine_chunk(a, t, box + i - LAG, first, length_of(a, first), direct);
      arrive(progress, 1, i + 1 - LAG, ok, t);
    }
#if COLLECTS
    first -= LAG * stride;
    if (collects && i >= 2 * LAG) {
      ok = ok && await_all(a, AT_SECOND, base + i + 1 - 2 * LAG, lane);
      const bool wanted = FORM == REDUCE ? a.rank == a.root : !(FORM == BROADCAST && a.rank == a.root);
      if (ok && wanted && first < a.part)
        unpack(a, t, AT_OUTBOX, box + i - 2 * LAG, first, length_of(a, first));
    }
#endif
  }
  if (direct && ok) await_all(a, AT_SECOND, base + a.steps, lane);
}
"""

_KERNEL = r"""
FLAGCX_KERNEL(WORK + WARP, RESIDENT) flagcx_exchange(FLAGCX_PARAMETER Args a) {
  FLAGCX_SHARED(Progress, progress, 1);
  const int t = thread_index(), lane = t % WARP;
  State* const state = state_of(a);
  const u32 busy = t == 0 ? begin_launch(state) : 0;
  const u32 dead = ((State*)(memory_of(a, a.rank) + AT_STATE))->dead, base = state->chunks;
  if (t < (int)(sizeof(Progress) / 4)) ((u32*)progress)[t] = 0;
  u32 steps = a.steps;
#if FORM == TWO_SHOT
  FLAGCX_SHARED(u64, sendbufs, RANKS);
  FLAGCX_SHARED(u64, recvbufs, RANKS);
  FLAGCX_SHARED(u32, in_place, 1);
  const u32 call = state->calls + 1;
  if (t < WARP && dead == 0) {
    const bool agreed = exchange_handles(a, call, lane, sendbufs, recvbufs);
    if (lane == 0) in_place[0] = agreed;
  }
#endif
  join_block();
  if (dead) {
    poison(a);
    return;
  }
  const u64* direct = 0;
#if FORM == TWO_SHOT
  if (in_place[0] && pulls(a)) {
    steps = 0;
    if (t < WORK) reduce_in_place(a, t, sendbufs, recvbufs);
    join_block();
    if (t < WARP) {
      release();
      tell_all(a, AT_END, state->pulls + 1, lane);
      await_all(a, AT_END, state->pulls + 1, lane);
    }
  } else if (in_place[0]) {
    direct = recvbufs;
  }
#endif
  if (steps) {
    if (t < WORK) work(a, progress, base, state->slot, t, direct);
    else send_flags(a, progress, base, lane);
  }
  join_block();
  if (t != 0) return;
  state->chunks = base + steps;
  state->slot = (state->slot + steps) % SLOTS;
#if FORM == TWO_SHOT
  state->calls = call;
  if (in_place[0] && pulls(a)) state->pulls++;
#endif
  end_launch(a, state, busy);
}
"""

EXCHANGE = _STAGES + IN_PLACE + _KERNEL
