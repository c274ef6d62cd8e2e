"""Draws stored results: all-reduces of processes on a host, and of GPUs, beside other libraries.

    python bench/plot.py examples/pictures/allreduce.png

Left: ``bench/results/host_allreduce_xeon_2_cores.jsonl``, which ``python bench/compare_host.py`` measures.
Right: ``bench/results/gpu_replays_4_h200.jsonl``, which ``python bench/several_gpus.py`` measures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcx.cli.bench_plot import BenchLine, plot_lines
from flagcx.cli.bench_table import bus_share
from flagcx.figure import new_figure, save_picture

RESULTS = Path(__file__).resolve().parent / "results"
HOST, GPU = "host_allreduce_xeon_2_cores.jsonl", "gpu_replays_4_h200.jsonl"
TORCH = "torch symmetric"
ON_HOST = {"flagcx": "flagcx", "openmpi": "Open MPI", "mpich": "MPICH", "gloo": "gloo (PyTorch)"}
ON_GPU = {"flagcx": "flagcx", TORCH: "PyTorch symmetric memory", "NCCL": "NCCL 2.28 without NVLS"}


def lines_of(
    rows: Sequence[Mapping[str, Any]], library: str, time: str, names: Mapping[str, str]
) -> list[BenchLine]:
    """A line for each library; of PyTorch's kernels the faster one counts.

    Args:
        rows: Measurements.
        library: The key under which a row names what was measured.
        time: The key of its time, in us.
        names: What the picture calls each library.
    """
    lines = []
    for key, name in names.items():
        best: dict[int, tuple[float, int]] = {}
        for row in rows:
            if row[library] == key or (key == TORCH and row[library].startswith(TORCH)):
                measured = (row[time], row["ranks"])
                best[row["nbytes"]] = min(best.get(row["nbytes"], measured), measured)
        nbytes = sorted(best)
        times, ranks = zip(*(best[size] for size in nbytes), strict=True)
        bandwidths = [
            n / t / 1e3 * bus_share("allreduce", r) for n, t, r in zip(nbytes, times, ranks, strict=True)
        ]
        lines.append(BenchLine(name, nbytes, times, bandwidths, other=key != "flagcx"))
    return lines


def read(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """The rows of a file of results that have the given values."""
    rows = [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the file to write: .png, .svg or .pdf")
    path = parser.parse_args(arguments).path
    host = read(HOST, ranks=2)
    gpu = [row for row in read(GPU, part="before", ranks=4, dtype="float32") if row["nbytes"] <= 256 << 20]
    figure = new_figure(11, 4.2, "stored results", layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_lines(left, lines_of(host, "implementation", "median_us", ON_HOST), "time_us", "")
    plot_lines(right, lines_of(gpu, "library", "replay_us", ON_GPU), "time_us", "")
    left.set_title(
        f"2 processes on {host[0]['cpu'].replace('(R)', '')}, NumPy arrays", loc="left", fontsize=10
    )
    right.set_title("4 NVIDIA H200 over NVLink, CuPy arrays, CUDA graphs", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set_ylabel("time of an all-reduce (us)", fontsize=9)
        axes.legend(frameon=False, fontsize=9)
    save_picture(figure, path)


if __name__ == "__main__":
    main()
