"""The kernel that moves blocks of any size: each rank a number of bytes of its own to and from each other.

A launch is a list of jobs. A job is at most one message to a rank, and at most one message from a rank; where
it has both, they go in step. Gather, scatter and all collectives whose blocks differ in size are n - 1 jobs
with both, to the k-th rank after this one and from the k-th before it; sends and receives are jobs of one.

A message goes over some of the *channels* of its pair of ranks. Its size, which sender and receiver know,
decides over how many, and whether it goes

* in *packets* with flags (see ``flagcx.kernels.peer_packets``), where it is small: two halves of a slot
  alternate, and the sender waits before its call k until the receiver has come to its call k - 1, so that it
  has read those of call k - 2; or
* in *chunks*: the sender fills the boxes of the channel one after the other, in the receiver's memory, a flag
  follows each, and another comes back when the box is empty.

With each message goes its size, so that a receiver that expects another one says so.

Each channel of each pair counts its own calls and chunks, so the ranks of a pair need no third one. A block
of threads has some channels of some jobs, one after the other, which evens out messages of different sizes.
All blocks of all ranks go through theirs in one order, by channel and then by job, so the first of all that
are not done can always go on.

A message that was started is launched when both ranks are ready for it, which each sees in its own memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from flagcx.kernels.peer import FLIGHT, MOST_RANKS, POLLS, TWO_AT_ONCE, PeerLayout
from flagcx.kernels.peer_bytes import BYTES
from flagcx.kernels.peer_channels import CHANNELS
from flagcx.kernels.peer_cuda import INTRINSICS, WAITS
from flagcx.kernels.source import CONVERSIONS, DEVICE_FUNCTION

MOST_JOBS = 2 * MOST_RANKS
FEW_STEPS = 8
"""A message of so many chunks in each of few channels is not long."""
WRONG_SIZE, TOO_MANY = 2, 3
"""What the kernel tells the host, besides what all kernels do: a message has another size than is expected;
the counts that lie on the GPU are negative, or more than the arrays have."""


POST = "flagcx_post"
"""The kernel, in the same source, by which a rank says that it is ready for a message that was started."""


class Job(ctypes.Structure):
    """A message to a rank and one from a rank; ``Job`` in the source. -1 bytes: there is none."""

    _fields_ = (
        ("start", ctypes.c_uint64),
        ("stop", ctypes.c_uint64),
        ("sends", ctypes.c_int64),
        ("takes", ctypes.c_int64),
        ("target", ctypes.c_int32),
        ("source", ctypes.c_int32),
    )


class MoveArgs(ctypes.Structure):
    """The only argument of the kernel; ``Args`` in its source."""

    _fields_ = (
        ("peer", ctypes.c_uint64 * MOST_RANKS),
        ("sendbuf", ctypes.c_uint64),
        ("recvbuf", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64),
        ("sent_counts", ctypes.c_uint64),
        ("taken_counts", ctypes.c_uint64),
        ("sendbuf_count", ctypes.c_int64),
        ("recvbuf_count", ctypes.c_int64),
        ("itemsize", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("jobs", ctypes.c_int32),
        ("own", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("most", ctypes.c_int32),
        ("few", ctypes.c_int32),
        ("job", Job * MOST_JOBS),
    )


@dataclass(frozen=True, slots=True)
class MoveKernel:
    """The kernel for a memory.

    Attributes:
        layout: The memory.
        work: Threads of a block that move data; those of the layout's shape if 0. Sender and receiver may
            differ in it.
    """

    layout: PeerLayout
    work: int = 0

    @property
    def name(self) -> str:
        """The kernel's name in its source."""
        return "flagcx_move"

    def source(self, intrinsics: str = INTRINSICS, **changed: int) -> str:
        """The whole CUDA source; see ``PeerKernel.source``."""
        layout, shape = self.layout, self.layout.shape
        values = {
            "RANKS": layout.ranks, "MOST_RANKS": MOST_RANKS, "MOST_JOBS": MOST_JOBS,
            "WORK": self.work or shape.work, "CUT_WORK": shape.work,
            "RESIDENT": shape.resident, "LAG": shape.lag, "FLIGHT": FLIGHT, "POLLS": POLLS,
            "BOXES": layout.boxes, "BOX_PACKS": layout.box_packs, "SMALL_PACKS": layout.small_packs,
            "PACKS_EACH": layout.packs_each, "MOST_SMALL": layout.most_small, "FEW_STEPS": FEW_STEPS,
            "WRONG_SIZE": WRONG_SIZE, "TOO_MANY": TOO_MANY,
            "TWO_AT_ONCE": TWO_AT_ONCE,
            **{name: f"{at}ull" for name, at in layout.places.items()}, **changed,
        }  # fmt: skip
        head = (DEVICE_FUNCTION if intrinsics is INTRINSICS else "") + CONVERSIONS
        head += f'#define SCOPE "{"gpu" if layout.one_gpu else "sys"}"\n'
        head += "".join(f"#define {name} {value}\n" for name, value in values.items())
        return head + intrinsics + _ARGS + WAITS + BYTES + CHANNELS + _CHANNEL + _KERNEL


_ARGS = r"""
struct Job {
  u64 from, to;      // in sendbuf and in recvbuf, in bytes
  i64 sends, takes;  // bytes; -1 where there is no message
  int target, source;
};
struct Args {
  u64 peer[MOST_RANKS];  // address of each rank's memory in this process
  u64 sendbuf, recvbuf;
  u64 control;  // words of the host: stop, what went wrong, for which peer
  u64 limit_ns;
  u64 sent_counts, taken_counts;  // elements to and from each rank, where the counts lie on the GPU; else 0
  i64 sendbuf_count, recvbuf_count;  // elements of the arrays, where the counts lie on the GPU
  int itemsize, rank;
  int jobs;      // how many there are
  int own;       // whether one more follows, which this rank copies for itself
  int channels;  // how many the largest message has, where that is known; else ``most``
  int first;     // the first channel of those of this kind of call
  int most;      // channels that a message may have, and that one may have which is not long
  int few;
  Job job[MOST_JOBS];
};
"""

_CHANNEL = r"""
// A job's message to a rank and the one from a rank, as far as one channel carries them.
struct Way {
  int channel;
  bool sends, takes;
  Cut out, in;
  Bytes from, to;
  Pair gone, come;  // before this call
};
FLAGCX_DEVICE i64 first_of(const Cut& cut, int channel, u32 step) {
  return ((i64)step * cut.channels + channel) * cut.each;
}
FLAGCX_DEVICE int length_of(const Cut& cut, i64 first) {
  return (int)(cut.packs - first < cut.each ? (cut.packs - first < 0 ? 0 : cut.packs - first) : cut.each);
}
// ``ahead``: this thread's first pack of a small message that is sent.
FLAGCX_DEVICE void work(const Args& a, const Job& job, const Way& w, Progress* progress, int t, uint4 ahead) {
  const int c = w.channel;
  const u32 gone = w.gone.sent_calls + 1, come = w.come.taken_calls + 1;
  const u32 out = w.sends ? w.out.steps : 0, in = w.takes ? w.in.steps : 0, lag = out && in ? LAG : 0;
  bool ok = true;
  if (w.sends && out == 0) {
    const i64 first = first_of(w.out, c, 0);
    const int length = length_of(w.out, first);
    ok = await_place(a, word_of(a, a.rank, AT_CALLS_TAKEN, c, job.target), gone - 2, job.target);
    uint4* const slot = packets_of(a, job.target, c, gone, a.rank);
    for (int i = t; ok && i < length; i += WORK) {
      if (i != t) ahead = load_pack(w.from, first + i);
      store_flagged(slot + i, SMALL_PACKS, ahead, flag_of(gone));
    }
  }
  for (u32 i = 0; i < out || (in && i < in + lag); i++) {
    if (i < out) {
      const u32* const emptied = word_of(a, a.rank, AT_BOXES_TAKEN, c, job.target);
      ok = ok && await_place(a, emptied, w.gone.sent + i + 1 - BOXES, job.target);
      const i64 first = first_of(w.out, c, i);
      uint4* const box = box_of(a, job.target, c, w.gone.sent + i, a.rank);
      if (ok) fill_box(w.from, first, length_of(w.out, first), box, t);
      arrive(progress, 0, i + 1, ok, t);
    }
    if (i >= lag && i - lag < in) {
      const u32 j = i - lag;
      const u32* const filled = word_of(a, a.rank, AT_BOXES_SENT, c, job.source);
      ok = ok && await_word(a, filled, w.come.taken + j + 1, job.source);
      const i64 first = first_of(w.in, c, j);
      const uint4* const box = box_of(a, a.rank, c, w.come.taken + j, job.source);
      if (ok) empty_box(w.to, first, length_of(w.in, first), box, t);
      arrive(progress, 1, j + 1, ok, t);
    }
  }
  if (w.takes && in == 0) {
    const i64 first = first_of(w.in, c, 0);
    const int length = ok ? length_of(w.in, first) : 0;
    const uint4* const slot = packets_of(a, a.rank, c, come, job.source);
    Wait wait = {0, 0};
    for (int i = t; ok && i < length; i += WORK) {
      uint4 v;
      while (!see_flagged(slot + i, SMALL_PACKS, flag_of(come), &v))
        if (!(ok = keep_waiting(a, wait, job.source))) break;
      if (ok) save_pack(w.to, first + i, v);
    }
  }
}
// The warp that sends flags and sizes, and looks whether the size that comes is the one expected.
FLAGCX_DEVICE void guide(const Args& a, const Job& job, const Way& w, Progress* progress, int lane) {
  const int c = w.channel;
  const u32 gone = w.gone.sent_calls + 1, come = w.come.taken_calls + 1;
  const u32 out = w.sends ? w.out.steps : 0, in = w.takes ? w.in.steps : 0;
  if (w.takes && lane == 0) store_flag(word_of(a, job.source, AT_CALLS_TAKEN, c, a.rank), come - 1);
  if (a.first && c == 0 && lane == 0) {
    if (w.sends) store_flag(posted_of(a, job.target, 0, a.rank), gone);
    if (w.takes) store_flag(posted_of(a, job.source, 1, a.rank), come);
  }
  if (w.sends) {
    const u32* const taken = word_of(a, a.rank, AT_CALLS_TAKEN, c, job.target);
    const u32 flag = flag_of(gone);
    if (await_place(a, taken, gone - 2, job.target) && lane == 0) {
      const u64 n = (u64)job.sends;
      store_packet(size_of(a, job.target, c, gone, a.rank), uint4{(u32)n, flag, (u32)(n >> 32), flag});
    }
  }
  u32 sent[2] = {0, 0};
  bool due = w.takes;
  Wait wait = {0, 0};
  while (due || sent[0] < out || sent[1] < in) {
    if (due) {
      const uint4 x = load_packet(size_of(a, a.rank, c, come, job.source));
      if (all_of_warp(x.y == flag_of(come) && x.w == flag_of(come))) {
        due = false;
        if (lane == 0 && (i64)((u64)x.z << 32 | x.x) != job.takes) give_up(a, WRONG_SIZE, job.source);
      } else if (!all_of_warp(keep_waiting(a, wait, job.source))) {
        due = false;
      }
    }
    if (out == 0 && in == 0) continue;
    const u32 done[2] = {progress_of(progress, 0, lane), progress_of(progress, 1, lane)};
    if (done[0] == sent[0] && done[1] == sent[1]) continue;
    if (load_shared(&progress->failed) == 0) {
      release();
      if (lane == 0 && done[0] != sent[0])
        store_flag(word_of(a, job.target, AT_BOXES_SENT, c, a.rank), w.gone.sent + done[0]);
      if (lane == 0 && done[1] != sent[1])
        store_flag(word_of(a, job.source, AT_BOXES_TAKEN, c, a.rank), w.come.taken + done[1]);
    }
    sent[0] = done[0];
    sent[1] = done[1];
  }
}
"""

_KERNEL = r"""
// The elements that go to, or come from, the ranks before ``rank``, and that one's; by counts on the GPU.
FLAGCX_DEVICE bool place_by(u64 counts_at, int rank, int itemsize, i64 most, u64* at, i64* bytes) {
  const i64* const counts = (const i64*)counts_at;
  i64 before = 0, all = 0;
  bool fit = true;
#pragma unroll
  for (int q = 0; q < RANKS; q++) {
    const i64 n = counts[q];
    fit = fit && n >= 0 && n <= most;
    if (q < rank) before += n;
    if (q == rank) *bytes = n * itemsize;
    all += n;
  }
  *at = (u64)(before * itemsize);
  return fit && all <= most;
}
FLAGCX_DEVICE bool sizes_of(const Args& a, Job* job) {
  const bool sent = place_by(
      a.sent_counts, job->target, a.itemsize, a.sendbuf_count, &job->from, &job->sends);
  return place_by(
      a.taken_counts, job->source, a.itemsize, a.recvbuf_count, &job->to, &job->takes) && sent;
}
FLAGCX_DEVICE void copy_own(const Args& a, const Job& own, int part, int parts, int t) {
  const Bytes from = {(u8*)a.sendbuf + own.from, own.sends}, to = {(u8*)a.recvbuf + own.to, own.takes};
  if (from.at == to.at) return;
  const i64 packs = (lesser(from.count, to.count) + 15) >> 4, stride = (i64)parts * WORK;
  for (i64 i = (i64)part * WORK + t; i < packs; i += stride) save_pack(to, i, load_pack(from, i));
}
// After a wait that timed out: see ``poison`` of the other kernels.
FLAGCX_DEVICE void spoil(const Args& a, const Job* jobs, int t) {
  const i64 stride = (i64)grid_size() * WORK;
  for (int j = 0; j < a.jobs + a.own && t < WORK; j++) {
    const Bytes to = {(u8*)a.recvbuf + jobs[j].to, jobs[j].takes};
    for (i64 i = (i64)block_index() * WORK + t; i * 16 < to.count; i += stride)
      save_pack(to, i, uint4{~0u, ~0u, ~0u, ~0u});
  }
}
FLAGCX_DEVICE Pair read_pair(const Pair* pair) {
  const uint4 v = load_shared_pack((const uint4*)pair);
  return Pair{v.x, v.y, v.z, v.w};
}
// Tells the peer of a message that this rank is ready for it; by one thread.
FLAGCX_KERNEL(WARP, 1) flagcx_post(FLAGCX_PARAMETER Args a) {
  if (thread_index() != 0 || a.jobs == 0) return;
  const Job& job = a.job[0];
  const bool sends = job.sends >= 0;
  const int peer = sends ? job.target : job.source;
  const Pair pair = read_pair(pair_of(a, 0, peer));
  store_flag(posted_of(a, peer, !sends, a.rank), (sends ? pair.sent_calls : pair.taken_calls) + 1);
}
FLAGCX_KERNEL(WORK + WARP, RESIDENT) flagcx_move(FLAGCX_PARAMETER Args a) {
  FLAGCX_SHARED(Progress, progress, 1);
  FLAGCX_SHARED(Job, counted, RANKS);
  FLAGCX_SHARED(u32, fits, RANKS);
  const int t = thread_index(), lane = t % WARP, items = a.jobs * a.channels;
  // Under way while other numbers are read: there is one look at it, when the first item begins.
  const bool counts = t == 0 && a.first == 0;  // messages of pairs have an order of their own
  const u32 busy = counts ? begin_launch(state_of(a)) : 0;
  const u32 dead = peek_flag(&((State*)(memory_of(a, a.rank) + AT_STATE))->dead);
  const Job* jobs = a.job;
  if (a.sent_counts) {
    for (int i = t; i < a.jobs + a.own; i += WORK + WARP) {
      counted[i] = a.job[i];
      fits[i] = sizes_of(a, counted + i);
    }
    join_block();
    bool fit = true;
    for (int i = 0; i < a.jobs + a.own; i++) fit = fit && fits[i];
    if (!fit) {
      if (t == 0 && !dead) give_up(a, TOO_MANY, a.rank);
      return;
    }
    jobs = counted;
  }
  for (int item = block_index(); item < items; item += grid_size()) {
    const int c = item / a.jobs;
    const Job job = jobs[item - c * a.jobs];
    Way w;
    w.channel = c;
    w.out = cut_of(a, job.sends);
    w.in = cut_of(a, job.takes);
    w.sends = c < w.out.channels;
    w.takes = c < w.in.channels;
    if (!w.sends && !w.takes) continue;
    w.from = Bytes{(u8*)a.sendbuf + job.from, job.sends};
    w.to = Bytes{(u8*)a.recvbuf + job.to, job.takes};
    Pair* const gone = pair_of(a, c, w.sends ? job.target : a.rank);
    Pair* const come = pair_of(a, c, w.takes ? job.source : a.rank);
    w.gone = read_pair(gone);
    w.come = read_pair(come);
    uint4 ahead = uint4{0, 0, 0, 0};
    if (w.sends && w.out.steps == 0) {
      const i64 first = first_of(w.out, c, 0);
      if (t < length_of(w.out, first)) ahead = load_pack(w.from, first + t);
    }
    if (dead) break;
    if (w.out.steps || w.in.steps) {
      if (t < (int)(sizeof(Progress) / 4)) ((u32*)progress)[t] = 0;
      join_block();
    }
    if (t < WORK) work(a, job, w, progress, t, ahead);
    else guide(a, job, w, progress, lane);
    join_block();
    if (t == 0 && w.sends) {
      gone->sent = w.gone.sent + w.out.steps;
      gone->sent_calls = w.gone.sent_calls + 1;
    }
    if (t == 0 && w.takes) {
      come->taken = w.come.taken + w.in.steps;
      come->taken_calls = w.come.taken_calls + 1;
    }
  }
  if (dead) {
    spoil(a, jobs, t);
  } else if (a.own && t < WORK) {
    // Blocks beyond the items have this alone to do; where there are none, all do it last.
    const int beyond = grid_size() - items, block = block_index();
    if (beyond <= 0) copy_own(a, jobs[a.jobs], block, grid_size(), t);
    else if (block >= items) copy_own(a, jobs[a.jobs], block - items, beyond, t);
  }
  if (counts) end_launch(a, state_of(a), busy);
}
"""
