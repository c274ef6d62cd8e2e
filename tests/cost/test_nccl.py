"""The forms of NCCL's all-reduce, and the bench that fits them: on tables made here and published ones."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flagcx.cost import nccl
from flagcx.cost.nccl import collective_algorithms, fabric_of, nccl_algorithms
from flagcx.cost.nccl_law import FITTED, SPREAD, kind_of, predict_us
from flagcx.topology import DeviceKind, Topology, cluster, preset

ROOT = Path(__file__).parents[2]
SIZES = np.array([1 << power for power in range(10, 31, 2)], np.float64)
NCCL_TESTS = """
# benchmark: all_reduce_perf, 8 threads x 1 GPU
#       size         count      type   redop     time   algbw   busbw  error
          64            16     float     sum    55.57    0.00    0.00    N/A
          64            16     float     sum    65.57    0.00    0.00    N/A
  1073741824  268435456  float  sum  -1  4389.5  244.62  458.65  0  4331.1  247.92  464.84  0
        1000           250     float     sum    43.83    0.75    1.31    N/A
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import model_vs_measured

    yield model_vs_measured
    for name in ("model_vs_measured", "nccl_published"):
        sys.modules.pop(name, None)


def renamed(machine: Topology, name: str) -> Topology:
    """The machine with NICs of that name."""
    devices = [
        replace(device, name=name, ports=tuple(replace(port, name=name) for port in device.ports))
        if device.kind is DeviceKind.NIC
        else device
        for device in machine.devices()
    ]
    return Topology(devices, machine.links, name=machine.name)


def test_a_ring_is_latency_bytes_and_a_pipeline(bench):
    (ring,) = nccl_algorithms(preset("dgx-a100"))
    constants = {**bench.PRIOR, "base": 10.0, "latency_nvlink": 2.0, "efficiency_nvlink": 0.5}
    alone = {**constants, "share_ll": 1e-9, "share_ll128": 1e-9, "slow_simple": 3.0, "pipeline": 0.0}
    moving = SIZES / (240.0 * 8 / 14 * 0.5) / 1000
    expected = 10.0 + 14 * 6.0 + moving
    assert predict_us([ring], SIZES, alone) == pytest.approx(expected)
    piped = predict_us([ring], SIZES, {**alone, "pipeline": 2.0})
    assert piped == pytest.approx(expected + 2 * np.sqrt(14 * 6.0 * moving))
    assert predict_us([ring], SIZES[:1], constants) < expected[0] - 30, "LL is quicker where bytes are few"
    driven = predict_us([ring], SIZES, {**alone, "launch": 20.0}, driven=8)
    assert driven == pytest.approx(np.maximum(expected, 160.0))
    threaded = predict_us([ring], SIZES, {**alone, "launch": 0.0, "threads": 5.0}, threads=8)
    assert threaded == pytest.approx(expected + 40.0)
    replayed = predict_us([ring], SIZES, {**alone, "launch": 20.0}, driven=8, replayed=True)
    assert replayed == pytest.approx(expected - 10.0 + alone["replayed"])


def test_in_switch_reduction_is_for_hopper_and_more_than_four():
    names = {one.name for one in nccl_algorithms(preset("dgx-h100"))}
    assert names == {"ring", "nvls"}
    assert {one.name for one in nccl_algorithms(preset("dgx-h100"), range(4))} == {"ring"}
    assert {one.name for one in nccl_algorithms(preset("dgx-h100"), nvls=False)} == {"ring"}
    two = cluster(preset("dgx-h100"), 2)
    assert {one.name for one in nccl_algorithms(two)} == {"ring", "levels", "nvls levels"}
    assert dict(nccl_algorithms(two, fabric="tcp")[0].steps).keys() == {"nvlink", "tcp"}
    by_nic = nccl_algorithms(two, fabric="tcpxo")
    assert dict(by_nic[0].steps).keys() == {"nvlink", "tcp"}
    assert {one.name: one.bounds[-1][0] for one in by_nic}["nvls levels"] == "tcpxo"


def test_networks_are_told_by_their_nics():
    plain = cluster(preset("dgx-h100"), 2)
    assert fabric_of(plain) == "network"
    for machine, hop in (("dgx-h100", "efa"), ("dgx-a100", "efa_1")):
        amazon = renamed(cluster(preset(machine), 2), "rdmap79s0")
        assert fabric_of(amazon) == "efa"
        assert dict(nccl_algorithms(amazon)[0].steps).keys() == {"nvlink", hop}


def test_gpus_on_pcie_reach_each_other_or_go_through_memory():
    machine = preset("4xpcie")  # of compute capability 8.9
    (ring,) = nccl_algorithms(machine)
    assert ring.steps == (("host", 6.0),) and ring.bounds[0][0] == "host" and kind_of([ring]) == "pcie"
    (straight,) = nccl_algorithms(machine, peers=True)
    assert straight.steps == (("pcie", 6.0),) and straight.bounds == (("pcie", ring.bounds[0][1]),)


def test_native_is_known_for_any_number_of_ranks():
    many = cluster(preset("dgx-h100"), 100)
    found = nccl.predict("allreduce", 1 << 30, 800, many)
    few = nccl.predict("allreduce", 1 << 30, 64, many)
    assert found is not None and few is not None and few.time_us < found.time_us < 2 * few.time_us
    assert found.steps == 14 + 14 and found.spread == SPREAD["network", True]
    assert found.plain_us is not None and found.plain_us > found.time_us


def test_other_collectives_have_the_links_of_the_all_reduce():
    machine = preset("dgx-a100")
    (ring,) = nccl_algorithms(machine)
    for name in ("allgather", "reduce_scatter"):
        (half,) = collective_algorithms(name, machine)
        assert half.steps == (("nvlink", 7.0),) and half.bounds[0][1] == pytest.approx(2 * ring.bounds[0][1])
    for name in ("broadcast", "reduce"):
        (chain,) = collective_algorithms(name, machine)
        assert chain.steps == (("nvlink", 7.0),) and chain.bounds == (("nvlink", pytest.approx(240.0)),)
    (every,) = collective_algorithms("alltoall", machine)
    assert every.steps == (("nvlink", 1.0),) and every.bounds == (("nvlink", pytest.approx(240.0 * 8 / 7)),)
    (own,) = collective_algorithms("scatter", machine, root=3)
    assert own.bounds == every.bounds, "the root's links carry what each rank's do in an alltoall"
    (shift,) = collective_algorithms("sendrecv", machine)
    assert shift.bounds == (("nvlink", pytest.approx(240.0)),)


def test_an_alltoall_between_hosts_waits_for_the_nics():
    for hosts in (2, 40):
        machine = cluster(preset("dgx-h100"), hosts)
        (found,) = collective_algorithms("alltoall", machine)
        leaving = (
            8 * (hosts - 1) / (8 * hosts)
        )  # of the message; a GPU has a NIC of 50 GB/s behind PCIe of 48
        assert found.steps == (("network", 1.0),) and found.bounds[0][1] == pytest.approx(48.0 / leaving)
        one = nccl.predict("alltoall", 1 << 20, 8 * hosts, machine)
        assert one is not None and one.sent_nbytes == (8 * hosts - 1) << 20


def test_a_chain_through_the_memory_of_an_old_host_carries_half_of_the_bytes():
    old = Topology(
        [
            replace(d, attributes=(("vendor", "GenuineIntel"), ("modelid", "85"))) if d.id == "cpu0" else d
            for d in preset("4xpcie").devices()
        ],
        preset("4xpcie").links,
    )
    (ring,) = nccl_algorithms(old, [0, 1])
    (chain,) = collective_algorithms("broadcast", old, [0, 1])
    assert ring.bounds[0][0] == chain.bounds[0][0] == "host_old"
    assert chain.bounds[0][1] == pytest.approx(2 * ring.bounds[0][1])


def test_hosts_behind_the_same_nvswitches_are_one():
    rack = preset("gb200-nvl72")
    found = {one.name: one for one in nccl_algorithms(rack)}
    assert found["ring"].steps == (("nvlink", 142.0),) and found["nvls"].bounds[0][0] == "nvls_100"
    whole = nccl.predict("allreduce", 8 << 30, 72, rack)
    assert whole is not None and whole.spread == SPREAD["fabric", True]
    assert 15_000 < whole.time_us < 30_000  # 20,299 us: coreweave/nccl-tests pull request 43
    two = nccl.predict("allreduce", 8 << 30, 8, rack, [*range(4), *range(68, 72)])
    assert two is not None and two.time_us < whole.time_us


def test_few_hosts_stand_for_many():
    """The plan of hosts of one build is that of all, whatever their number."""
    from flagcx.topology import nccl_bandwidth

    machine = cluster(preset("dgx-a100"), 12, hosts_per_leaf=4)
    short = nccl_bandwidth.nccl_bandwidth(machine)
    nccl_bandwidth._MANY_HOSTS, kept = 99, nccl_bandwidth._MANY_HOSTS
    try:
        assert nccl_bandwidth.nccl_bandwidth(machine) == pytest.approx(short)
    finally:
        nccl_bandwidth._MANY_HOSTS = kept


def test_the_fitted_constants_are_those_of_the_prior(bench):
    assert FITTED.keys() == bench.PRIOR.keys()


def test_tables_are_read(bench):
    import nccl_published

    rows = nccl_published.rows_of(NCCL_TESTS)
    assert rows == [(64, 55.57), (64, 65.57), (1 << 30, 4389.5), (1000, 43.83)]
    assert nccl_published.medians(rows) == [(6, pytest.approx(60.57)), (30, 4389.5)]
    own = {"sm": 80, "cpu": "amd", "sockets": 2, "switches": 2, "gpus": 2, "pairs": 12, "gt": 16.0}
    machine = nccl_published.machine_of(own)
    assert machine["nvlink_peers"] == preset("8xa100-pcie")["nvlink_peers"]
    lines = nccl_published.PATH.read_text().splitlines()
    assert len(lines) > 60 and all(json.loads(line)["source"] for line in lines)


def made(bench, machines, truth, factors=None, **options):
    """Points of presets by the constants given, each machine with its factor."""
    points = {}
    for name in machines:
        found = nccl_algorithms(preset(name), **options)
        times = (factors or {}).get(name, 1.0) * predict_us(found, SIZES, truth)
        points[name] = [bench.Points(found, SIZES, times)]
    return points


def test_a_fit_finds_the_constants_that_made_the_data(bench):
    truth = {**bench.PRIOR, "base": 33.0, "latency_nvlink": 1.4, "efficiency_nvlink": 0.8}
    fit = bench.Fit(made(bench, ("dgx-a100", "dgx-1v", "dgx-2"), truth))
    assert np.abs(fit.log_errors(truth)).max() < 1e-9, "the fit's arrays say what predict_us says"
    assert np.abs(fit.log_errors(fit.constants(pull=0.0))).max() < 0.05
    table = bench.by_machine(fit, bench.unseen(fit))
    assert bench.summary(table)["large_median_of_points"] < 0.05


def test_a_machine_unlike_the_others_is_told_apart(bench):
    names = ("dgx-a100", "dgx-1v", "dgx-2", "dgx-h100", "hgx-b200")
    fit = bench.Fit(made(bench, names, bench.PRIOR, {"dgx-2": 3.0}, nvls=False))
    rows = {row["machine"]: row for row in bench.by_machine(fit, bench.unseen(fit))}
    assert rows["dgx-2"]["large"] > 0.5 and rows["dgx-a100"]["large"] < 0.1
    assert rows["dgx-2"]["large_covered"] == 0.0 and rows["dgx-2"]["large_worst"] > 2


def test_published_tables_by_the_constants_as_they_are(bench):
    """The fit is what ships: each machine is off by what the table of ``bench/results`` says at most."""
    fit = bench.Fit(bench.tables())
    errors, large = fit.log_errors(FITTED), fit.nbytes >= 1 << 20
    assert np.median(np.abs(np.expm1(errors[large]))) < 0.10
    assert np.median(np.abs(np.expm1(errors[~large]))) < 0.25
    low, high = np.array([SPREAD[key] for key in zip(fit.kind, large, strict=True)]).T
    assert np.mean((np.exp(-errors) >= low) & (np.exp(-errors) <= high)) > 0.8


@pytest.mark.exhaustive
def test_unseen_machines_are_predicted_within_the_goal(bench):
    fit = bench.Fit(bench.tables())
    found = bench.summary(bench.by_machine(fit, bench.unseen(fit, parts=6)))
    assert found["large_median_of_machines"] < 0.20 and found["large_median_of_points"] < 0.20
    assert found["small_median_of_machines"] < 0.35 and found["small_median_of_points"] < 0.35
    assert found["large_covered"] > 0.8 and found["small_covered"] > 0.8
