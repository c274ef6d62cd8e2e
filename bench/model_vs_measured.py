"""The models of all-reduce on GPUs against what was measured: NCCL's own, and schedules over NCCL.

    python bench/model_vs_measured.py [--part all|tables|replays] [--tables FOLDER] [--json] [--fit]
                                      [--out PATH]

NCCL's own, against published tables and graph replays on H200: for each machine, the constants of
``flagcx.cost.nccl`` are fitted on all others, and its own times are predicted from its topology alone.
The fit minimises the mean absolute error of log time, drawn towards ``PRIOR`` where no other machine has
links of a kind. It uses no clock and no chance. The folder of tables holds what nccl-tests printed, one text
file a machine, by the names in ``machines``; beside it, a folder nccl-topology-xml has NCCL's XML of two.

Schedules, against graph replays on H200 (``bench/results/gpu_replays_*_h200.jsonl``): what the model predicts
of each, with the constants as they are: those were chosen by an earlier run, and the file is of a later day.
NCCL's own stands beside them, by its constants as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from report import format_size, write_json_lines

from flagcx.algorithms.candidate import Candidate
from flagcx.cost.model import model_of
from flagcx.cost.nccl import FITTED, NcclAlgorithm, nccl_algorithms, predict_us
from flagcx.errors import TopologyError
from flagcx.selection.device_rules import pieces_on_device
from flagcx.topology import LinkKind, Topology, cluster, files, preset
from flagcx.topology.graph import DeviceKind, Link

#: What is known before any fit: NCCL's constants for the latencies (us), a usual round trip of TCP, and plans
#: nearly taken at their word.
PRIOR: Mapping[str, float] = MappingProxyType(
    {
        "base": 7.0,
        "replayed": 4.0,
        "driven": 3.0,
        "latency_nvlink": 1.0,
        "latency_xgmi": 1.0,
        "latency_pcie": 1.5,
        "latency_network": 5.0,
        "latency_tcp": 30.0,
        "efficiency_nvlink": 0.95,
        "efficiency_xgmi": 0.95,
        "efficiency_pcie": 0.9,
        "efficiency_network": 0.9,
        "efficiency_nvls": 0.85,
        "pipeline": 1.0,
    }
)

SHARED = Path(__file__).resolve().parents[2] / "shared" / "machines"
RESULTS = Path(__file__).resolve().parent / "results"
SCHEDULES = ("ring", "tree", "double_binary_tree", "one_shot", "two_shot")
MIB = 1 << 20
_HELD = (
    "such a folder holds what nccl-tests printed, one text file a machine, such as 8xv100_sxm2_32g.txt, and "
    "has nccl-topology-xml beside it; --part replays needs none"
)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_ROUNDED = {"65K": 64 << 10, "132K": 128 << 10}


@dataclass(frozen=True)
class Points:
    """Measured times of one group of ranks of a machine.

    Attributes:
        ways: What NCCL can choose from there.
        nbytes: Sizes, float64 of shape (points,).
        time_us: Times, of the same shape.
        driven: How many GPUs each process of the benchmark drove, where its table says so; else 1.
        replayed: Whether calls were replayed in a CUDA graph.
    """

    algorithms: tuple[NcclAlgorithm, ...]
    nbytes: np.ndarray
    time_us: np.ndarray
    driven: int = 1
    replayed: bool = False


# -- reading tables


def rows_of(text: str) -> list[tuple[int, float]]:
    """(bytes, us) of every row of nccl-tests' output, first the out-of-place columns."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 8 and words[0].isdigit() and words[2] in ("float", "half"):
            numbers = [word for word in words[4:] if re.fullmatch(r"-?\d+(\.\d+)?", word)]
            numbers = numbers[1:] if numbers[0] == "-1" else numbers
            found.append((int(words[0]), float(numbers[0])))
        elif len(words) == 4 and words[0].isdigit():
            found.append((int(words[0]), float(words[1])))
    return found


def driven_of(text: str) -> int:
    """How many GPUs a process drove, by the table's header: ``8 threads`` or ``-g 8``; 1 if it is silent."""
    match = re.search(r"^#.*?(?:(\d+) threads|-g (\d+))", text, re.MULTILINE)
    return int(match.group(1) or match.group(2)) if match else 1


def bus_rows_of(text: str, size: int) -> list[tuple[int, float]]:
    """(bytes, us) of rows ``| size | busbw | ... |``; sizes are powers of two, some written rounded."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        match = re.fullmatch(r"([\d.]+)([KMG]?)(?:iB)?", cells[0]) if len(cells) > 1 else None
        speed = re.fullmatch(r"([\d.]+)(?:GBps)?", cells[1]) if match else None
        if match and speed:
            nbytes = _ROUNDED.get(cells[0]) or _power(float(match.group(1)) * _UNITS[match.group(2)])
            found.append((nbytes, nbytes / (float(speed.group(1)) * 1000) * 2 * (size - 1) / size))
    return found


def _power(nbytes: float) -> int:
    return 1 << round(float(np.log2(nbytes)))


def medians(rows: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Each size once, with the median of its times."""
    sizes = sorted({nbytes for nbytes, _ in rows})
    times = [float(np.median([t for nbytes, t in rows if nbytes == size])) for size in sizes]
    return np.array(sizes, np.float64), np.array(times)


# -- the machines


def machines(folder: Path) -> dict[str, list[Points]]:
    """Each machine's points, by its name."""
    h100, a100 = preset("dgx-h100"), preset("dgx-a100")
    xml = folder.parent / "nccl-topology-xml"
    simple: dict[str, tuple[str, Callable[[], Topology]]] = {
        "V100 SXM2 x 8": ("8xv100_sxm2_32g", lambda: preset("dgx-1v")),
        "A100 PCIe x 8": ("8xa100_pcie_40g", lambda: _without_nvlink(preset("8xa100-pcie"))),
        "RTX 4090 x 8": ("8x4090_epyc_fast", lambda: _without_nvlink(preset("8xa100-pcie"))),
        "A100 SXM x 8": ("8xa100_sxm_80g_nvswitch", lambda: a100),
        "RTX 3090 x 32, IB": (
            "4node_32x3090_ib56",
            lambda: cluster(files.read(xml / "8x3090_switch_ib.xml"), 4),
        ),
        "H100 x 16, NDR": ("2node_16xh100_ndr", lambda: cluster(h100, 2)),
        "H100 x 16, TCPXO": ("2node_16xh100_gcp_a3mega_tcpxo", lambda: _slower_nics(cluster(h100, 2), 25.0)),
        "H200 x 16, RoCE": ("2node_16xh200_roce", lambda: cluster(preset("dgx-h200"), 2)),
        "H100 x 96, IB": ("12node_96xh100_ib_coreweave", lambda: cluster(h100, 12)),
    }
    texts = {name: (folder / f"{file}.txt").read_text() for name, (file, _) in simple.items()}
    found = {
        name: [
            replace(
                _points(make(), rows_of(texts[name]), rdma="TCP" not in texts[name]),
                driven=driven_of(texts[name]),
            )
        ]
        for name, (_, make) in simple.items()
    }
    for name, file, machine in (
        ("A100 Azure x 8", "8xa100_azure_ndv4", a100),
        ("H100 Azure x 8", "8xh100_azure_ndv5", h100),
        ("H200 x 8", "8xh200_sxm_nvls", preset("dgx-h200")),
    ):
        found[name] = [_points(machine, bus_rows_of((folder / f"{file}.txt").read_text(), 8))]
    found["H200 x 8"] += _by_count((folder / "h200_by_gpu_count_8gib.txt").read_text())
    found["MI300X"] = _mi300x(folder, files.read(xml / "amd-rccl" / "topo_8p_940.xml"))
    found["H200 x 4, replays"] = [
        replace(_points(preset("dgx-h200"), rows, range(ranks), nvls=False), replayed=True)
        for ranks, rows in _native_replays(RESULTS / "gpu_replays_4_h200.jsonl")
    ]
    return found


def read_tables(folder: Path) -> dict[str, list[Points]]:
    """``machines``, with errors that say what the folder must hold.

    Raises:
        FileNotFoundError: The folder, or one of its files, is not there.
        TopologyError: NCCL's XML beside it cannot be read.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder of tables at {folder}; name one with --tables: {_HELD}")
    try:
        return machines(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} lacks {Path(error.filename).name}: {_HELD}") from None


def _native_replays(path: Path) -> Iterator[tuple[int, list[tuple[int, float]]]]:
    """The bare calls of NCCL for each number of ranks."""
    rows = [row for row in replay_rows([path]) if row["library"] == "NCCL" and row["dtype"] == "float32"]
    for ranks in sorted({row["ranks"] for row in rows}):
        yield ranks, [(row["nbytes"], row["replay_us"]) for row in rows if row["ranks"] == ranks]


def _points(
    machine: Topology, rows: Sequence[tuple[int, float]], gpus=None, nvls: bool = True, rdma: bool = True
) -> Points:
    return Points(nccl_algorithms(machine, gpus, nvls=nvls, rdma=rdma), *medians(rows))


def _by_count(text: str) -> list[Points]:
    machine, found = preset("dgx-h200"), []
    for line in text.splitlines():
        match = re.fullmatch(r"\|\s*(\d)\s*\|\s*\w+\s*\|\s*([\d.]+)GBps\s*\|\s*([\d.]+)GBps.*", line)
        if match:
            size = int(match.group(1))
            for speed, nvls in ((match.group(2), True), (match.group(3), False)):
                time_us = (8 << 30) / (float(speed) * 1000) * 2 * (size - 1) / size
                found.append(_points(machine, [(8 << 30, time_us)], range(size), nvls))
    return found


def _mi300x(folder: Path, machine: Topology) -> list[Points]:
    gpus = [gpu.index for gpu in machine.gpus]
    found = []
    for size in (2, 4):
        text = (folder / f"{size}xmi300x_rccl_vs_quickreduce_us.txt").read_text()
        cells = [[c.strip() for c in line.strip("|\n ").split("|")] for line in text.splitlines()]
        rows = [
            (int(c[0][:-1]) * _UNITS[c[0][-1]], float(c[1])) for c in cells if re.fullmatch(r"\d+[KMG]", c[0])
        ]
        found.append(_points(machine, rows, gpus[:size]))
    for match in re.finditer(
        r"(\d+) GPUs busbw ([\d.]+)", (folder / "mi300x_partial_node_4gib.txt").read_text()
    ):
        size = int(match.group(1))
        time_us = (4 << 30) / (float(match.group(2)) * 1000) * 2 * (size - 1) / size
        found.append(_points(machine, [(4 << 30, time_us)], gpus[:size]))
    return found


def _without_nvlink(machine: Topology) -> Topology:
    links = [link for link in machine.links if link.kind is not LinkKind.NVLINK]
    return Topology(machine.devices(), links, name=machine.name)


def _slower_nics(machine: Topology, gb_per_s: float) -> Topology:
    nics = {device.id for device in machine.devices(DeviceKind.NIC)}

    def slower(link: Link) -> Link:
        outside = link.kind is LinkKind.NETWORK and (link.a in nics or link.b in nics)
        return replace(link, bandwidth_gb_per_s=gb_per_s) if outside else link

    return Topology(machine.devices(), map(slower, machine.links), name=machine.name)


# -- fitting


def fit(points: Mapping[str, Sequence[Points]], pull: float = 0.02) -> dict[str, float]:
    """Constants of least mean absolute log error, each machine counting alike, drawn towards the prior.

    Pattern search, one constant after the other in factors that shrink: deterministic, and content with the
    kinks that a least over several ways has.
    """
    names = list(PRIOR)
    start = np.log(list(PRIOR.values()))

    def loss(logs: np.ndarray) -> float:
        constants = dict(zip(names, np.exp(logs), strict=True))
        errors = [
            np.mean(np.concatenate([np.abs(log_errors(part, constants)) for part in parts]))
            for parts in points.values()
        ]
        return float(np.mean(errors) + pull * np.mean(np.abs(logs - start)))

    best, value, stride = start.copy(), loss(start), 0.5
    while stride > 0.01:
        improved = False
        for place in range(len(names)):
            for change in (stride, -stride):
                tried = best.copy()
                tried[place] += change
                if (found := loss(tried)) < value - 1e-9:
                    best, value, improved = tried, found, True
        stride *= 1.0 if improved else 0.5
    return {name: float(number) for name, number in zip(names, np.exp(best), strict=True)}


def log_errors(points: Points, constants: Mapping[str, float]) -> np.ndarray:
    """log(predicted / measured) of each point."""
    predicted = predict_us(points.algorithms, points.nbytes, constants, points.driven, points.replayed)
    return np.log(predicted / points.time_us)


def relative_errors(
    points: Sequence[Points], constants: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Sizes, and |predicted / measured - 1| of each."""
    errors = [np.abs(np.expm1(log_errors(part, constants))) for part in points]
    return np.concatenate([part.nbytes for part in points]), np.concatenate(errors)


def leave_one_out(points: Mapping[str, Sequence[Points]]) -> list[dict]:
    """For each machine its errors with constants fitted on the others."""
    table = []
    for name, own in points.items():
        constants = fit({other: parts for other, parts in points.items() if other != name})
        nbytes, errors = relative_errors(own, constants)
        bias = np.concatenate([log_errors(part, constants) for part in own])
        row: dict = {"machine": name}
        for word, chosen in (("large", nbytes >= MIB), ("small", nbytes < MIB)):
            row[word] = float(np.median(errors[chosen])) if chosen.any() else None
            row[f"{word}_points"] = int(chosen.sum())
            row[f"{word}_bias"] = float(np.exp(np.median(bias[chosen]))) if chosen.any() else None
            row[f"{word}_errors"] = errors[chosen].tolist()
        table.append(row)
    return table


def summary(table: Sequence[dict]) -> dict[str, float]:
    """Medians over machines, and over all points of all of them."""
    found = {}
    for word in ("large", "small"):
        own = [row[word] for row in table if row[word] is not None]
        found[f"{word}_median_of_machines"] = float(np.median(own))
        found[f"{word}_median_of_points"] = float(
            np.median(np.concatenate([row[f"{word}_errors"] for row in table]))
        )
    return found


# -- graph replays on several GPUs


def replay_rows(paths: Sequence[Path]) -> list[dict]:
    """The rows of ``bench/gpu_replays.py`` that have a time, of ranks with a GPU each."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [row for row in rows if "replay_us" in row and row["ranks"] <= row["run"]["gpus"]]


def against_replays(rows: Sequence[dict]) -> list[dict]:
    """Predicted over measured, for NCCL's own and for each schedule of sends and receives.

    All ranks are behind NVSwitches, as on a DGX H200. Rows that a kernel in the peers' memory carried, as
    they say themselves, are left out; in files from before they did, all named algorithms were schedules.
    """
    machine = preset("dgx-h200")
    models = {ranks: model_of(machine, ranks) for ranks in {row["ranks"] for row in rows}}
    table = []
    for row in rows:
        ranks, nbytes = row["ranks"], row["nbytes"]
        name = row["library"].removeprefix("flagcx ").removesuffix(" over NCCL")
        if row.get("protocol"):
            continue
        if name in SCHEDULES:
            pieces = pieces_on_device("allreduce", name, nbytes)
            predicted = models[ranks].timing("allreduce", Candidate(name, pieces), nbytes).time_us
        elif name == "NCCL":
            found = nccl_algorithms(machine, range(ranks), nvls=False)
            predicted = float(predict_us(found, np.array([nbytes], float), FITTED, replayed=True)[0])
        else:
            continue
        table.append(
            {
                "name": name, "ranks": ranks, "dtype": row["dtype"], "nbytes": nbytes,
                "measured_us": row["replay_us"], "predicted_us": round(predicted, 2),
                "ratio": predicted / row["replay_us"],
            }
        )  # fmt: skip
    return table


def replay_summary(table: Sequence[dict]) -> dict[str, float]:
    """The median error from 1 MiB up and below, and how much of them is within a quarter."""
    found = {}
    for word, chosen in (
        ("large", [abs(row["ratio"] - 1) for row in table if row["nbytes"] >= MIB]),
        ("small", [abs(row["ratio"] - 1) for row in table if row["nbytes"] < MIB]),
    ):
        if chosen:
            found[f"replays_{word}_median"] = float(np.median(chosen))
            found[f"replays_{word}_within_25_percent"] = float(np.mean(np.array(chosen) < 0.25))
            found[f"replays_{word}_worst"] = float(max(chosen))
    return found


def replay_lines(table: Sequence[dict]) -> Iterator[str]:
    """One line for each number of ranks, dtype and name: the ratios by size."""
    sizes = sorted({row["nbytes"] for row in table})
    yield f"{'predicted / measured':34} " + " ".join(f"{format_size(size):>8}" for size in sizes)
    for key in dict.fromkeys((row["ranks"], row["dtype"], row["name"]) for row in table):
        own = {
            row["nbytes"]: row["ratio"] for row in table if (row["ranks"], row["dtype"], row["name"]) == key
        }
        cells = (f"{own[size]:8.2f}" if size in own else " " * 8 for size in sizes)
        yield f"{key[0]} ranks, {key[1]:8} {key[2]:18} {' '.join(cells)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="all", choices=["all", "tables", "replays"])
    parser.add_argument("--tables", type=Path, default=SHARED / "allreduce-tables")
    parser.add_argument(
        "--replays", type=Path, nargs="*", default=sorted(RESULTS.glob("gpu_replays_*_h200.jsonl"))
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="append the results there, one machine a line"
    )
    parser.add_argument("--fit", action="store_true", help="fit on all machines and print the constants")
    given = parser.parse_args(arguments)
    points: dict[str, list[Points]] = {}
    if given.fit or given.part in ("all", "tables"):
        try:
            points = read_tables(given.tables)
        except (OSError, TopologyError) as error:
            print(error, file=sys.stderr)
            return 1
    if given.fit:
        print(json.dumps(fit(points), indent=1))
        return 0
    table = leave_one_out(points)
    replayed = against_replays(replay_rows(given.replays)) if given.part in ("all", "replays") else []
    found = {**(summary(table) if table else {}), **replay_summary(replayed)}
    if given.out:
        plain = ({k: v for k, v in row.items() if not k.endswith("_errors")} for row in table)
        write_json_lines(given.out, [*plain, *replayed, found])
    if given.json:
        print(json.dumps({"machines": table, "replays": replayed, "summary": found}))
        return 0
    print("\n".join([*(table_lines(table) if table else ()), *(replay_lines(replayed) if replayed else ())]))
    for name, value in found.items():
        print(f"{name}: {value:.1%}")
    return 0


def table_lines(table: Sequence[dict]) -> Iterator[str]:
    """The errors of each machine."""
    yield "median |predicted / measured - 1| of each machine, constants fitted on all the others"
    yield f"{'machine':20} {'>= 1 MiB':>9} {'bias':>6} {'points':>6} {'< 1 MiB':>9} {'bias':>6} {'points':>6}"
    for row in table:
        cells = [
            f"{row[w]:9.0%} {row[f'{w}_bias']:6.2f} {row[f'{w}_points']:6d}"
            if row[w] is not None
            else " " * 23
            for w in ("large", "small")
        ]
        yield f"{row['machine']:20} {' '.join(cells)}"
    yield ""


if __name__ == "__main__":
    raise SystemExit(main())
