"""Dead, stopped, late and disagreeing ranks: every other rank gets an error that names the one at fault."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.bootstrap.processes import line, rest, wait_until
from tests.communicator.jobs import job, outcome_of
from tests.ranges import exhaustive

DEATH_S = 10.0
"""Long before any time-out ends a wait, also on a busy machine."""

ALLREDUCE = "lambda: comm.allreduce(np.ones({count}, np.float32){more})"
CALLS = {
    "one_shot": ALLREDUCE.format(count=100, more=""),
    "slots": ALLREDUCE.format(count=10_000, more=', algorithm="two_shot"'),
    "cross_memory": ALLREDUCE.format(count=3_000_000, more=""),
    "ring": ALLREDUCE.format(count=100_000, more=', algorithm="ring"'),
    "broadcast": 'lambda: comm.broadcast(np.ones(3_000_000), algorithm="chain")',
    "barrier": "lambda: comm.barrier()",
    "recv": "lambda: comm.recv(np.ones(10), 1)",
}


def _start(body: str) -> str:
    return "comm = fc.init()\nrank = comm.rank\ntell('ready', os.getpid())\n" + body


def _ready(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        text = line(process)
        assert text.startswith("ready"), text + rest(process)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_rank_killed_before_a_call(name):
    body = f"""
if rank == 1:
    time.sleep(1000)
outcome({CALLS[name]})
outcome({CALLS[name]})
"""
    with job(3, _start(body)) as processes:
        _ready(processes)
        processes[1].kill()
        for rank in (0, 2):
            if name == "broadcast" and rank == 0:
                continue  # the root may be done before it can know
            if name == "recv" and rank == 2:
                continue  # takes another part in the test below
            told, culprit, seconds, text = outcome_of(line(processes[rank]))
            assert (told, culprit) == ("PeerDiedError", 1), text
            assert seconds < DEATH_S
            assert "rank 1" in text
            told, _, _, text = outcome_of(line(processes[rank]))
            assert told == "CommunicatorError"
            assert "PeerDiedError" in text


def test_a_rank_that_does_not_need_the_dead_one_may_be_done():
    """Here every rank reads the root's memory, and the root gives up: no rank gets anything but its data."""
    body = """
x = np.full(3_000_000, float(rank == 0))
if rank == 1:
    time.sleep(1000)
outcome(lambda: comm.broadcast(x, algorithm="direct"))
tell(rank == 0 or bool((x == 1).all()))
outcome(lambda: comm.broadcast(x, algorithm="direct"))
"""
    with job(3, _start(body)) as processes:
        _ready(processes)
        processes[1].kill()
        told, culprit, _, text = outcome_of(line(processes[0]))
        assert (told, culprit) == ("PeerDiedError", 1), text
        told, culprit, seconds, text = outcome_of(line(processes[2]))
        assert (told, culprit) in (("fine", None), ("PeerDiedError", 1)), text
        assert seconds < DEATH_S
        arrived = line(processes[2])
        assert told != "fine" or arrived.strip() == "True", "a call that is fine brought the data"
        later, culprit, seconds, text = outcome_of(line(processes[2]))
        wanted = ("PeerDiedError", 1) if told == "fine" else ("CommunicatorError", None)
        assert (later, culprit) == wanted, text
        assert seconds < DEATH_S


@pytest.mark.parametrize("name", ["one_shot", "cross_memory", *exhaustive(["slots", "ring"])])
def test_a_rank_killed_inside_calls(name):
    body = f"""
call = {CALLS[name]}
def for_ever():
    for i in range(10**9):
        call()
        if i == 20:
            tell("under way")
outcome(for_ever)
"""
    with job(4, _start(body)) as processes:
        _ready(processes)
        for process in processes:
            assert line(process) == "under way"
        processes[2].kill()
        for rank in (0, 1, 3):
            told, culprit, _, text = outcome_of(line(processes[rank]))
            assert told in ("PeerDiedError", "AbortedError"), text
            assert culprit == 2
            assert "rank 2" in text


def test_a_rank_killed_during_init():
    body = """
rank = int(os.environ["FLAGCX_RANK"])
if rank == 1:
    import flagcx.transport.shared_memory
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    flagcx.transport.shared_memory.SharedMemoryTransport.open = die
outcome(fc.init)
"""
    with job(3, body) as processes:
        for rank in (0, 2):
            told, _, seconds, text = outcome_of(line(processes[rank]))
            assert told in ("PeerDiedError", "BootstrapError"), text
            assert "rank 1" in text
            assert seconds < DEATH_S


def test_a_rank_that_never_comes_to_init():
    body = """
rank = int(os.environ["FLAGCX_RANK"])
if rank != 2:
    outcome(lambda: fc.init(init_timeout_s=1.0))
"""
    with job(3, body) as processes:
        for rank in (0, 1):
            told, _, seconds, text = outcome_of(line(processes[rank]))
            assert told in ("PeerTimeoutError", "PeerDiedError", "BootstrapError"), text
            assert "rank 2" in text
            assert seconds < 20, "the limit has ended the wait, not the usual one of minutes"


@pytest.mark.parametrize("name", ["ring", *exhaustive(["one_shot", "cross_memory"])])
def test_a_stopped_rank_is_named_after_the_timeout(name):
    body = f"""
call = {CALLS[name]}
call()
tell("warm")
if rank == 1:
    time.sleep(1000)
outcome(call)
"""
    with job(4, _start(body), FLAGCX_TIMEOUT_S="1.5") as processes:
        _ready(processes)
        for process in processes:
            assert line(process) == "warm"
        os.kill(processes[1].pid, signal.SIGSTOP)
        for rank in (0, 2, 3):
            told, culprit, seconds, text = outcome_of(line(processes[rank]))
            assert told in ("PeerTimeoutError", "AbortedError"), text
            assert culprit == 1, text
            assert "rank 1" in text
            assert seconds < 20, "the limit has ended the wait, not the usual one of minutes"


def test_a_rank_that_raises():
    body = """
comm.barrier()
if rank == 2:
    raise ValueError("no such file")
outcome(lambda: comm.allreduce(np.ones(10)))
"""
    with job(3, _start(body)) as processes:
        _ready(processes)
        assert "ValueError: no such file" in rest(processes[2])
        assert processes[2].returncode == 1
        for rank in (0, 1):
            told, culprit, seconds, text = outcome_of(line(processes[rank]))
            assert told in ("PeerDiedError", "AbortedError"), text
            assert culprit == 2
            assert seconds < DEATH_S


DISAGREEMENTS = {
    "collective": ("comm.allreduce(x)", "comm.broadcast(x)", ["allreduce of 100", "broadcast of 100"]),
    "count": ("comm.allreduce(x)", "comm.allreduce(x[:50])", ["allreduce of 100", "allreduce of 50"]),
    "count_by_far": ("comm.allreduce(x)", "comm.allreduce(np.ones(10**6))", ["of 100 ", "of 1000000 "]),
    "dtype": ("comm.allreduce(x)", "comm.allreduce(x.astype(np.int32))", ["float64", "int32"]),
    "operation": ('comm.allreduce(x, "max")', "comm.allreduce(x)", ["by max", "by sum"]),
    "root": ("comm.reduce(x, root=0)", "comm.reduce(x, root=1)", ["root 0", "root 1"]),
    "algorithm": ('comm.allreduce(x, algorithm="ring")', "comm.allreduce(x)", ["(ring", "(one_shot"]),
    "barrier": ("comm.barrier()", "comm.allreduce(x)", ["barrier", "allreduce of 100"]),
    "empty": ("comm.allreduce(x[:0])", "comm.allreduce(x)", ["of 0 ", "of 100 "]),
}


@pytest.mark.parametrize("name", sorted(DISAGREEMENTS))
def test_ranks_that_disagree(name):
    most, odd, words = DISAGREEMENTS[name]
    body = f"""
x = np.ones(100)
comm.allreduce(x)
def call():
    {odd} if rank == 1 else {most}
    comm.barrier()
outcome(call)
tell("end")
"""
    with job(3, _start(body), FLAGCX_TIMEOUT_S="20") as processes:
        _ready(processes)
        for process in processes:
            told, _, seconds, text = outcome_of(line(process))
            assert told in ("MismatchError", "AbortedError"), text
            assert seconds < DEATH_S
            for word in words:
                assert word in text


def test_a_transfer_of_the_wrong_size():
    body = """
outcome(lambda: comm.send(np.ones(10), 1) if rank == 0 else comm.recv(np.ones(9), 0))
outcome(lambda: comm.barrier())
"""
    with job(2, _start(body), FLAGCX_TIMEOUT_S="20") as processes:
        _ready(processes)
        told, culprit, _, text = outcome_of(line(processes[1]))
        assert (told, culprit) == ("MismatchError", 0)
        assert "80 bytes" in text
        assert "72" in text


def test_an_interrupt_is_told_to_the_others():
    body = """
if rank == 1:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        comm.recv(np.ones(3), 0)
    except KeyboardInterrupt:
        tell("interrupted")
    outcome(lambda: comm.barrier())
    time.sleep(1000)
outcome(lambda: comm.barrier())
"""
    with job(3, _start(body)) as processes:
        _ready(processes)
        assert line(processes[1]) == "interrupted"
        assert outcome_of(line(processes[1]))[0] == "CommunicatorError"
        for rank in (0, 2):
            told, culprit, _, text = outcome_of(line(processes[rank]))
            assert (told, culprit) == ("AbortedError", 1), text
            assert "KeyboardInterrupt" in text


@pytest.mark.parametrize("make", ["np.ones", "comm.empty"])
def test_nothing_is_written_to_the_arrays_of_a_rank_that_gave_up(make):
    """Rank 1 is interrupted in the middle of a call that works in the peers' memory, and uses its array."""
    body = f"""
from flagcx.transport.shared_memory.direct import Direct
x = {make}(5_000_000, np.float32)
x[...] = 1
work = Direct._work
def interrupted(self, pieces):
    raise KeyboardInterrupt
def late(self, pieces):
    tell("in the call")
    sys.stdin.readline()
    work(self, pieces)
Direct._work = interrupted if rank == 1 else late
try:
    outcome(lambda: comm.allreduce(x))
except KeyboardInterrupt:
    x[...] = 7
    tell("gave up")
    sys.stdin.readline()
    tell(bool((x == 7).all()))
sys.stdin.readline()
"""

    def go_on(process):
        process.stdin.write("go\n")
        process.stdin.flush()

    with job(2, _start(body)) as processes:
        _ready(processes)
        assert line(processes[0]) == "in the call"
        assert line(processes[1]) == "gave up"
        go_on(processes[0])
        told, culprit, _, text = outcome_of(line(processes[0]))
        assert (told, culprit) == ("AbortedError", 1), text
        go_on(processes[1])
        assert line(processes[1]) == "True"


def test_fifty_starts_leave_nothing():
    body = """
for i in range(50):
    with fc.init() as comm:
        assert comm.allreduce(np.ones(1000))[0] == comm.size
        shared = comm.empty(100_000)
        shared[...] = 1
        assert comm.allreduce(shared)[0] == comm.size
        del shared
    if i == 4:
        first = len(os.listdir("/proc/self/fd"))
tell(first, len(os.listdir("/proc/self/fd")))
"""
    with job(2, body) as processes:
        for process in processes:
            first, last = line(process).split()
            assert int(last) <= int(first)
        for process in processes:
            assert process.wait(20) == 0
        wait_until(lambda: all(p.poll() is not None for p in processes))


def test_work_that_nothing_waits_for_ends_the_job_with_its_error():
    body = """
comm = fc.init(timeout_s=20)
work = comm.allreduce(np.ones(100 + comm.rank), async_op=True)
"""
    with job(2, body) as processes:
        codes = [process.wait(timeout=30) for process in processes]
        texts = [process.stdout.read() for process in processes]
    assert codes == [1, 1], texts
    assert all("MismatchError: ranks disagree on call 0" in text for text in texts), texts


def test_an_error_that_was_told_is_not_told_again():
    body = """
comm = fc.init(timeout_s=20)
work = comm.allreduce(np.ones(100 + comm.rank), async_op=True)
outcome(lambda: work.wait())
"""
    with job(2, body) as processes:
        codes = [process.wait(timeout=30) for process in processes]
        texts = [process.stdout.read() for process in processes]
    assert codes == [0, 0], texts


def test_a_forked_child_that_ends_leaves_its_parent_alone():
    body = """
comm = fc.init(timeout_s=20)
if comm.rank == 0:
    if os.fork() == 0:
        try:
            comm.allreduce(np.ones(3))
        except fc.CommunicatorError as error:
            sys.exit(0 if "before a fork" in str(error) else 1)
        sys.exit(2)
    assert os.wait()[1] == 0
tell("sum", comm.allreduce(np.ones(3))[0])
"""
    with job(2, body) as processes:
        codes = [process.wait(timeout=30) for process in processes]
        texts = [process.stdout.read() for process in processes]
    assert codes == [0, 0], texts
    assert all("sum 2.0" in text for text in texts), texts


@pytest.mark.parametrize("array", ["np.ones(1 << 18)", "comm.empty(1 << 18, np.float64)"])
def test_a_rank_that_comes_after_its_peers_gave_up_is_told_so(array):
    """What it would read is gone then, or is going: that is not what it is told."""
    body = f"""
comm = fc.init(timeout_s=0.7)
x = {array}
if comm.rank == 1:
    time.sleep(1.5)
outcome(lambda: comm.allreduce(x))
if comm.rank == 0:
    del x
    time.sleep(2)
"""
    with job(2, body) as processes:
        told = [outcome_of(line(process)) for process in processes]
    assert told[0][0] == "PeerTimeoutError", told
    assert told[1][0] == "AbortedError" and "rank 0 gave up" in told[1][3], told


def test_a_rank_without_descriptors_says_so_and_tells_the_others():
    body = """
import resource
comm = fc.init()
if comm.rank == 1:
    most = max(map(int, os.listdir("/proc/self/fd"))) + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
comm.barrier()
outcome(lambda: comm.split(0))
sys.stdin.readline()
"""
    with job(3, body, FLAGCX_TIMEOUT_S="20") as processes:
        told = [outcome_of(line(process)) for process in processes]
    assert told[1][0] == "ResourceError", told
    assert "descriptor" in told[1][3] or "open files" in told[1][3], told
    for rank in (0, 2):  # which may have seen another that had been told
        assert told[rank][0] == "AbortedError", told
        assert told[rank][2] < DEATH_S, told
