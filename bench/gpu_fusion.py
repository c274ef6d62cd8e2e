"""1,000 CuPy arrays of 1 to 64 KiB: one call for each, beside one list and one group, on one GPU or several.

    python bench/gpu_fusion.py --ranks 2,4 --out results.jsonl

Starts ``bench/fusion.py --gpu`` on as many ranks as asked for; they share a GPU where there are fewer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from gpu_common import need_gpu
from report import list_of

HERE = Path(__file__).resolve().parent


def command(ranks: int, share: bool, out: str | None) -> list[str]:
    """The command that measures with so many ranks."""
    words = [sys.executable, "-m", "flagcx.cli", "run", "-n", str(ranks)]
    words += ["--share-gpu"] if share else []
    words += [str(HERE / "fusion.py"), "--gpu"]
    return words + (["--out", out] if out else [])


def main() -> int:
    """Runs the measurement for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=list_of(int), default="2,4", help="numbers of ranks, by commas")
    parser.add_argument("--out", help="where to append results as JSON lines")
    options = parser.parse_args()
    need_gpu()
    import cupy

    gpus = cupy.cuda.runtime.getDeviceCount()
    out = str(Path(options.out).resolve()) if options.out else None
    failed = 0
    for ranks in options.ranks:
        print(f"-- {ranks} ranks on {min(ranks, gpus)} GPUs", flush=True)
        failed |= subprocess.run(command(ranks, ranks > gpus, out), cwd=HERE.parent).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
