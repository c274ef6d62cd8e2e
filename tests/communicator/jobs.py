"""Jobs whose ranks are told apart from outside, so that a test can kill, stop and question them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from flagcx.bootstrap.store import StoreServer
from tests.bootstrap.processes import launched_environment, spawned

PRELUDE = """
import numpy as np
import flagcx as fc

def outcome(call):
    "What a call comes to: its error's name and text, and the seconds it took."
    begin = time.monotonic()
    try:
        call()
    except fc.FlagcxError as error:
        culprit = getattr(error, "peer", None)
        tell(type(error).__name__, culprit, round(time.monotonic() - begin, 2), "|", error)
    else:
        tell("fine", None, round(time.monotonic() - begin, 2), "|")
"""


@contextmanager
def job(size: int, body: str, **variables: str) -> Iterator[list[subprocess.Popen]]:
    """Starts ``size`` ranks that run ``body``; it has ``fc``, ``np``, ``tell`` and ``outcome``.

    Args:
        size: Number of ranks.
        body: Python source.
        variables: Environment variables for all ranks.
    """
    before = shared_memory_files()
    with StoreServer(size) as server:
        environs = [launched_environment(server, rank) | variables for rank in range(size)]
        with spawned(PRELUDE + body, *environs) as processes:
            yield processes
    assert shared_memory_files() == before, "a job left files in /dev/shm"


def shared_memory_files() -> set[str]:
    """The names in /dev/shm that are ours."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("flagcx")}


def outcome_of(line: str) -> tuple[str, int | None, float, str]:
    """Takes apart what ``outcome`` told: error, culprit, seconds, text."""
    head, text = line.split(" |", 1)
    name, culprit, seconds = head.split()
    return name, None if culprit == "None" else int(culprit), float(seconds), text.strip()
