"""Ranks that share this machine's GPU: a private MPS daemon for the whole session of tests.

With pytest-xdist (``pytest -m gpu -n 4`` for four GPUs) each worker has one of them to itself. Tests that
need several are then left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

import flagcx as fc
from flagcx._launch.share_gpu import shared_gpu
from flagcx.config import environment
from flagcx.errors import LaunchError, MissingDependencyError
from flagcx.kernels.cuda import load_cupy

SIZES = tuple(int(n) for n in environment().get("FLAGCX_TEST_RANKS", "2,3,4,8").split(","))


def _count_gpus() -> int:
    if not os.path.exists("/dev/nvidiactl"):
        return 0
    try:
        return int(load_cupy().cuda.runtime.getDeviceCount())
    except MissingDependencyError:
        return 0


def _own_gpu() -> str:
    """The GPU of this worker of pytest-xdist, as CUDA_VISIBLE_DEVICES names it; empty without workers."""
    worker = environment().get("PYTEST_XDIST_WORKER", "")
    if not worker or not os.path.exists("/dev/nvidiactl"):
        return ""
    import pynvml

    pynvml.nvmlInit()
    try:
        number = int(worker.removeprefix("gw")) % pynvml.nvmlDeviceGetCount()
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(number)))
    finally:
        pynvml.nvmlShutdown()


OWN_GPU = _own_gpu()
if OWN_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = OWN_GPU
GPUS = _count_gpus()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks everything here, and skips it where there is no GPU."""
    here = [item for item in items if os.path.dirname(__file__) in str(item.path)]
    reason = _why_not() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str:
    if not os.path.exists("/dev/nvidiactl"):
        return "no NVIDIA GPU on this machine"
    try:
        load_cupy()
    except MissingDependencyError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable]:
    """``ranks(n, function, *args)``: what each of n ranks on one GPU returns.

    Behind ranks that died in the middle of a kernel the daemon is busy for a while, and refuses others. So
    after a failure there is a new one.
    """
    with contextlib.ExitStack() as daemon, pytest.MonkeyPatch.context() as patch:

        def begin() -> None:
            daemon.close()
            patch.undo()
            for name, value in daemon.enter_context(shared_gpu(environment())).items():
                patch.setenv(name, value)

        def run(size: int, function: Callable, *args: object, timeout_s: float = 100.0) -> list:
            try:
                return fc.launch(function, ranks=size, args=args, timeout_s=timeout_s)
            except LaunchError:
                begin()
                raise

        begin()
        yield run
