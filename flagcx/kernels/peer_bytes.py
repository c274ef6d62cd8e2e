"""Bytes of a caller's array, of any alignment and number, in packs of 16; and chunks of them in boxes."""

from __future__ import annotations

BYTES = r"""
// Bytes of a caller's array, of any alignment and number.
struct Bytes { u8* at; i64 count; };
FLAGCX_DEVICE bool whole(const Bytes& run, i64 stop) {
  return ((u64)run.at & 15) == 0 && stop * 16 <= run.count;
}
template <class E> FLAGCX_DEVICE uint4 load_by(const Bytes& run, i64 pack) {
  union { uint4 raw; E each[16 / sizeof(E)]; } x;
  x.raw = uint4{0, 0, 0, 0};
#pragma unroll
  for (int e = 0; e < (int)(16 / sizeof(E)); e++)
    if (pack * 16 + (i64)((e + 1) * sizeof(E)) <= run.count)
      x.each[e] = ((const E*)run.at)[pack * (16 / (int)sizeof(E)) + e];
  return x.raw;
}
template <class E> FLAGCX_DEVICE void store_by(const Bytes& run, i64 pack, uint4 v) {
  union { uint4 raw; E each[16 / sizeof(E)]; } x;
  x.raw = v;
#pragma unroll
  for (int e = 0; e < (int)(16 / sizeof(E)); e++)
    if (pack * 16 + (i64)((e + 1) * sizeof(E)) <= run.count)
      ((E*)run.at)[pack * (16 / (int)sizeof(E)) + e] = x.each[e];
}
FLAGCX_DEVICE uint4 load_pack(const Bytes& run, i64 pack) {
  if (whole(run, pack + 1)) return load_own_pack((const uint4*)run.at + pack);
  const u64 odd = (u64)run.at | (u64)run.count;
  return odd & 1 ? load_by<u8>(run, pack) : odd & 2 ? load_by<u16>(run, pack)
       : odd & 4 ? load_by<u32>(run, pack) : load_by<u64>(run, pack);
}
FLAGCX_DEVICE void save_pack(const Bytes& run, i64 pack, uint4 v) {
  const u64 odd = (u64)run.at | (u64)run.count;
  if (whole(run, pack + 1)) store_own_pack((uint4*)run.at + pack, v);
  else if (odd & 1) store_by<u8>(run, pack, v);
  else if (odd & 2) store_by<u16>(run, pack, v);
  else if (odd & 4) store_by<u32>(run, pack, v);
  else store_by<u64>(run, pack, v);
}
// Packs of a chunk, from an array into a box and back; a thread issues U loads before the first store.
template <int U> FLAGCX_DEVICE void fill_packs(const uint4* from, uint4* to) {
  uint4 v[U];
#pragma unroll
  for (int u = 0; u < U; u++) v[u] = load_own_pack(from + u * WORK);
#pragma unroll
  for (int u = 0; u < U; u++) store_pack(to + u * WORK, v[u]);
}
template <int U> FLAGCX_DEVICE void empty_packs(const uint4* from, uint4* to) {
  uint4 v[U];
#pragma unroll
  for (int u = 0; u < U; u++) v[u] = load_shared_pack(from + u * WORK);
#pragma unroll
  for (int u = 0; u < U; u++) store_own_pack(to + u * WORK, v[u]);
}
FLAGCX_DEVICE void fill_box(const Bytes& run, i64 first, int length, uint4* box, int t) {
  int i = t;
  if (whole(run, first + length)) {
    const uint4* const from = (const uint4*)run.at + first;
    for (; i + (FLIGHT - 1) * WORK < length; i += FLIGHT * WORK) fill_packs<FLIGHT>(from + i, box + i);
    for (; i + (FLIGHT / 2 - 1) * WORK < length; i += FLIGHT / 2 * WORK)
      fill_packs<FLIGHT / 2>(from + i, box + i);
  }
  for (; i < length; i += WORK) store_pack(box + i, load_pack(run, first + i));
}
FLAGCX_DEVICE void empty_box(const Bytes& run, i64 first, int length, const uint4* box, int t) {
  int i = t;
  if (whole(run, first + length)) {
    uint4* const to = (uint4*)run.at + first;
    for (; i + (FLIGHT - 1) * WORK < length; i += FLIGHT * WORK) empty_packs<FLIGHT>(box + i, to + i);
    for (; i + (FLIGHT / 2 - 1) * WORK < length; i += FLIGHT / 2 * WORK)
      empty_packs<FLIGHT / 2>(box + i, to + i);
  }
  for (; i < length; i += WORK) save_pack(run, first + i, load_shared_pack(box + i));
}
"""
