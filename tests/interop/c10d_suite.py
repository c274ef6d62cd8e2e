"""PyTorch's own tests of a c10d backend, from its package, run against ``backend="flagcx"`` on the CPU.

    python tests/interop/c10d_suite.py [-k PART_OF_NAME] [--output FILE]
    python tests/interop/c10d_suite.py --backend mpi --guise     # also what it runs for MPI alone
    python tests/interop/c10d_suite.py --backend gloo --enhance    # enhanced gloo in the place of gloo
    python tests/interop/c10d_suite.py --backend gloo              # gloo itself

Each test starts processes of its own; all of them take a few minutes. The output has one
JSON line for each test: its name, "passed", "skipped" or "failed", and why. Needs ``pip install expecttest``.
"""

# ruff: noqa: E402, the tests read the environment when they are imported
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path

BACKEND = os.environ.setdefault("BACKEND", "flagcx")
os.environ.setdefault("WORLD_SIZE", "4")
PLACE = tempfile.TemporaryDirectory(prefix="flagcx-c10d-")
os.environ["TEMP_DIR"] = PLACE.name
for part in ("barrier", "test_dir"):
    Path(os.environ["TEMP_DIR"], part).mkdir(exist_ok=True)
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29577")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import DistTestCases

import flagcx.interop.torch  # registers the backend

for feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature.setdefault(feature, set()).add("flagcx")

from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class FlagcxBackendTest(TestDistBackend, DistributedTest._DistTestBase):
    """The tests of every backend."""

    def setUp(self) -> None:
        super().setUp()
        # Forked, not spawned: a rank then need not import torch, which takes longer than most of the tests.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class _Result(unittest.TestResult):
    """Writes a line for each test as it ends."""

    def __init__(self, output: str | None) -> None:
        super().__init__()
        self._output = output
        self._start = 0.0
        self.counts = {"passed": 0, "skipped": 0, "failed": 0}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._start = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err) -> None:
        self._write(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure

    def _write(self, test: unittest.TestCase, outcome: str, why: str) -> None:
        self.counts[outcome] += 1
        name, seconds = test.id().rpartition(".")[2], round(time.monotonic() - self._start, 1)
        last = why.strip().splitlines()[-1][:200] if why else ""
        print(f"{outcome:>8} {seconds:6.1f} s  {name}  {last}", flush=True)
        line = {"test": name, "backend": BACKEND, "outcome": outcome, "seconds": seconds, "why": why[-3000:]}
        if self._output:
            with open(self._output, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _as_flagcx(init: Callable[..., None]) -> Callable[..., None]:
    def init_flagcx(*args, **named) -> None:
        init(*args, **(named | {"backend": "flagcx"}))

    return init_flagcx


def _enhancing(init: Callable[..., None]) -> Callable[..., None]:
    def init_and_enhance(*args, **named) -> None:
        init(*args, **named)
        flagcx.enhance_process_group()

    return init_and_enhance


def main() -> int:
    """Runs the tests; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default=BACKEND, help="flagcx, or another to compare with")
    parser.add_argument("--enhance", action="store_true", help="enhance the default group of every test")
    parser.add_argument(
        "--guise", action="store_true", help="run flagcx, and let the tests take it for --backend"
    )
    parser.add_argument("-k", default="", help="only tests with this in their name; several with commas")
    parser.add_argument("--output", help="file that JSON lines are added to")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th test, from the i-th on")
    options = parser.parse_args()
    if options.backend != BACKEND:
        os.environ["BACKEND"] = options.backend
        PLACE.cleanup()
        del os.environ["TEMP_DIR"]
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if options.guise:
        dist.init_process_group = _as_flagcx(dist.init_process_group)
    if options.enhance:
        dist.init_process_group = _enhancing(dist.init_process_group)
        # Events by gloo's name are gloo's to record; flagcx records its calls in a profiler of its own.
        distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
    loader = unittest.TestLoader()
    names = loader.getTestCaseNames(FlagcxBackendTest)
    first, step = map(int, options.part.split("/"))
    wanted = [n for n in names if any(part in n for part in options.k.split(","))][first::step]
    result = _Result(options.output)
    unittest.TestSuite(map(FlagcxBackendTest, wanted)).run(result)
    print(result.counts)
    return 1 if result.counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
