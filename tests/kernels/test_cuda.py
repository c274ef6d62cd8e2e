"""What is said when a part that GPU arrays need is missing: by fakes of CuPy."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from flagcx.errors import MissingDependencyError
from flagcx.kernels import cuda


class CudaError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


def fake_cupy(count=1, status=None, version="14.2.0", built=13020):
    def get_device_count():
        if status is not None:
            raise CudaError(status)
        return count

    runtime = SimpleNamespace(
        getDeviceCount=get_device_count, CUDARuntimeError=CudaError, runtimeGetVersion=lambda: built
    )
    return SimpleNamespace(__version__=version, cuda=SimpleNamespace(runtime=runtime))


def test_no_cupy_gives_the_command_for_the_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cuda, "driver_cuda", lambda: 12080)
    with pytest.raises(MissingDependencyError, match="pip install cupy-cuda12x nvidia-nccl-cu12"):
        cuda.load_cupy()


def test_without_a_driver_the_newest_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cuda, "driver_cuda", lambda: None)
    with pytest.raises(MissingDependencyError, match="pip install cupy-cuda13x nvidia-nccl-cu13"):
        cuda.load_cupy()


def test_old_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(version="12.3.0"))
    monkeypatch.setattr(cuda, "driver_cuda", lambda: 13000)
    with pytest.raises(MissingDependencyError, match=r"12.3.0 is too old.*pip install -U cupy-cuda13x"):
        cuda.load_cupy()


def test_no_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(status=35))
    monkeypatch.setattr(cuda, "driver_cuda", lambda: None)
    with pytest.raises(MissingDependencyError, match=r"no libcuda.so.1 .*--gpus all"):
        cuda.load_cupy()


def test_cupy_that_is_newer_than_the_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(status=35))
    monkeypatch.setattr(cuda, "driver_cuda", lambda: 12040)
    said = r"built for CUDA 13, but the driver goes up to CUDA 12.4: pip uninstall -y cupy-cuda13x .*cuda12x"
    with pytest.raises(MissingDependencyError, match=said):
        cuda.load_cupy()


def test_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(count=0))
    with pytest.raises(MissingDependencyError, match="CuPy sees none"):
        cuda.load_cupy()


def test_all_there(monkeypatch):
    cupy = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert cuda.load_cupy() is cupy
