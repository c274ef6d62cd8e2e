"""The soak: a short one is flat and right, and one that is not is told."""

from __future__ import annotations

import json
import sys

import pytest
import soak

from tests.bootstrap.processes import REPOSITORY
from tests.cli.launching import flagcx_run


def samples(resident_kb: list[int], descriptors: int = 0) -> soak.Samples:
    count = len(resident_kb)
    more = [9 + descriptors * (i > count * 3 // 4) for i in range(count)]
    return soak.Samples(list(range(count)), resident_kb, more, [2] * count)


def test_growth_after_the_caches_are_full_is_told_and_a_sawtooth_is_not():
    assert samples([100, 900] + [1000] * 30).grown() == {"resident_kb": 0, "descriptors": 0, "threads": 0}
    assert samples([1000, 2000] * 16).grown()["resident_kb"] == 0
    assert samples([1000 + 10 * i for i in range(33)]).grown()["resident_kb"] > 100
    assert samples([1000] * 33, descriptors=3).grown()["descriptors"] == 3


def test_the_tail_is_parted_into_what_the_kernel_took_and_our_own():
    mine = {"latency_us": [50.0] * 98 + [5000.0, 3000.0], "slow": [(98, 100.0), (99, 2900.0)]}
    peer = {"slow": [(98, 4800.0)]}
    found = soak.tail([mine, peer])
    assert found["slow_calls"] == 2
    assert found["part_without_a_core"] == pytest.approx(7700 / 8000, abs=1e-3)
    assert found["own_median_us"] == 200


@pytest.mark.slow
def test_a_short_soak_is_flat_and_right(tmp_path):
    out = tmp_path / "soak.jsonl"
    done = flagcx_run("-n", "3", str(REPOSITORY / "bench" / "soak.py"), "--calls", "1500", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["calls"], line["wrong"], line["ranks"]) == (1500, 0, 3)
    assert line["versions"]["python"] == sys.version.split()[0]
