"""Everything that is measured on a machine with several GPUs, in one run of under ten minutes.

    python bench/several_gpus.py --out results.jsonl [--parts topology,tests,...] [--limit 570]

Parts run one after the other, each a command of its own with a limit, so that one that fails or hangs costs
no other. Their JSON lines end in one file, each with the name of its part; what they print is kept too.
On a machine with one GPU the same parts run with ranks that share it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZES = "1K,4K,64K,1M,4M,16M,64M,256M,1G,4G"
CHOSEN = "flagcx,flagcx comm.empty,NCCL"
FEW = "4K,64K,1M,4M,16M,64M,256M,1G"


@dataclass(frozen=True, slots=True)
class Part:
    """One command.

    Attributes:
        name: What ``--parts`` calls it.
        command: Its words behind ``python``; "{out}" stands for the file that takes JSON lines.
        limit_s: Its own limit in seconds.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float


def parts(counts: list[int], gpus: int) -> list[Part]:
    """All parts for these numbers of ranks."""
    most, ranks = str(counts[-1]), ",".join(map(str, counts))
    run = ("-m", "flagcx.cli", "run", "-n", most, "--share-gpu")
    replays = ("bench/gpu_replays.py", "--ranks", ranks, "--out", "{out}")
    tune = ("-m", "flagcx.cli", "tune", "--gpu", "--share-gpu", "-c", "allreduce")
    tests = ("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider")
    return [
        Part("topology", ("-m", "flagcx.cli", "topo"), 30),
        Part("before", (*replays, "--sizes", SIZES, "--dtypes", "float32"), 150),
        Part("bfloat16", (*replays, "--sizes", FEW, "--dtypes", "bfloat16"), 90),
        *(Part(f"tune-{n}", (*tune, "-n", str(n)), 90) for n in counts),
        Part("after", (*replays, "--sizes", SIZES, "--only", CHOSEN, "--label", "tuned"), 60),
        Part("overlap", (*run, "bench/overlap.py", "--gpu"), 60),
        Part("article", (*run, "examples/article_benchmark.py"), 90),
        Part("tests", tests, 240),
    ]  # fmt: skip


def run_part(part: Part, out: Path, environ: dict[str, str], left_s: float) -> dict:
    """Runs a part, and says how it ended; its lines go to ``out`` with its name."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        command = [sys.executable, *(str(lines) if word == "{out}" else word for word in part.command)]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=min(part.limit_s, left_s),
            )
            code, printed = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            code, printed = None, (late.stdout or b"").decode(errors="replace")
        rows = lines.read_text().splitlines() if lines.exists() else []
    ended = {"part": part.name, "command": " ".join(part.command), "exit_code": code}
    ended |= {"seconds": round(time.monotonic() - begin, 1), "printed": printed[-6000:]}
    with out.open("a") as file:
        file.writelines(json.dumps({"part": part.name, **json.loads(row)}) + "\n" for row in rows)
        file.write(json.dumps(ended) + "\n")
    return ended


def count_gpus() -> int:
    """GPUs that CuPy sees."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def main() -> None:
    """Runs the parts, and prints what each printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="file that JSON lines are added to")
    parser.add_argument(
        "--ranks", default="", help="numbers of ranks, by commas; by default 2, 4, 8 up to the GPUs"
    )
    parser.add_argument(
        "--parts", default="", help="names of parts, by commas, in this order; all by default"
    )
    parser.add_argument("--limit", type=float, default=570, help="seconds for all of them")
    given = parser.parse_args()
    end = time.monotonic() + given.limit
    gpus = count_gpus()
    counts = [int(n) for n in given.ranks.split(",") if n] or [n for n in (2, 4, 8) if n <= max(gpus, 2)]
    known = {part.name: part for part in parts(counts, gpus)}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NCCL_NVLS_ENABLE": "0"}
    environ |= {"FLAGCX_TEST_RANKS": ",".join(map(str, counts))}
    for name in [n for n in given.parts.split(",") if n] or list(known):
        left_s = end - time.monotonic()
        if left_s < 5:
            print(f"== {name}: no time left")
            continue
        ended = run_part(known[name], Path(given.out), environ, left_s)
        print(
            f"== {name}: exit code {ended['exit_code']}, {ended['seconds']} s\n{ended['printed']}", flush=True
        )


if __name__ == "__main__":
    main()
