"""Where the channels of each pair of ranks lie in their memory, and how a message is cut over them."""

from __future__ import annotations

CHANNELS = r"""
// What one channel from this rank to a peer, and the one back, have counted over all launches.
struct Pair { u32 sent, sent_calls, taken, taken_calls; };

FLAGCX_DEVICE u64 place_of(const Args& a, int channel, int peer) {
  return (u64)(a.first + channel) * MOST_RANKS + peer;
}
FLAGCX_DEVICE Pair* pair_of(const Args& a, int channel, int peer) {
  return (Pair*)(memory_of(a, a.rank) + AT_PAIRS) + place_of(a, channel, peer);
}
// In the memory of ``rank``, of a channel between it and ``peer``:
FLAGCX_DEVICE u32* word_of(const Args& a, int rank, u64 kind, int channel, int peer) {
  return (u32*)(memory_of(a, rank) + kind) + place_of(a, channel, peer);
}
// How many messages a peer has begun, or is ready to: of sends to this rank (0), or receives from it (1).
FLAGCX_DEVICE u32* posted_of(const Args& a, int rank, int kind, int peer) {
  return (u32*)(memory_of(a, rank) + AT_POSTED) + kind * MOST_RANKS + peer;
}
FLAGCX_DEVICE uint4* size_of(const Args& a, int rank, int channel, u32 call, int peer) {
  return (uint4*)(memory_of(a, rank) + AT_SIZES) + place_of(a, channel, peer) * 2 + (call & 1);
}
FLAGCX_DEVICE uint4* packets_of(const Args& a, int rank, int channel, u32 call, int peer) {
  const u64 slot = ((u64)(a.first + channel) * 2 + (call & 1)) * RANKS + peer;
  return (uint4*)(memory_of(a, rank) + AT_PAIR_PACKETS) + slot * (2 * SMALL_PACKS);
}
FLAGCX_DEVICE uint4* box_of(const Args& a, int rank, int channel, u32 chunk, int peer) {
  const u64 slot = ((u64)(a.first + channel) * BOXES + chunk % BOXES) * RANKS + peer;
  return (uint4*)(memory_of(a, rank) + AT_PAIR_BOXES) + slot * BOX_PACKS;
}
// The flag of a call: never that of memory that was not written, which is 0.
FLAGCX_DEVICE u32 flag_of(u32 call) { return call ? call : 0x80000000u; }

// How a message is cut: the same for its sender and its receiver.
struct Cut {
  i64 packs;
  int channels;
  int each;   // packs of a channel, or of a chunk
  u32 steps;  // chunks of each channel; 0 for packets
};
FLAGCX_DEVICE i64 over(i64 x, i64 y) { return (x + y - 1) / y; }
FLAGCX_DEVICE i64 lesser(i64 x, i64 y) { return x < y ? x : y; }
FLAGCX_DEVICE Cut cut_of(const Args& a, i64 nbytes) {
  Cut cut = {(nbytes + 15) >> 4, 0, 0, 0};
  if (nbytes < 0) return cut;
  // A message of some chunks goes over few channels, so that a block has one of them; a long one over more,
  // which evens out messages of different sizes.
  const int most = cut.packs <= (i64)a.few * BOX_PACKS * FEW_STEPS ? a.few : a.most;
  if (nbytes == 0) {
    cut.channels = 1;
  } else if (nbytes <= MOST_SMALL && cut.packs <= (i64)a.few * SMALL_PACKS) {
    const u32 packs = (u32)cut.packs, wanted = (packs + PACKS_EACH - 1) / PACKS_EACH;
    cut.channels = wanted < (u32)most ? (int)wanted : most;
    cut.each = (int)((packs + cut.channels - 1) / (u32)cut.channels);
  } else {
    cut.each = (int)lesser(over(cut.packs, (i64)most * 4 * CUT_WORK) * CUT_WORK, BOX_PACKS);
    cut.channels = (int)lesser(over(cut.packs, cut.each), most);
    cut.steps = (u32)over(cut.packs, (i64)cut.channels * cut.each);
  }
  return cut;
}

// By one warp. The first orders no reads of data, as none follow where a place is to be written again.
FLAGCX_DEVICE bool await_place(const Args& a, const u32* word, u32 want, int peer) {
  const bool free = (int)(peek_flag(word) - want) >= 0;
  return all_of_warp(free || await(a, word, want, peer));
}
FLAGCX_DEVICE bool await_word(const Args& a, const u32* word, u32 want, int peer) {
  return all_of_warp(await(a, word, want, peer));
}
"""
