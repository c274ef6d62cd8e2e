"""The soak: a short one is flat and right, and one that is not is told."""

from __future__ import annotations

import gc
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


def test_the_tail_is_parted_into_garbage_collection_the_kernel_and_our_own():
    ms = 10**6
    mine = {"slow": [(0, 5 * ms), (20 * ms, 23 * ms)], "lost": [(0, 5 * ms, 100.0)], "collected": []}
    peer = {  # the first slow call is late because of what the peer did before it came to it
        "lost": [(-2 * ms, 2 * ms, 3000.0), (23 * ms, 24 * ms, 900.0)],
        "collected": [(3 * ms, 4 * ms), (3 * ms + ms // 2, 4 * ms + ms // 2), (21 * ms, 30 * ms)],
    }
    found = soak.tail([mine, peer])
    assert found["slow_calls"] == 2
    assert found["part_of_garbage_collection"] == pytest.approx((1.5 + 2) / 8, abs=1e-3)
    assert found["part_without_a_core"] == pytest.approx(1.5 / 8, abs=1e-3)
    assert found["own_median_us"] == 2000


def test_a_rank_notes_when_it_collects_garbage(monkeypatch):
    monkeypatch.setattr(soak, "LEAST_PAUSE_US", -1.0)
    pauses = soak.Pauses()
    gc.collect()
    pauses.look()
    pauses.close()
    ((begun, ended),), ((seen, now, _),) = pauses.collected, pauses.lost
    assert seen < begun < ended < now


@pytest.mark.slow
def test_a_short_soak_is_flat_and_right(tmp_path):
    out = tmp_path / "soak.jsonl"
    done = flagcx_run("-n", "3", str(REPOSITORY / "bench" / "soak.py"), "--calls", "1500", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["calls"], line["wrong"], line["ranks"]) == (1500, 0, 3)
    assert line["versions"]["python"] == sys.version.split()[0]
