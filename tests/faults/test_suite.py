"""A slice of the fault suite, and its judgement itself: what it says of logs that are as they must not be."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bootstrap.processes import REPOSITORY
from tests.communicator.kills import IN_CALLS, IN_JOINING, Kill
from tests.faults.plan import FAULTS, IN_GPU_CALLS, IN_MPI, IN_UCX, Plan, draw
from tests.faults.verdict import Verdict, judge


def inject(logs: Path, *arguments: str, timeout_s: float) -> str:
    """What the command prints; fails if it has found anything. ``logs``: where it keeps those of bad jobs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": str(logs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_few_faults(tmp_path):
    inject(
        tmp_path, "--faults", "18", "--transport", "shared memory", "--transport", "threads", timeout_s=240
    )


@pytest.mark.exhaustive
def test_faults_of_ranks_of_mpirun(tmp_path):
    inject(tmp_path, "--faults", "4", "--seed", "5000", "--at-once", "4", "--transport", "MPI", timeout_s=300)


@pytest.mark.parametrize("transport", list(FAULTS))
def test_a_seed_gives_one_plan(transport):
    plans = [draw(seed, transport) for seed in range(300)]
    assert plans == [draw(seed, transport) for seed in range(300)]
    assert {plan.fault for plan in plans} == set(FAULTS[transport])
    assert {plan.phase for plan in plans} >= {"init", "close", 0, 5}


@pytest.mark.parametrize("place", sorted({*IN_CALLS, *IN_JOINING, *IN_MPI, *IN_UCX, *IN_GPU_CALLS}))
def test_the_places_of_faults_exist(place):
    module, _, path = place.partition(":")
    owner, _, name = path.partition(".")
    assert name in vars(getattr(importlib.import_module(f"flagcx.{module}"), owner))


PLAN = Plan(
    1, "shared memory", 3, 2, "kill", 1, 1, "before", 0.0, Kill("bootstrap.store:Store.agree", 1, False), ""
)

FEW = ["pipe:[7]", "/dev/null"]


def event(name: str, time: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "pid": 1, "phase": 1, **more}


def verdict(
    *of_rank_0: dict[str, Any], plan: Plan = PLAN, struck: bool = True, late: tuple[int, ...] = ()
) -> Verdict:
    """What is said of a job whose ranks but rank 0 behaved: rank 1 was killed, rank 2 told so."""
    died = event("error", 3.0, kind="PeerDiedError", peer=1, text="rank 1 died")
    start, end = event("start", descriptors=FEW), event("end", 9.0, descriptors=FEW)
    events = {
        "launcher": [start, end],
        "rank0": [start, event("begin", 2.0), *of_rank_0, end],
        "rank1": [start, *[event("fault", 2.5)] * struck],
        "rank2": [start, died, end],
    }
    return judge(plan, events, set(late), [])


def test_a_good_job_is_good():
    error = event("error", 3.5, kind="AbortedError", peer=1, text="")
    found = verdict(error, event("after", kind="CommunicatorError", text="", seconds=0.1))
    assert found.good
    assert found.raised_s == [1.0, 0.5]


def test_the_victim_may_be_named_in_words_alone():
    assert verdict(event("error", kind="BootstrapError", peer=None, text="no word from ranks 0 and 1")).good
    assert verdict(event("error", kind="BootstrapError", peer=None, text="no word from rank 10")).blame


@pytest.mark.parametrize(
    ("what", "events", "more"),
    [
        ("blame", [event("error", kind="PeerDiedError", peer=2, text="rank 2 died, not rank 1")], {}),
        ("blame", [event("error", kind="PeerDiedError", peer=1, text="")], {"struck": False}),
        (
            "blame",
            [event("error", kind="PeerTimeoutError", peer=1, text="")],
            {"plan": PLAN._replace(fault="slow")},
        ),
        ("wrong", [event("wrong", text="1 != 2")], {}),
        ("wrong", [event("raised", kind="IndexError", text="")], {}),
        ("wrong", [event("after", kind="", text="", seconds=0.1)], {}),
        ("hangs", [event("after", kind="CommunicatorError", text="", seconds=30.0)], {}),
        ("hangs", [], {"late": (0,)}),
        ("leaks", [event("end", descriptors=["socket:[7]"] * 30)], {}),
    ],
)
def test_what_is_not_as_it_must_be_is_found(what, events, more):
    if what == "leaks":
        logs = {f"rank{rank}": [event("start", descriptors=FEW), *events] for rank in range(3)}
        found = judge(PLAN, {"launcher": [], **logs}, set(), [])
    else:
        found = verdict(*events, **more)
    assert getattr(found, what), found
    assert not found.good
