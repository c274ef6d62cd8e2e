"""The elastic training: ranks are killed at random while it runs, and it ends with the right bits."""

import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.launching import running

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic_training.py"
RANKS, STEPS = 4, 300


def trained(*options, kills=(), arguments=()):
    """Runs the training, and kills ranks when rank 0 says that it has come to certain steps.

    Args:
        options: Those of ``flagcx run``.
        kills: The steps, and the rank to kill at each.
        arguments: Those of the script.

    Returns:
        What it printed, and the parameters that it ended with, which all ranks must agree on.
    """
    left, pids, text = sorted(kills), {}, ""
    program = ["-n", str(RANKS), *options, str(SCRIPT), "--steps", str(STEPS), *arguments]
    with running(*program, stderr=subprocess.STDOUT) as job:
        for line in job.stdout:
            text += line
            if found := re.match(r"\[(\d)\] pid (\d+)", line):
                pids[int(found[1])] = int(found[2])
            step = re.match(r"\[\d\] step (\d+)", line)
            while step and left and left[0][0] <= int(step[1]):
                os.kill(pids[left.pop(0)[1]], signal.SIGKILL)
        assert job.wait(30) == 0, text
    assert not left, text
    ends = re.findall(r"accuracy (\S+), parameters (\w+)", text)
    assert len(set(ends)) == 1, text
    assert float(ends[0][0]) > 0.9, text
    return text, ends[0][1]


@pytest.fixture(scope="module")
def undisturbed():
    return trained()[1]


def some_kills(seed, count):
    """Steps at which to kill, not two at once, and a rank for each."""
    chance = random.Random(seed)
    steps = chance.sample(range(20, STEPS - 60, 20), count)
    return [(step, rank) for step, rank in zip(steps, chance.sample(range(RANKS), count), strict=True)]


def test_ranks_that_are_started_again_change_no_bit(undisturbed, tmp_path):
    kills = some_kills(0, 2)
    kept = ("--checkpoint", str(tmp_path / "checkpoint.npz"))
    text, parameters = trained("--elastic", kills=kills, arguments=kept)
    assert text.count("is started again") == 2, text
    assert text.count(f"on {RANKS} ranks") == 3, text
    assert parameters == undisturbed, text


@pytest.mark.exhaustive
def test_a_training_without_lost_ranks_is_one_that_they_left_by_plan():
    kills = some_kills(1, 2)
    text, parameters = trained("--elastic", "--max-restarts", "0", "--min-ranks", "2", kills=kills)
    begun = [int(step) for step in re.findall(r"from step (\d+) on", text)]
    assert begun[0] == 0 and len(begun) == 3, text
    told = [f"{rank}:{step}" for (_, rank), step in zip(sorted(kills), begun[1:], strict=True)]
    planned, same = trained(arguments=[word for one in told for word in ("--leave", one)])
    assert parameters == same, (text, planned)
