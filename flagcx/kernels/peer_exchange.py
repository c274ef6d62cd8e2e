"""The kernel for larger messages: chunks flow through the peers' memory, each with a flag behind it.

Block b of threads works with block b of every peer alone, chunk after chunk, in up to three stages:

1. push: what is meant for peer p goes into p's inbox, one slot after the other; then the first
   flag. Before, p's second flag must say that it has emptied that slot.
2. combine: once the peers' first flags are there, what came from ranks 0 to n - 1 is combined in that order
   and put into the result, and for two-shot into outboxes; then the second flag.
3. collect (two-shot and broadcast): once the peers' second flags are there, their parts go from the outbox
   into the result. The outbox needs no flag of its own: a peer's first flag of chunk g + SLOTS follows its
   third stage of chunk g.

Stage 2 lags LAG chunks behind stage 1, and stage 3 as many more, so the way of a flag is hidden behind
other chunks; 2 LAG + 1 slots are enough for that. Data is pushed and flags are looked at in one's own
memory, so nothing waits for a distant answer. A warp of its own sends the flags: it alone waits until the
data before has arrived.

All numbers go on over all launches and live in the GPU's memory, so a launch can be replayed from a graph.

Where the arrays of all ranks lie in memory that the peers see, two-shot has less need of boxes: after a
greeting, in which the ranks tell each other where the arrays are, each rank writes its part of the result to
everybody's array, and there is no third stage. On one GPU it reads its part of everybody's array too, and
there are no chunks. Between GPUs pushing through inboxes is faster than reading, but reading takes fewer
blocks and less of the memory's bandwidth, so it is done there beside a computation.
"""

from __future__ import annotations

EXCHANGE = r"""
const int OTHERS = RANKS - 1;
const int WARPS = WORK / WARP;
#if FORM == TWO_SHOT || FORM == BROADCAST
#define COLLECTS 1
#else
#define COLLECTS 0
#endif

// ``box`` counts on from the slot that the launch begins with. Flags carry the numbers of chunks, which wrap
// around where no slot does.
FLAGCX_DEVICE uint4* box_of(const Args& a, int rank, u64 kind, u32 box, int from) {
  const u64 slot = ((u64)block_index() * SLOTS + box % SLOTS) * RANKS + from;
  return (uint4*)(memory_of(a, rank) + kind) + slot * MOST_CHUNK;
}

#if COLLECTS
// On one GPU the peers fetch a part from its owner's outbox; on several it is brought to everybody's.
const int RECIPIENTS = PULLS ? 2 : RANKS;
FLAGCX_DEVICE uint4* outbox_for(const Args& a, int rank, u32 box) {
  return box_of(a, PULLS ? a.rank : rank, AT_OUTBOX, box, a.rank);
}
#endif
FLAGCX_DEVICE uint4* filled_box(const Args& a, u64 kind, u32 box, int from) {
  return box_of(a, PULLS && kind == AT_OUTBOX ? from : a.rank, kind, box, from);
}

// Stage 1. FLIGHT loads of a thread are under way before the first store.
const int PIECE = OTHERS < FLIGHT ? OTHERS : FLIGHT;
const int UNROLL = FLIGHT / PIECE;
template <int U> FLAGCX_DEVICE void push_packs(const Args& a, u32 box, i64 first, int i, int k0) {
  uint4 v[PIECE][U];
#pragma unroll
  for (int k = 0; k < PIECE; k++)
    if (k0 + k < RANKS) {
      const uint4* const from = (const uint4*)departure(a, other(a, k0 + k)).at + first + i;
#pragma unroll
      for (int u = 0; u < U; u++) v[k][u] = load_own_pack(from + u * WORK);
    }
#pragma unroll
  for (int k = 0; k < PIECE; k++)
    if (k0 + k < RANKS) {
      uint4* const to = box_of(a, other(a, k0 + k), AT_INBOX, box, a.rank) + i;
#pragma unroll
      for (int u = 0; u < U; u++) store_pack(to + u * WORK, v[k][u]);
    }
}
FLAGCX_DEVICE void push(const Args& a, int t, u32 box, i64 first, int length) {
#if FORM == BROADCAST
  if (a.rank != a.root) return;
#endif
  bool fast = true;
  for (int k = 1; k < RANKS; k++) fast = fast && whole(departure(a, other(a, k)), first + length);
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
    const int p = other(a, k);
    const Run run = departure(a, p);
    uint4* const to = box_of(a, p, AT_INBOX, box, a.rank);
    for (int i = t; i < length; i += WORK) store_pack(to + i, load_loose(run, first + i));
  }
}

// Takes what the peers have put into boxes to its places in the result.
template <int U>
FLAGCX_DEVICE void unpack_packs(const Args& a, u64 kind, u32 box, i64 first, int i, int k0) {
  uint4 v[PIECE][U];
#pragma unroll
  for (int k = 0; k < PIECE; k++)
    if (k0 + k < RANKS) {
      const uint4* const from = filled_box(a, kind, box, other(a, k0 + k)) + i;
#pragma unroll
      for (int u = 0; u < U; u++) v[k][u] = load_shared_pack(from + u * WORK);
    }
#pragma unroll
  for (int k = 0; k < PIECE; k++)
    if (k0 + k < RANKS) {
      uint4* const to = (uint4*)arrival(a, other(a, k0 + k)).at + first + i;
#pragma unroll
      for (int u = 0; u < U; u++) store_own_pack(to + u * WORK, v[k][u]);
    }
}
FLAGCX_DEVICE void unpack(const Args& a, int t, u64 kind, u32 box, i64 first, int length) {
  bool fast = true;
  for (int k = 1; k < RANKS; k++) fast = fast && whole(arrival(a, other(a, k)), first + length);
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
    const int q = other(a, k);
    const uint4* const from = filled_box(a, kind, box, q);
    for (int i = t; i < length; i += WORK) store_loose(arrival(a, q), first + i, load_shared_pack(from + i));
  }
}

#if REDUCES
// Packs i, i + WORK, ... of ``sources(q)`` of all ranks, combined in their order.
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

// The rank's own part of peer p's result, if ``direct`` says where that is.
FLAGCX_DEVICE Run part_of(const Args& a, const u64* direct, int p) { return part_run(a, direct[p], a.rank); }

// Stage 2 where it combines.
template <int U>
FLAGCX_DEVICE void combine_packs(const Args& a, u32 box, i64 first, int i, const u64* direct) {
  const uint4* const own = (const uint4*)departure(a, a.rank).at + first + i;
  const uint4* const boxes = box_of(a, a.rank, AT_INBOX, box, 0) + i;
  uint4 made[U];
  sum_packs<U>(a, [&](int q) { return q == a.rank ? own : boxes + q * MOST_CHUNK; }, made);
  uint4* const to = (uint4*)arrival(a, a.rank).at + first + i;
#pragma unroll
  for (int u = 0; u < U; u++) store_own_pack(to + u * WORK, made[u]);
#if FORM == TWO_SHOT
#pragma unroll
  for (int k = 1; k < RECIPIENTS; k++) {
    const int p = other(a, k);
    uint4* const out = direct ? (uint4*)part_of(a, direct, p).at + first + i : outbox_for(a, p, box) + i;
#pragma unroll
    for (int u = 0; u < U; u++) store_pack(out + u * WORK, made[u]);
  }
#endif
}
FLAGCX_DEVICE void sum_loose(const Args& a, int t, u32 box, i64 first, int length, const u64* direct) {
  const Run own = departure(a, a.rank), to = arrival(a, a.rank);
  for (int i = t; i < length; i += WORK) {
    A sum[N];
    for (int q = 0; q < RANKS; q++) {
      const uint4 v = q == a.rank ? load_loose(own, first + i)
                                  : load_shared_pack(box_of(a, a.rank, AT_INBOX, box, q) + i);
      if (q == 0) widen_pack(sum, v);
      else combine_pack(sum, v);
    }
    const uint4 made = narrow_pack(sum, a);
    store_loose(to, first + i, made);
#if FORM == TWO_SHOT
    for (int k = 1; k < RECIPIENTS; k++) {
      const int p = other(a, k);
      if (direct) store_loose(part_of(a, direct, p), first + i, made);
      else store_pack(outbox_for(a, p, box) + i, made);
    }
#endif
  }
}
FLAGCX_DEVICE void combine_chunk(
    const Args& a, int t, u32 box, i64 first, int length, const u64* direct) {
  const bool fast = whole(departure(a, a.rank), first + length) && whole(arrival(a, a.rank), first + length);
  if (!fast) {
    sum_loose(a, t, box, first, length, direct);
    return;
  }
  int i = t;
  if (SUM_UNROLL > 1)
    for (; i + (SUM_UNROLL - 1) * WORK < length; i += SUM_UNROLL * WORK)
      combine_packs<SUM_UNROLL>(a, box, first, i, direct);
  for (; i < length; i += WORK) combine_packs<1>(a, box, first, i, direct);
}
#elif FORM == BROADCAST
// The root's part goes out from its array, everybody else's from the inbox; the root has all already.
FLAGCX_DEVICE void combine_chunk(const Args& a, int t, u32 box, i64 first, int length, const u64*) {
  const Run run = arrival(a, a.rank);
  const uint4* const inbox = box_of(a, a.rank, AT_INBOX, box, a.root);
  const bool fast = whole(run, first + length), root = a.rank == a.root;
  for (int i = t; i < length; i += WORK) {
    uint4 v;
    if (!root) v = load_shared_pack(inbox + i);
    else if (fast) v = load_own_pack((const uint4*)run.at + first + i);
    else v = load_loose(run, first + i);
#pragma unroll
    for (int k = 1; k < RECIPIENTS; k++) {
      const int p = other(a, k);
      if (PULLS || p != a.root) store_pack(outbox_for(a, p, box) + i, v);
    }
    if (root) continue;
    if (fast) store_own_pack((uint4*)run.at + first + i, v);
    else store_loose(run, first + i, v);
  }
}
#else
FLAGCX_DEVICE void combine_chunk(const Args& a, int t, u32 box, i64 first, int length, const u64*) {
  const Run from = departure(a, a.rank), to = arrival(a, a.rank);
  unpack(a, t, AT_INBOX, box, first, length);
  if (from.at == to.at) return;
  const bool fast = whole(from, first + length) && whole(to, first + length);
  for (int i = t; i < length; i += WORK) {
    if (fast) store_own_pack((uint4*)to.at + first + i, load_own_pack((const uint4*)from.at + first + i));
    else store_loose(to, first + i, load_loose(from, first + i));
  }
}
#endif

// How many chunks each warp has been through, in stages 1 and 2; behind that, how many warps have failed.
struct Progress { u32 chunks[2][WARPS]; u32 failed; };
FLAGCX_DEVICE void arrive(Progress* progress, int stage, u32 chunks, bool well, int t) {
  join_warp();
  if (t % WARP != 0) return;
  if (!well) store_shared(&progress->failed, 1u);
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
// The warp that sends flags: one fence is for all that has been done by then. Where a warp has failed it
// tells nobody anything any more.
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
// ``base`` and ``box``: chunks and slots before this launch; ``direct``: where the peers' results are, if the
// second stage is to write there, else 0.
FLAGCX_DEVICE void work(const Args& a, Progress* progress, u32 base, u32 box, int t, const u64* direct) {
  const bool collects = COLLECTS && !direct;
  const int lane = t % WARP;
  const i64 stride = (i64)grid_size() * a.chunk;
  bool well = true;
  for (u32 i = 0; i < a.steps + LAG + collects * LAG; i++) {
    i64 first = i * stride + (i64)block_index() * a.chunk;
    if (i < a.steps) {
      // All slots are empty, or this one is. Where there is a third stage, it has seen to that.
      if (i == 0) well = peek_all(a, AT_SECOND, base, lane) || await_all(a, AT_SECOND, base, lane);
      else if (i >= SLOTS && !collects) well = well && await_all(a, AT_SECOND, base + i + 1 - SLOTS, lane);
      if (well && first < a.part) push(a, t, box + i, first, length_of(a, first));
      arrive(progress, 0, i + 1, well, t);
    }
    first -= LAG * stride;
    if (i >= LAG && i < a.steps + LAG) {
      well = well && await_all(a, AT_FIRST, base + i + 1 - LAG, lane);
      if (well && first < a.part) combine_chunk(a, t, box + i - LAG, first, length_of(a, first), direct);
      arrive(progress, 1, i + 1 - LAG, well, t);
    }
#if COLLECTS
    first -= LAG * stride;
    if (collects && i >= 2 * LAG) {
      well = well && await_all(a, AT_SECOND, base + i + 1 - 2 * LAG, lane);
      const bool wanted = !(FORM == BROADCAST && a.rank == a.root) && first < a.part;
      if (well && wanted) unpack(a, t, AT_OUTBOX, box + i - 2 * LAG, first, length_of(a, first));
    }
#endif
  }
  if (direct && well) await_all(a, AT_SECOND, base + a.steps, lane);
}

#if FORM == TWO_SHOT
FLAGCX_DEVICE bool pulls(const Args& a) { return PULLS || a.pull; }
// Tells all peers where the own arrays are and hears where theirs are. True if all can be used.
FLAGCX_DEVICE bool greet(const Args& a, u32 flag, int lane, u64* given, u64* result) {
  bool in_place = true;
  for (int q = lane; q < RANKS; q += WARP) {
    u64 names[2] = {a.given_name, a.result_name};
    if (q != a.rank) {
      uint4* const to = (uint4*)(memory_of(a, q) + AT_HELLO) + (block_index() * MOST_RANKS + a.rank) * 2;
      uint4* const from = (uint4*)(memory_of(a, a.rank) + AT_HELLO) + (block_index() * MOST_RANKS + q) * 2;
      for (int i = 0; i < 2; i++)
        store_packet(to + i, uint4{(u32)names[i], flag, (u32)(names[i] >> 32), flag});
      Patience patience = {0, 0};
      for (int i = 0; i < 2; i++) {
        uint4 x = load_packet(from + i);
        while (x.y != flag || x.w != flag) {
          if (!lasts(a, patience, q)) break;
          x = load_packet(from + i);
        }
        names[i] = x.y == flag && x.w == flag ? (u64)x.z << 32 | x.x : 0;
      }
    }
    const u64* const segments = (const u64*)a.segments;
    const u64 mask = ((u64)1 << OFFSET_BITS) - 1;
    in_place = in_place && names[1] != 0 && (pulls(a) ? names[0] != 0 : (names[1] & 15) == 0);
    if (in_place) {
      if (pulls(a)) given[q] = segments[((names[0] >> OFFSET_BITS) - 1) * RANKS + q] + (names[0] & mask);
      result[q] = segments[((names[1] >> OFFSET_BITS) - 1) * RANKS + q] + (names[1] & mask);
    }
  }
  return all_of_warp(in_place);
}
// Packs of the own part of everybody's arrays, in place.
template <int U>
FLAGCX_DEVICE void reduce_packs(const Args& a, const u64* given, const u64* result, i64 begin, i64 i) {
  uint4 made[U];
  sum_packs<U>(a, [&](int q) { return (const uint4*)((const T*)given[q] + begin) + i; }, made);
#pragma unroll
  for (int k = 0; k < RANKS; k++) {
    uint4* const to = (uint4*)((T*)result[other(a, k)] + begin) + i;
#pragma unroll
    for (int u = 0; u < U; u++) store_pack(to + u * WORK, made[u]);
  }
}
FLAGCX_DEVICE void reduce_in_place(const Args& a, int t, const u64* given, const u64* result) {
  const i64 stride = (i64)grid_size() * WORK * SUM_UNROLL;
  const i64 begin = a.rank * a.part * N;
  const i64 count = part_run(a, 0, a.rank).count;
  bool aligned = true;
  for (int q = 0; q < RANKS; q++) aligned = aligned && ((given[q] | result[q]) & 15) == 0;
  const i64 packs = aligned ? count / N : 0;
  for (i64 i = (i64)block_index() * WORK * SUM_UNROLL + t; i < packs; i += stride) {
    if (i + (SUM_UNROLL - 1) * WORK < packs) {
      reduce_packs<SUM_UNROLL>(a, given, result, begin, i);
      continue;
    }
    for (int u = 0; u < SUM_UNROLL && i + u * WORK < packs; u++)
      reduce_packs<1>(a, given, result, begin, i + u * WORK);
  }
  const i64 threads = (i64)grid_size() * WORK;
  for (i64 e = packs * N + (i64)block_index() * WORK + t; e < count; e += threads) {
    A sum = widen(((const T*)given[0])[begin + e]);
    for (int q = 1; q < RANKS; q++) sum = combine(sum, widen(((const T*)given[q])[begin + e]));
    const T made = narrow(finished(sum, a.finish, a.factor));
    for (int q = 0; q < RANKS; q++) ((T*)result[q])[begin + e] = made;
  }
}
#endif

FLAGCX_KERNEL(WORK + WARP, RESIDENT) flagcx_exchange(FLAGCX_PARAMETER Args a) {
  FLAGCX_SHARED(Progress, progress, 1);
  const int t = thread_index(), lane = t % WARP;
  State* const state = state_of(a);
  const u32 dead = ((State*)(memory_of(a, a.rank) + AT_STATE))->dead, base = state->chunks;
  if (t < (int)(sizeof(Progress) / 4)) ((u32*)progress)[t] = 0;
  u32 steps = a.steps;
#if FORM == TWO_SHOT
  FLAGCX_SHARED(u64, given, RANKS);
  FLAGCX_SHARED(u64, result, RANKS);
  FLAGCX_SHARED(u32, in_place, 1);
  const u32 call = state->calls + 1;
  if (t < WARP && dead == 0) {
    const bool agreed = greet(a, call, lane, given, result);
    if (lane == 0) in_place[0] = agreed;
  }
#endif
  join_block();
  if (dead) {
    spoil(a);
    return;
  }
  const u64* direct = 0;
#if FORM == TWO_SHOT
  if (in_place[0] && pulls(a)) {
    steps = 0;
    if (t < WORK) reduce_in_place(a, t, given, result);
    join_block();
    if (t < WARP) {
      release();
      tell_all(a, AT_END, state->pulls + 1, lane);
      await_all(a, AT_END, state->pulls + 1, lane);
    }
  } else if (in_place[0]) {
    direct = result;
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
}
"""
