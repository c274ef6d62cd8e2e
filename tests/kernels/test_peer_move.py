"""The kernel that moves blocks of any size: on the host, in any interleaving of its threads; and compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from flagcx.kernels.peer import MOST_RANKS, PeerLayout
from flagcx.kernels.peer_move import POST, TOO_MANY, WRONG_SIZE, Job, MoveArgs, MoveKernel
from flagcx.kernels.source import OPTIONS
from flagcx.transport.device_messages import Message
from flagcx.transport.peer_memory.grids import started_work
from flagcx.transport.peer_memory.posted import PostedCounts
from tests.kernels import nvrtc, peer_host
from tests.kernels.peer_host import BLOCKS, WARP, WORK, Host, Launch, move_kernel

needs_compiler = pytest.mark.skipif(peer_host.COMPILER is None, reason="no C++ compiler on this machine")
needs_nvrtc = pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
)
SMALL = {"MOST_SMALL": 600, "PACKS_EACH": 8, "BOX_PACKS": 2 * WORK}
"""Then some hundred bytes go over several channels, and some thousand in several chunks."""
SIZES = (0, 1, 16, 100, 256, 599, 600, 601, 1024, 2500, 5000)
EITHER = [True, False]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("move")


class Messages:
    """Calls of all ranks of a host, and what each must have received."""

    def __init__(self, host: Host, seed: int) -> None:
        self.host, self.size, self.random = host, host.ranks, np.random.default_rng(seed)
        self.kernel = move_kernel(host.directory, host.layout, **SMALL)
        self.started = move_kernel(host.directory, host.layout, **SMALL, WORK=WARP)  # of smaller blocks
        self.made: list[list[Launch]] = [[] for _ in range(self.size)]
        self.kept: list = []
        self.checks: list[tuple[str, np.ndarray, np.ndarray]] = []

    def array(self, nbytes: int, filled: bool) -> np.ndarray:
        """Bytes that begin at any address."""
        memory = np.zeros(nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 16 + int(self.random.choice([0, 0, 1, 2, 4, 8]))
        view = memory[start : start + nbytes]
        if filled:
            view[...] = self.random.integers(0, 256, nbytes)
        self.kept.append(memory)
        return view

    def args(self, rank: int, jobs: list[Job], pairs: bool = False) -> MoveArgs:
        layout, args = self.host.layout, MoveArgs()
        for q, memory in enumerate(self.host.memory):
            args.peer[q] = memory.ctypes.data
        args.control, args.limit_ns = self.host.words[rank].ctypes.data, self.host.limit_ns
        args.rank = rank
        args.own = int(jobs[-1].target == jobs[-1].source)
        args.jobs = len(jobs) - args.own
        args.first = layout.channels if pairs else 0
        args.most = layout.pair_channels if pairs else layout.channels
        args.few = max(args.most // 2, 1)
        args.channels = args.most
        for i, job in enumerate(jobs):
            args.job[i] = job
        return args

    def launch(self, rank: int, args: MoveArgs, either: bool = False) -> None:
        """A launch, by the kernel for messages that were started too, if ``either`` will do."""
        grid = int(self.random.integers(1, 7))
        if either and self.random.integers(2):
            self.made[rank].append(Launch(self.started, args, grid, 2 * WARP))
        else:
            self.made[rank].append(Launch(self.kernel, args, grid, WORK + WARP))

    def alltoall(self, on_gpu: bool) -> np.ndarray:
        """An alltoall of blocks of any size, whose counts may lie in memory; returns the sizes."""
        unit = int(self.random.choice([1, 2, 4, 8]))
        sizes = self.random.choice(SIZES, (self.size, self.size)) // unit * unit
        sent = [self.array(int(sizes[r].sum()), True) for r in range(self.size)]
        for r in range(self.size):
            taken = self.array(int(sizes[:, r].sum()), False)
            jobs = []
            for k in (*range(1, self.size), 0):
                target, source = (r + k) % self.size, (r - k) % self.size
                starts = int(sizes[r, :target].sum()), int(sizes[:source, r].sum())
                jobs.append(Job(*starts, int(sizes[r, target]), int(sizes[source, r]), target, source))
            args = self.args(r, [Job(0, 0, 0, 0, j.target, j.source) for j in jobs] if on_gpu else jobs)
            args.sendbuf, args.recvbuf = sent[r].ctypes.data, taken.ctypes.data
            if on_gpu:
                counts = [np.ascontiguousarray(c // unit, np.int64) for c in (sizes[r], sizes[:, r])]
                self.kept.append(counts)
                args.sent_counts, args.taken_counts = (c.ctypes.data for c in counts)
                args.sendbuf_count, args.recvbuf_count = len(sent[r]) // unit, len(taken) // unit
                args.itemsize = unit
            self.launch(r, args)
            ends = sizes.cumsum(axis=1)
            blocks = [sent[q][ends[q, r] - sizes[q, r] : ends[q, r]] for q in range(self.size)]
            self.checks.append((f"alltoall of {sizes.tolist()}, {on_gpu=}", taken, np.concatenate(blocks)))
        return sizes

    def message(self, sender: int, receiver: int, nbytes: int) -> None:
        """A message from one rank to another, each in a launch of its own."""
        sent, taken = self.array(nbytes, True), self.array(nbytes, False)
        out = Job(sent.ctypes.data, 0, nbytes, -1, receiver, sender)
        into = Job(0, taken.ctypes.data, -1, nbytes, receiver, sender)
        self.launch(sender, self.args(sender, [out], pairs=True), either=True)
        self.launch(receiver, self.args(receiver, [into], pairs=True), either=True)
        self.checks.append((f"{nbytes} bytes from {sender} to {receiver}", taken, sent))

    def faults(self, seed: int) -> list[str]:
        """Makes all calls; what is wrong."""
        found = [] if self.host.launch(self.made, seed) else ["the calls did not end"]
        found += [f"rank {r} was told {w.tolist()}" for r, w in enumerate(self.host.words) if w.any()]
        return found + [what for what, got, want in self.checks if not np.array_equal(got, want)]


@needs_compiler
@pytest.mark.parametrize(("size", "one_gpu"), [(2, True), (3, False), (5, True)])
def test_blocks_and_messages_of_any_size_in_any_interleaving(directory, size, one_gpu):
    host = Host(directory, size, one_gpu)
    for seed in range(4):
        calls = Messages(host, seed)
        for i in range(8):
            calls.alltoall(on_gpu=i % 3 == 2)
            for _ in range(2):
                sender, shift = calls.random.integers(0, size), calls.random.integers(1, size)
                receiver = (sender + shift) % size
                calls.message(int(sender), int(receiver), int(calls.random.choice(SIZES)))
        assert calls.faults(seed) == []


@needs_compiler
@pytest.mark.parametrize("age", [2**31 - 2, 2**32 - 3])
def test_numbers_may_wrap_around(directory, age):
    host = Host(directory, 3)
    for memory in host.memory:
        places = host.layout.places
        for name, stop in (("AT_PAIRS", "AT_SIZES"), ("AT_SIZES", "AT_PAIR_PACKETS")):
            memory[places[name] : places[stop]].view(np.uint32)[...] = age
    calls = Messages(host, 3)
    for _ in range(5):
        calls.alltoall(on_gpu=False)
    assert calls.faults(3) == []


@needs_compiler
def test_a_rank_sends_on_while_another_takes_its_time(directory):
    """Two small messages leave before the first is received; a third waits."""
    host = Host(directory, 2, limit_ns=20_000)
    calls = Messages(host, 1)
    for _ in range(2):
        calls.message(0, 1, 100)
    calls.made[1].clear()
    assert host.launch(calls.made, 1)
    assert not host.words[0].any()
    calls.made[0].clear()
    calls.message(0, 1, 100)
    calls.made[1].clear()
    assert host.launch(calls.made, 1)
    assert host.words[0][1:3].tolist() == [1, 1], "the third message would overwrite the first"


@needs_compiler
def test_a_rank_sees_how_far_its_peers_have_come(directory):
    """The third message to a rank is posted, after two that were launched; the other direction has none."""
    host = Host(directory, 3)
    calls = Messages(host, 6)
    for _ in range(2):
        calls.message(2, 0, 100)
    assert calls.faults(6) == []
    calls.made = [[], [], []]
    calls.message(2, 0, 100)
    calls.made[0].clear()
    post = move_kernel(directory, host.layout, POST, **SMALL)
    calls.made[2] = [Launch(post, calls.made[2][0].args, 1, WARP)]
    assert host.launch(calls.made, 6)
    counts = [PostedCounts.from_buffer_copy(seen_by(host, rank)) for rank in range(3)]
    assert list(counts[0].posted[0])[:3] == [0, 0, 3] and not any(counts[0].posted[1])
    assert list(counts[2].posted[1])[:3] == [2, 0, 0] and not any(counts[2].posted[0])
    assert counts[0].matched(Message(False, 0, 100, 2)) and not counts[2].matched(Message(True, 0, 100, 0))


def seen_by(host: Host, rank: int) -> bytes:
    """What ``PostedCounts`` has of a rank's memory."""
    places, memory = host.layout.places, host.memory[rank]
    pairs = places["AT_PAIRS"] + host.layout.channels * MOST_RANKS * 16
    spans = (places["AT_POSTED"], 2 * MOST_RANKS * 4), (pairs, MOST_RANKS * 16)
    return b"".join(memory[at : at + nbytes].tobytes() for at, nbytes in spans)


@needs_compiler
@pytest.mark.parametrize(("sent", "expected"), [(100, 50), (100, 5000), (5000, 100), (5000, 2500), (0, 16)])
def test_a_message_of_another_size_than_expected_is_told(directory, sent, expected):
    host = Host(directory, 2, limit_ns=200_000)
    calls = Messages(host, 2)
    calls.message(0, 1, sent)
    calls.made[1][0].args.job[0].takes = expected
    calls.kept.append(memory := np.zeros(expected, np.uint8))
    calls.made[1][0].args.job[0].stop = memory.ctypes.data
    assert host.launch(calls.made, 2)
    assert host.words[1][1:3].tolist() == [WRONG_SIZE, 0]


@needs_compiler
def test_counts_in_memory_that_do_not_fit_are_told_and_write_nothing_outside(directory):
    for wrong in (10**15, -1, "one more"):
        host = Host(directory, 2, limit_ns=20_000)
        calls = Messages(host, 4)
        sizes = calls.alltoall(on_gpu=True)
        args = calls.made[1][0].args
        counts = np.array(sizes[:, 1] // args.itemsize)
        counts[0] = counts[0] + 1 if wrong == "one more" else wrong
        calls.kept.append(counts)
        args.taken_counts = counts.ctypes.data
        assert host.launch(calls.made, 4)
        assert host.words[1][1:3].tolist() == [TOO_MANY, 1], wrong
        assert not calls.checks[1][1].any(), "it wrote all the same"


@needs_compiler
def test_a_rank_that_stays_away_is_named_and_nobody_waits_for_ever(directory):
    host = Host(directory, 3, limit_ns=30_000)
    calls = Messages(host, 5)
    calls.alltoall(on_gpu=False)
    calls.made[1].clear()
    assert host.launch(calls.made, 5)
    assert host.launch(calls.made, 5), "a later call ends at once"
    for rank in (0, 2):
        assert host.words[rank][1:3].tolist() == [1, 1]
        assert (calls.checks[rank][1] == 255).all(), "it looks as if it were right"


MUTANTS = {
    "boxes are filled again too soon": ("w.gone.sent + i + 1 - BOXES", "w.gone.sent + i - 2 * BOXES"),
    "nobody waits for a box": ("await_word(a, filled, w.come.taken + j + 1, job.source)", "true"),
    "packets have one half": ("(call & 1)) * RANKS", "0) * RANKS"),
    "packets are sent again too soon": (
        "gone - 2, job.target);\n    uint4*",
        "gone - 9, job.target);\n    uint4*",
    ),
    "flags overtake warps": (
        "for (int w = lane; w < WARPS; w += WARP) {",
        "for (int w = lane; w < 1; w += WARP) {",
    ),
    "all channels count as one": ("(a.first + channel) * MOST_RANKS + peer", "a.first * MOST_RANKS + peer"),
    "the end of a message is left out": ("(nbytes + 15) >> 4, 0", "(nbytes < 32 ? 1 : nbytes / 16), 0"),
}


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_a_faulty_kernel_is_noticed(tmp_path, monkeypatch, name):
    source, (before, after) = MoveKernel.source, MUTANTS[name]

    def mutated(self, *args, **constants):
        text = source(self, *args, **constants)
        assert before in text, "the mutant changes nothing"
        return text.replace(before, after)

    monkeypatch.setattr(MoveKernel, "source", mutated)
    host = Host(tmp_path, 3)
    host.limit_ns = 40_000
    for seed in range(12):
        calls = Messages(host, seed)
        for _ in range(6):
            calls.alltoall(on_gpu=False)
        for i in range(12):
            calls.message(i % 2, 2, 400)
        if calls.faults(seed):
            return
    pytest.fail("nothing was noticed")


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90"])
def test_it_compiles_without_a_warning(architecture):
    shared, apart = PeerLayout(2, 16, True), PeerLayout(8, 16, False)
    kernels = [MoveKernel(shared), MoveKernel(apart), MoveKernel(shared, started_work(shared))]

    def compiled(kernel):
        return nvrtc.compile_for(kernel.source(), architecture, OPTIONS, quickly=True)

    with ThreadPoolExecutor(2) as pool:
        for made in pool.map(compiled, kernels):
            assert (made.status, made.log) == (0, "")
            assert b"flagcx_move" in made.code


def test_each_message_that_goes_as_packets_has_room_in_its_channels():
    for ranks in range(2, 17):
        for one_gpu in EITHER:
            layout = PeerLayout(ranks, BLOCKS, one_gpu)
            assert layout.boxes & (layout.boxes - 1) == 0 and layout.boxes > layout.shape.lag
            assert layout.packs_each <= layout.small_packs
