"""Ranks killed at random before, in and after calls, in ``shrink`` and in ``fc.init()``: the others go on."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.bootstrap.processes import mpirun_environment, rest, spawned
from tests.cli.launching import running
from tests.communicator.jobs import PRELUDE, job
from tests.communicator.kills import IN_CALLS, IN_JOINING, IN_TAKEOVER, Kill
from tests.ranges import exhaustive

_CALLS = """
def check(comm, i):
    "One call, chosen by ``i``, whose result is checked."
    n, r = comm.size, comm.rank
    total = n * (n + 1) // 2
    kind = i % 10
    if kind in (0, 1):
        assert (comm.allreduce(np.full(50 + kind, r + 1)) == total).all()
    elif kind == 2:
        assert (comm.allreduce(np.full(70_000, r + 1.0), algorithm="two_shot") == total).all()
    elif kind == 3:
        assert (comm.allreduce(np.full(2_000_000, r + 1, np.float32)) == total).all()
    elif kind == 4:
        assert (comm.allreduce(np.full(30_000, r + 1), algorithm="ring") == total).all()
    elif kind == 5:
        assert comm.allgather_object((r, i)) == [(q, i) for q in range(n)]
    elif kind == 6:
        x = comm.allreduce([np.full(5, r + 1), np.full(900, r + 1)], async_op=False)
        assert x[0][0] == x[1][-1] == total
    elif kind == 7:
        got, big = np.zeros(3), np.zeros(300_000)
        comm.sendrecv(np.full(3, float(r)), (r + 1) % n, got, (r - 1) % n)
        work = comm.recv(big, (r + 1) % n, async_op=True)
        comm.send(np.full(300_000, float(r)), (r - 1) % n)
        assert got[0] == (r - 1) % n and work.wait()[-1] == (r + 1) % n
    elif kind == 8:
        comm.barrier()
    else:
        work = comm.allreduce(np.full(1000, r + 1), async_op=True)
        later = comm.broadcast(np.full(1000, r + 1), root=n - 1, async_op=True)
        assert work.wait()[3] == total and later.wait()[3] == n
"""

_SHRINK = (
    _CALLS
    + """
import faulthandler
from tests.communicator.kills import Kill, arm, die
faulthandler.dump_traceback_later(60, exit=True)
rounds = {rounds!r}
comm = fc.init(init_timeout_s=30)
slot = comm.rank
alive = set(range(comm.size))
for victims in rounds:
    if slot in victims:
        arm(Kill(*victims[slot]))
    alive -= victims.keys()
    while True:
        try:
            for i in range(30):
                check(comm, i)
            if slot in victims:
                die()
            here = comm.allgather_object(slot)
            if not victims.keys() & set(here):
                break
        except (fc.PeerDiedError, fc.AbortedError):
            before = comm.size
            comm = comm.shrink()
            assert comm.size + len(comm.lost) == before and comm.lost
    assert set(here) == alive and here == sorted(here), (here, alive)
tell("survived", slot)
"""
)


def _rounds(seed: int, size: int, joining: tuple[str, ...]) -> list[dict[int, Kill]]:
    """Which ranks die in each round and where: one in a call, and often others in ``shrink``."""
    chance = random.Random(seed)
    victims = chance.sample(range(size), size - 1)
    rounds = []
    while victims:
        kills = {victims.pop(): Kill.at_random(IN_CALLS, chance)}
        while victims and chance.random() < 0.6:
            kills[victims.pop()] = Kill.at_random(joining, chance)
        rounds.append(kills)
    return rounds


def _survive(rounds: list[dict[int, Kill]], size: int, start: Callable[[str], Any]) -> None:
    """Runs the rounds; all ranks but those that they kill have to come to their end."""
    plain = [{slot: tuple(kill) for slot, kill in kills.items()} for kills in rounds]
    dead = {slot for kills in rounds for slot in kills}
    with start(_SHRINK.replace("{rounds!r}", repr(plain))) as processes:
        told = [rest(process, 90) for process in processes]
    for slot, text in enumerate(told):
        assert (text == f"survived {slot}\n") == (slot not in dead), (rounds, told)
        assert slot not in dead or processes[slot].returncode == -9, (rounds, told)


@pytest.mark.parametrize("seed", [0, *exhaustive([1, 2])])
def test_survivors_go_on_wherever_ranks_are_killed(seed):
    _survive(_rounds(seed, 6, IN_JOINING), 6, partial(job, 6))


@pytest.mark.parametrize("seed", [0, *exhaustive([1])])
def test_another_rank_serves_the_store_when_the_rank_that_did_is_killed(seed, tmp_path):
    size = 6
    environs = [mpirun_environment(rank, size, f"job-{seed}", tmp_path) for rank in range(size)]
    _survive(_rounds(seed, size, IN_TAKEOVER), size, lambda body: spawned(PRELUDE + body, *environs))


_ELASTIC = (
    """
import os, random, sys, time
import numpy as np
import flagcx as fc
from tests.communicator.kills import IN_CALLS, IN_JOINING, Kill, arm, die
"""
    + _CALLS
    + """
slot, restarts = int(os.environ["FLAGCX_RANK"]), int(os.environ.get("FLAGCX_RESTARTS", 0))
chance = random.Random(1000 * {seed} + 100 * slot + restarts)
latest = chance.randrange(20, 140)
if restarts < {most}:
    arm(Kill.at_random(IN_CALLS + IN_JOINING, chance))
steps = 0
while True:
    comm = fc.init(init_timeout_s=60)
    assert comm.size == {size} and comm.rank == slot
    try:
        steps = max(comm.allgather_object(steps))
        while steps < 150:
            if restarts < {most} and steps >= latest:
                die()
            check(comm, steps)
            steps += 1
        break
    except (fc.PeerDiedError, fc.AbortedError):
        pass
print("done", steps, flush=True)
"""
)


@pytest.mark.parametrize("seed", [0, *exhaustive([1])])
def test_ranks_killed_anywhere_come_back(seed, tmp_path):
    """All but the last process of each rank are killed, at places in calls and in ``fc.init()``."""
    size, most = 4, 2 if seed else 1
    script = tmp_path / "job.py"
    text = _ELASTIC
    for name, value in {"seed": seed, "most": most, "size": size}.items():
        text = text.replace(f"{{{name}}}", str(value))
    script.write_text(text)
    program = ["-n", str(size), "--elastic", "--max-restarts", "1000", "--timeout", "110", str(script)]
    with running(*program, stderr=subprocess.STDOUT) as process:
        output = process.stdout.read()
        assert process.wait(30) == 0, output
    # A rank that was killed after its last step may come back when the others have ended, and works alone.
    assert output.count("done 150") == size, output
    # Each kill is one restart, and no rank ended for another reason, as an error of the communicator before.
    assert re.findall(r"is started again \((.*?);", output) == ["killed by SIGKILL"] * size * most, output
