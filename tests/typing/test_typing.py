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


_SKIPPED = "IPython.*,matplotlib.*,networkx.*,rich.*,torch.*,numpy.typing.mypy_plugin"
"""What flagcx or NumPy imports that no type of the script comes from: half of all that would be read."""


@pytest.mark.slow
def test_mypy_accepts_the_script_and_sees_mistakes_in_another(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed (pip install -e '.[test]')")
    settings, wrong = tmp_path / "mypy.ini", tmp_path / "wrong.py"
    settings.write_text(f"[mypy]\n[mypy-{_SKIPPED}]\nfollow_imports = skip\nignore_missing_imports = true\n")
    wrong.write_text(
        "import flagcx as fc\n\ntext: str = fc.init().rank\nfc.init().Allreduce(1)\nfc.allreduce(1)\n"
    )
    options = [f"--config-file={settings}", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(SCRIPT), str(wrong)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    said = ended.stdout
    assert said.count("error:") == said.count("wrong.py:") == 3, said + ended.stderr
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
