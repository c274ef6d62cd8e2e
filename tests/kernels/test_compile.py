"""Compiled kernels are kept, and what is kept is checked; with a fake of CuPy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flagcx.kernels.compile import compile_kernel
from flagcx.kernels.source import OPTIONS


class FakeCupy:
    """Compiles a source to its own bytes, and notes each time."""

    def __init__(self, capability: str = "90") -> None:
        self.compiled: list[tuple[str, tuple]] = []

        def compile_using_nvrtc(source, options, filename):
            self.compiled.append((source, options))
            return f"binary of {source} for {capability}".encode(), {}

        class Module:
            def load(self, binary):
                self.binary = binary

            def get_function(self, name):
                return name, self.binary

        self.cuda = SimpleNamespace(
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            device=SimpleNamespace(get_compute_capability=lambda: capability),
            compiler=SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc),
            function=SimpleNamespace(Module=Module),
        )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flagcx" / "kernels"


def test_a_kernel_is_compiled_once_and_without_flushing_to_zero(cache):
    cupy = FakeCupy()
    first, second = (compile_kernel(cupy, "source", "name") for _ in range(2))
    assert first == second == ("name", b"binary of source for 90")
    assert cupy.compiled == [("source", OPTIONS)]
    assert not any("ftz" in option for option in OPTIONS)
    assert len(list(cache.iterdir())) == 1


def test_another_gpu_gets_another_binary():
    compile_kernel(FakeCupy("90"), "source", "name")
    assert compile_kernel(FakeCupy("80"), "source", "name")[1] == b"binary of source for 80"


def test_a_damaged_binary_is_compiled_anew(cache):
    compile_kernel(FakeCupy(), "source", "name")
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    cupy = FakeCupy()
    assert compile_kernel(cupy, "source", "name")[1] == b"binary of source for 90"
    assert len(cupy.compiled) == 1


def test_without_a_cache_it_works_all_the_same(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    cupy = FakeCupy()
    for _ in range(2):
        compile_kernel(cupy, "source", "name")
    assert len(cupy.compiled) == 2


def test_a_cupy_that_compiles_another_way_is_used_as_it_is(caplog):
    cupy = FakeCupy()
    del cupy.cuda.compiler
    cupy.__version__ = "99.0"
    cupy.RawKernel = lambda source, name, options: SimpleNamespace(kernel=(source, name, options))
    assert compile_kernel(cupy, "source", "name") == ("source", "name", OPTIONS)
    assert "CuPy 99.0 compiles kernels another way" in caplog.text
