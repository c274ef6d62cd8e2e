"""A user's script, in the strictest mode of mypy and pyright, has no error and the types that it asserts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "user_script.py"


def mypy(script: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    options = ["--config-file=", "--strict", "--follow-imports=silent", f"--cache-dir={cache}"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cache,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_mypy_accepts_the_script_and_sees_a_mistake(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed (pip install -e '.[test]')")
    ended = mypy(SCRIPT, tmp_path)
    assert ended.returncode == 0, ended.stdout
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import flagcx as fc\n\ntext: str = fc.init().rank\nfc.init().Allreduce(1)\nfc.allreduce(1)\n"
    )
    said = mypy(wrong, tmp_path).stdout
    assert 'expression has type "int", variable has type "str"' in said
    assert 'has no attribute "Allreduce"' in said and 'has no attribute "allreduce"' in said


@pytest.mark.slow
def test_pyright_accepts_the_script(tmp_path):
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed (pip install pyright)")
    (tmp_path / "pyrightconfig.json").write_text(
        f'{{"typeCheckingMode": "strict", "extraPaths": ["{ROOT}"], "include": ["{SCRIPT}"], '
        f'"reportMissingTypeStubs": false}}'
    )
    ended = subprocess.run([pyright, "-p", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout


def test_the_package_says_that_it_has_types():
    assert (ROOT / "flagcx" / "py.typed").exists()
    assert 'flagcx = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()
