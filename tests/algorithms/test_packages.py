"""Algorithms of installed packages: found when they are asked for, and a broken package is named."""

from __future__ import annotations

import sys

import pytest

from flagcx.algorithms import build, catalogue, entry, unregister
from flagcx.algorithms.packages import _packages, load_packages
from flagcx.errors import ArgumentError

MODULE = """
import flagcx as fc
from flagcx.algorithms.direct import direct_broadcast, direct_reduce
from flagcx.schedule.compose import then

def star(size):
    return then(direct_reduce(size), direct_broadcast(size))

def register_all():
    fc.register("packed-star", "allreduce", star)

def broken():
    raise RuntimeError("no licence")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package with the given entry points, and forgets it after the test."""

    def install(*points: str) -> None:
        (tmp_path / "fx_packed_algorithms.py").write_text(MODULE)
        info = tmp_path / "fx_packed-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fx-packed\nVersion: 1.0\n")
        lines = [f"{place} = fx_packed_algorithms:{point}" for place, point in enumerate(points)]
        (info / "entry_points.txt").write_text("\n".join(["[flagcx.algorithms]", *lines, ""]))
        monkeypatch.syspath_prepend(str(tmp_path))

    _packages.cache_clear()
    yield install
    _packages.cache_clear()
    sys.modules.pop("fx_packed_algorithms", None)
    for known in catalogue():
        if known.algorithm == "packed-star":
            unregister("packed-star", "allreduce")


def test_an_algorithm_of_a_package_is_found_when_it_is_named(package):
    package("register_all")
    assert "packed-star" not in {str(known.algorithm) for known in catalogue()}
    assert build("allreduce", "packed-star", 4).algorithm == "packed-star"
    assert not entry("allreduce", "packed-star").trusted


def test_a_known_name_loads_no_package(package):
    package("register_all")
    build("allreduce", "ring", 4)
    assert "fx_packed_algorithms" not in sys.modules


def test_a_broken_package_is_named_and_leaves_the_others(package, caplog):
    package("broken", "register_all")
    failure = (
        "package fx-packed failed to register its algorithms (fx_packed_algorithms:broken): "
        "RuntimeError: no licence"
    )
    assert load_packages() == load_packages() == [failure]
    assert caplog.messages == [failure]
    assert entry("allreduce", "packed-star")
    with pytest.raises(ArgumentError, match=r"'other' does not serve .*; package fx-packed failed to reg"):
        entry("allreduce", "other")


def test_an_entry_point_that_is_not_there(package):
    package("nothing")
    (failure,) = load_packages()
    assert failure.startswith("package fx-packed failed") and "AttributeError" in failure
