"""The closed forms of NCCL's all-reduce, and the bench that fits them: on tables of our own making."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from flagcx.cost.nccl import FITTED, nccl_algorithms, predict_us
from flagcx.topology import cluster, preset

ROOT = Path(__file__).parents[2]
SIZES = np.array([1 << power for power in range(10, 31, 2)], np.float64)
NCCL_TESTS = """
# benchmark: all_reduce_perf, 8 threads x 1 GPU
#       size         count      type   redop     time   algbw   busbw  error
          64            16     float     sum    55.57    0.00    0.00    N/A
          64            16     float     sum    65.57    0.00    0.00    N/A
  1073741824  268435456  float  sum  -1  4389.5  244.62  458.65  0  4331.1  247.92  464.84  0
       32768   43.83    0.75    1.31
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import model_vs_measured

    yield model_vs_measured
    sys.modules.pop("model_vs_measured", None)


def test_a_ring_is_latency_bytes_and_a_pipeline(bench):
    (ring,) = nccl_algorithms(preset("dgx-a100"))
    constants = {
        **bench.PRIOR,
        "base": 10.0,
        "latency_nvlink": 2.0,
        "efficiency_nvlink": 0.5,
        "pipeline": 0.0,
    }
    speed = 240.0 * 8 / 14 * 0.5
    expected = 10.0 + 14 * 2.0 + SIZES / speed / 1000
    assert predict_us([ring], SIZES, constants) == pytest.approx(expected)
    driven = predict_us([ring], SIZES, constants, driven=8)
    assert driven - expected == pytest.approx(7 * bench.PRIOR["driven"] + 0 * SIZES)


def test_in_switch_reduction_is_for_hopper_and_more_than_four():
    names = {one.name for one in nccl_algorithms(preset("dgx-h100"))}
    assert names == {"ring", "nvls"}
    assert {one.name for one in nccl_algorithms(preset("dgx-h100"), range(4))} == {"ring"}
    assert {one.name for one in nccl_algorithms(preset("dgx-h100"), nvls=False)} == {"ring"}
    two = cluster(preset("dgx-h100"), 2)
    assert {one.name for one in nccl_algorithms(two)} == {"ring", "levels", "nvls levels"}
    assert dict(nccl_algorithms(two, rdma=False)[0].steps).keys() == {"nvlink", "tcp"}


def test_the_fitted_constants_are_those_of_the_prior(bench):
    assert FITTED.keys() == bench.PRIOR.keys()


def test_tables_are_read(bench):
    rows = bench.rows_of(NCCL_TESTS)
    assert rows == [(64, 55.57), (64, 65.57), (1 << 30, 4389.5), (32768, 43.83)]
    sizes, times = bench.medians(rows)
    assert sizes.tolist() == [64, 32768, 1 << 30] and times[0] == pytest.approx(60.57)
    assert bench.driven_of(NCCL_TESTS) == 8 and bench.driven_of("# gpus: 8") == 1
    (small, large) = bench.bus_rows_of(
        "| size | busbw |\n| 65K | 2.70 | \n|   1GiB | 463.58GBps | 1GBps |", 8
    )
    assert small == (64 << 10, pytest.approx((64 << 10) / 2700 * 1.75))
    assert large == (1 << 30, pytest.approx((1 << 30) / 463580 * 1.75))


def test_a_fit_finds_the_constants_that_made_the_data(bench):
    truth = {**bench.PRIOR, "base": 33.0, "latency_nvlink": 2.2, "efficiency_nvlink": 0.8}
    points = {}
    for name in ("dgx-a100", "dgx-1v", "dgx-2"):
        found = nccl_algorithms(preset(name))
        points[name] = [bench.Points(found, SIZES, predict_us(found, SIZES, truth))]
    fitted = bench.fit(points, pull=0.0)
    for part in points.values():
        assert np.abs(bench.log_errors(part[0], fitted)).max() < 0.05
    table = bench.leave_one_out(points)
    assert bench.summary(table)["large_median_of_points"] < 0.05


def test_a_machine_unlike_the_others_is_told_apart(bench):
    points = {}
    for name in ("dgx-a100", "dgx-1v", "dgx-2", "dgx-h100", "hgx-b200"):
        slow = 3.0 if name == "dgx-2" else 1.0
        found = nccl_algorithms(preset(name), nvls=False)
        points[name] = [bench.Points(found, SIZES, slow * predict_us(found, SIZES, bench.PRIOR))]
    errors = {row["machine"]: row["large"] for row in bench.leave_one_out(points)}
    assert errors["dgx-2"] > 0.5 and errors["dgx-a100"] < 0.1


@pytest.mark.exhaustive
def test_published_tables_are_predicted_within_the_goal(bench):
    tables = ROOT.parent / "shared" / "machines" / "allreduce-tables"
    if not tables.is_dir():
        pytest.skip("the published tables are not beside this checkout; the tests above use our own")
    table = bench.leave_one_out(bench.machines(tables))
    medians = bench.summary(table)
    assert medians["large_median_of_machines"] < 0.25 and medians["large_median_of_points"] < 0.25
    assert medians["small_median_of_machines"] < 0.40 and medians["small_median_of_points"] < 0.40
