"""Everything that is measured on a machine with several GPUs, in one run of under ten minutes.

    python bench/several_gpus.py --out results.jsonl [--parts topology,tests,...] [--limit 570]

Parts run one after the other, each a command of its own with a limit, so that one that fails or hangs costs
no other. Their JSON lines end in one file, each with the name of its part, as they come; what they print is
kept too. The last part holds the times of the others to the targets.

``before`` knows no measured times: all parts keep what they remember in a folder of this run, or in that of
``--cache``, with which a later run goes on. On a machine with one GPU the same parts run with ranks that
share it; eight GPUs need two runs, the second with ``--parts`` and the same ``--cache`` and ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from targets import judge_gpus

from flagcx.cli.start_ranks import count_gpus

ROOT = Path(__file__).resolve().parent.parent
SIZES = "1K,4K,64K,1M,4M,16M,64M,256M,1G,4G"
CHOSEN = "flagcx,flagcx comm.empty,NCCL"
GPU_EACH = "gpu_of_its_own or another_gpu or gpu_each"
BETWEEN_GPUS = "gradients or all_dtypes or every_form or large or peers_see or kernels_touch"
VERDICTS = "verdicts"
ARTICLE_ELEMENTS = 20_000_000_000 // 4 // 8
"""The article's 20 GB of gradients over 8 GPUs, as elements of each."""
_PRINTED = 6000


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
    most = counts[-1]
    share = ("--share-gpu",) if most > gpus else ()
    run = ("-m", "flagcx.cli", "run", "-n", str(most), *share)
    replays = ("bench/gpu_replays.py", "--ranks", ",".join(map(str, counts)), "--out", "{out}")
    tune = ("-m", "flagcx.cli", "tune", "--gpu", *share, "-c", "allreduce")
    tests = ("-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider")
    more = [f"tests/gpu/test_{name}.py" for name in ("gradients", "fusion", "peer_memory", "sanitizer")]
    step = (*run, "bench/overlap.py", "--gpu", "--out", "{out}")
    article = (*run, "examples/article_benchmark.py")
    own = () if share else ("--own-gpu",)
    collectives = ("bench/gpu_collectives.py", "--ranks", ",".join(map(str, counts)), "--native", *own)
    rows = ("bench/gpu_rows.py", "--ranks", str(most), "--rows", "1,8,64,256", "--out", "{out}")
    decode = (*run, "examples/tensor_parallel_decode.py", "--batches", "1,8,64,256", "--tokens", "16")
    host = ("bench/gpu_overhead.py", "--ranks", str(counts[0]), *own, "--out", "{out}")
    return [
        Part("topology", ("-m", "flagcx.cli", "topo"), 30),
        Part("tests", (*tests, "-k", GPU_EACH, "tests/gpu/test_behaviour.py", "tests/gpu/test_torch.py"), 90),
        Part("before", (*replays, "--sizes", SIZES, "--dtypes", "float32"), 60 * len(counts)),
        Part("bfloat16", (*replays, "--sizes", SIZES, "--dtypes", "bfloat16"), 60 * len(counts)),
        *(Part(f"tune-{n}", (*tune, "-n", str(n)), 120) for n in counts),
        Part("after", (*replays, "--sizes", SIZES, "--only", CHOSEN, "--label", "tuned"), 60),
        Part("article", article, 60),
        *([] if share else [Part("article-20GB", (*article, "--elements", str(ARTICLE_ELEMENTS)), 60)]),
        Part("collectives", (*collectives, "--replays", "10", "--seconds", "100", "--out", "{out}"), 150),
        Part("rows", rows, 60),
        Part("decode", decode, 200),
        Part("host", host, 60),
        Part("host-torch", (*host, "--torch", "--nbytes", "65536"), 60),
        Part("overlap", step, 60),
        Part("int8", (*step, "--compression", "int8"), 60),
        Part("links", ("bench/gpu_links.py", "--sizes", "4M,128M", "--out", "{out}"), 60),
        Part("more-tests", (*tests, "-k", BETWEEN_GPUS, *more), 240),
    ]


def run_part(part: Part, out: Path, environ: Mapping[str, str], left_s: float) -> dict:
    """Runs a part, and says how it ended; its lines go to ``out`` with its name as soon as it writes them."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        with followed(lines, out, part.name):
            command = [sys.executable, *(str(lines) if word == "{out}" else word for word in part.command)]
            code, printed = run_command(command, environ, min(part.limit_s, left_s))
    ended = {"part": part.name, "command": " ".join(part.command), "exit_code": code}
    ended |= {"seconds": round(time.monotonic() - begin, 1), "printed": printed[-_PRINTED:]}
    with out.open("a") as file:
        file.write(json.dumps(ended) + "\n")
    return ended


def run_command(command: list[str], environ: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """Runs a command from the root of the sources: its exit code (None: out of time), and what it printed."""
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=dict(environ), timeout=limit_s, check=False, **kept)
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or ""
        return None, printed.decode(errors="replace") if isinstance(printed, bytes) else printed
    return done.returncode, done.stdout


@contextlib.contextmanager
def followed(lines: Path, out: Path, name: str) -> Iterator[None]:
    """Meanwhile, whole JSON lines that come to ``lines`` go to ``out``, with the name of their part."""
    over = threading.Event()

    def follow() -> None:
        at = 0
        while True:
            last = over.wait(0.5)
            text = lines.read_text()[at:] if lines.exists() else ""
            whole = text[: text.rfind("\n") + 1]
            at += len(whole)
            with out.open("a") as file:
                file.writelines(
                    json.dumps({"part": name, **json.loads(row)}) + "\n" for row in whole.splitlines()
                )
            if last:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def verdicts(out: Path) -> str:
    """What was measured before and after tuning, held to the targets: a line each, and JSON in ``out``."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    lines, found = [], []
    for part in ("before", "bfloat16", "after"):
        for held in judge_gpus([row for row in rows if row.get("part") == part]):
            word = "pass" if held.passed else "FAIL"
            place = f"{part}, {held.ranks} ranks, {held.dtype}, {held.nbytes} bytes"
            lines.append(f"{word}  {place}: {held.what}: {held.us:.2f} us, at most {held.most_us:.2f}")
            found.append({"part": VERDICTS, "of": part, "what": held.what, "passed": held.passed,
                          "ranks": held.ranks, "dtype": held.dtype, "nbytes": held.nbytes,
                          "us": held.us, "most_us": round(held.most_us, 2)})  # fmt: skip
    with out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)
    passed = sum(row["passed"] for row in found)
    return "\n".join([*lines, f"{passed} of {len(found)} targets reached"])


def main() -> None:
    """Runs the parts, and prints what each printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file that JSON lines are added to")
    parser.add_argument(
        "--ranks", default="", help="numbers of ranks, by commas; by default 2, 4, 8 up to the GPUs"
    )
    parser.add_argument(
        "--parts", default="", help="names of parts, by commas, in this order; all by default"
    )
    parser.add_argument("--limit", type=float, default=570, help="seconds for all of them")
    parser.add_argument("--cache", type=Path, help="folder for measured times and compiled kernels")
    given = parser.parse_args()
    end = time.monotonic() + given.limit
    gpus = count_gpus()
    counts = [int(n) for n in given.ranks.split(",") if n] or [n for n in (2, 4, 8) if n <= max(gpus, 2)]
    known = {part.name: part for part in parts(counts, gpus)}
    wanted = [name for name in given.parts.split(",") if name] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(known)}")
    with contextlib.ExitStack() as stack:
        cache = given.cache or stack.enter_context(tempfile.TemporaryDirectory())
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "NCCL_NVLS_ENABLE": "0"}
        environ |= {
            "FLAGCX_TEST_RANKS": ",".join(map(str, counts)),
            "XDG_CACHE_HOME": str(Path(cache).resolve()),
        }
        for name in wanted:
            left_s = end - time.monotonic()
            if left_s < 5:
                print(f"== {name}: no time left")
                continue
            ended = run_part(known[name], given.out, environ, left_s)
            told = f"exit code {ended['exit_code']}, {ended['seconds']} s\n{ended['printed']}"
            print(f"== {name}: {told}", flush=True)
    print(f"== {VERDICTS}\n{verdicts(given.out)}")


if __name__ == "__main__":
    main()
