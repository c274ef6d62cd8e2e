"""A source distribution and a wheel of it, installed where no checkout is seen, pass a smoke test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import flagcx as fc

ROOT = Path(__file__).parents[1]
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
SMOKE = """
import flagcx as fc, numpy as np
comm = fc.init()
total = comm.allreduce(np.full(3, comm.rank + 1.0))
print(fc.__version__, fc.__file__, total.tolist())
"""


def ran(command, folder, **changes):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=folder, env=environ, timeout=600
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that was built from what is in it."""
    place = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "flagcx", place / "source" / "flagcx", ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, place / "source" / name)
    packed = ran([sys.executable, "-c", BUILD, "sdist", place], place / "source")
    assert packed.returncode == 0, packed.stderr
    (sdist,) = place.glob("flagcx-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(place / "unpacked", filter="data")
    (source,) = (place / "unpacked").iterdir()
    made = ran([sys.executable, "-c", BUILD, "wheel", place], source)
    assert made.returncode == 0, made.stderr
    (wheel,) = place.glob("flagcx-*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(built, tmp_path):
    _, wheel = built
    environment = tmp_path / "env"
    venv.create(environment, system_site_packages=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--prefix", environment, "--ignore-installed"]
    installed = ran([*pip, "--no-deps", "--no-index", "--no-compile", wheel], tmp_path)
    assert installed.returncode == 0, installed.stderr
    paths = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    changes = {
        "PYTHONPATH": f"{environment}/lib/python3.{sys.version_info[1]}/site-packages{os.pathsep}{paths}"
    }
    command = [python, environment / "bin" / "flagcx"]
    said = ran([*command, "run", "-n", "2", "-c", SMOKE], tmp_path, **changes)
    assert said.returncode == 0, said.stderr
    lines = sorted(said.stdout.splitlines())
    assert len(lines) == 2 and all(line.endswith("[3.0, 3.0, 3.0]") for line in lines)
    assert all(f"{fc.__version__} {environment}" in line for line in lines), lines
    assert (
        ran([python, "-m", "flagcx", "--version"], tmp_path, **changes).stdout == f"flagcx {fc.__version__}\n"
    )


@pytest.mark.slow
def test_the_distributions_hold_the_package_and_its_types(built):
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        assert f"\nVersion: {fc.__version__}\n" in archive.read(metadata).decode()
    assert {"flagcx/py.typed", "flagcx/__main__.py", "flagcx/__init__.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "examples/"))]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "flagcx").rglob("*.py")}
    assert modules <= names
    with tarfile.open(sdist) as archive:
        assert {name.partition("/")[2] for name in archive.getnames()} >= {"README.md", "flagcx/py.typed"}
