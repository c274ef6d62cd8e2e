"""Ranks that outnumber the cores lie at the same addresses; the launcher itself stays as it was."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from flagcx._launch.no_aslr import without_aslr

CORES = len(os.sched_getaffinity(0))
PROGRAM = (
    "import ctypes; libc = ctypes.CDLL(None); print(ctypes.cast(libc.puts, ctypes.c_void_p).value, id(None))"
)


def _addresses(ranks: int) -> set[str]:
    told = set()
    for _ in range(4):
        with without_aslr(ranks):
            process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
        told.add(process.communicate()[0])
    return told


def _may_be_changed() -> bool:
    """Whether this place lets a process choose its layout."""
    personality = ctypes.CDLL(None).personality
    before = personality(0xFFFFFFFF)
    allowed = personality(before | 0x0040000) >= 0
    personality(before)
    return allowed


def _randomised() -> bool:
    """Whether programs lie at random addresses here by default."""
    switch = Path("/proc/sys/kernel/randomize_va_space").read_text().strip()
    return switch != "0" and not ctypes.CDLL(None).personality(0xFFFFFFFF) & 0x0040000


def test_crowded_ranks_are_laid_out_alike():
    before = ctypes.CDLL(None).personality(0xFFFFFFFF)
    assert len(_addresses(CORES + 1)) == (1 if _may_be_changed() or not _randomised() else 4)
    assert ctypes.CDLL(None).personality(0xFFFFFFFF) == before


def test_ranks_with_a_core_each_are_left_alone():
    assert len(_addresses(CORES)) == (4 if _randomised() else 1)
