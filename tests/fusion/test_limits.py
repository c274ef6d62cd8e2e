"""What is worth fusing: by the ranks, the cores and the cache, the same on every rank."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from flagcx.fusion.limits import Limits, host_limits, last_cache_nbytes, limits_in_cache

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("ranks", "cache_nbytes", "expected"),
    [
        (2, 8 * MIB, Limits(32 * KIB, 512 * KIB)),
        (2, 33 * MIB, Limits(128 * KIB, 2 * MIB)),
        (16, 300 * MIB, Limits(128 * KIB, 2 * MIB)),
        (4, 300 * MIB, Limits(128 * KIB, 4 * MIB)),
        (100, MIB, Limits(32 * KIB, 512 * KIB)),
    ],
)
def test_the_messages_of_all_ranks_stay_in_the_cache(ranks, cache_nbytes, expected):
    assert limits_in_cache(ranks, cache_nbytes) == expected


def test_where_messages_are_dear_more_is_packed_into_fewer(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    here, crowded = (SimpleNamespace(modelled=True, size=size) for size in (4, 5))
    elsewhere = SimpleNamespace(modelled=False, size=2)
    assert host_limits(crowded) == host_limits(elsewhere) == Limits(512 * KIB, 4 * MIB)
    assert host_limits(here) == limits_in_cache(4, last_cache_nbytes())


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8192K\n", 8 * MIB),
        ("32M", 32 * MIB),
        ("65536", 64 * KIB),
        ("", 8 * MIB),
        ("0K", 8 * MIB),
        ("?", 8 * MIB),
    ],
)
def test_the_size_of_the_cache_is_read_from_the_system(tmp_path, text, nbytes):
    file = tmp_path / "size"
    file.write_text(text)
    assert last_cache_nbytes(file) == nbytes


def test_a_system_that_tells_no_cache_has_a_usual_one(tmp_path):
    assert last_cache_nbytes(tmp_path / "none") == 8 * MIB
