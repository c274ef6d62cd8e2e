"""Jobs that a program makes of processes that it has: beside a launcher's, several at once, their errors."""

import pickle

import numpy as np
import pytest

import flagcx as fc
from flagcx.bootstrap.meeting import Meeting, MetRank, met, open_meeting
from tests.bootstrap.processes import bare_environment, line, rest, spawned
from tests.ranks import run_ranks


def _meet(comm, ranks, one_host=True, fails=False):
    """A job of some ranks of another job, whose ranks it turns round; what its all-reduce gives."""
    found = open_meeting(len(ranks), one_host, "test") if comm.rank == ranks[-1] else (None, None)
    meeting = comm.broadcast_object(found[0], root=ranks[-1])
    if comm.rank not in ranks:
        return None
    rank = len(ranks) - 1 - ranks.index(comm.rank)
    with met(MetRank(meeting, rank, 30.0, found[1])) as here:
        inside = here.call(fc.init)
        assert inside is here.call(fc.init) and inside is not comm
        if fails:
            comm.barrier()
            if rank == 1:
                raise KeyError("no such batch")
        return inside.rank, float(inside.allreduce(np.full(1, 10.0**comm.rank))[0])


def _several():
    comm = fc.init()
    return [_meet(comm, [0, 1, 2]), _meet(comm, [0, 2]), _meet(comm, [1]), _meet(comm, [1, 2], False)]


def test_jobs_of_any_ranks_beside_the_launchers():
    assert run_ranks(_several, 3) == [
        [(2, 111.0), (1, 101.0), None, None],
        [(1, 111.0), None, (0, 10.0), (1, 110.0)],
        [(0, 111.0), (0, 101.0), None, (0, 110.0)],
    ]


def _failing():
    comm = fc.init()
    try:
        _meet(comm, [0, 1], fails=True)
    except (KeyError, fc.AbortedError) as error:
        text = f"{type(error).__name__}: {error}"
    return text, _meet(comm, [0, 1])  # the next meeting is not harmed


def test_the_other_ranks_hear_of_an_error():
    (first, again), (second, _) = run_ranks(_failing, 2)
    assert first == "KeyError: 'no such batch'" and again == (1, 11.0)
    assert "AbortedError: rank 1" in second and "it raised KeyError: 'no such batch'" in second


def test_a_meeting_that_is_over_and_a_wrong_key_are_refused():
    meeting, server = open_meeting(2, True, "test")
    stranger = Meeting(2, meeting.addresses, bytes(32), "test")
    with pytest.raises(fc.BootstrapError, match=r"rank 1 of 2 \(started by given\)"):
        MetRank(stranger, 1, 0.5)
    assert meeting.key.hex() not in repr(meeting)
    server.close()
    with pytest.raises(fc.BootstrapError, match=r"did not find the store of job 'test' in time"):
        MetRank(meeting, 1, 0.3)


def test_the_store_goes_on_after_a_good_end_of_the_rank_that_runs_it():
    body = """
import pickle
import flagcx as fc
from flagcx.bootstrap.meeting import MetRank, open_meeting
meeting, server = open_meeting(2, True, "test") if os.environ["ME"] == "0" else (None, None)
tell(pickle.dumps(meeting).hex())
meeting = meeting or pickle.loads(bytes.fromhex(sys.stdin.readline()))
here = MetRank(meeting, int(os.environ["ME"]), 20.0, server)
here.call(fc.init)
if here.rank == 1:
    tell("in")
    sys.stdin.readline()
    here.store.set("k", b"v")
    tell(here.store.get("k", 10))
here.end()
tell("left")
"""
    with spawned(body, *(bare_environment(ME=str(rank)) for rank in range(2))) as (zero, one):
        meeting = line(zero)
        assert isinstance(pickle.loads(bytes.fromhex(meeting)), Meeting)
        assert pickle.loads(bytes.fromhex(line(one))) is None
        one.stdin.write(meeting + "\n")
        one.stdin.flush()
        assert (line(zero), line(one)) == ("left", "in")
        one.stdin.write("go\n")
        one.stdin.flush()
        assert rest(one) == "b'v'\nleft\n" and rest(zero) == ""
    assert (zero.returncode, one.returncode) == (0, 0)
