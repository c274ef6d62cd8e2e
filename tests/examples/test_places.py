"""``examples/places``: the same small job wherever ranks come from; each file ends with the same weights."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import flagcx as fc
from tests.bootstrap.processes import bare_environment
from tests.mpi import MPIRUN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "README.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| `([^`]+)` \| (\d+) \|", PAGE, re.MULTILINE)
PROGRAMS = {
    "flagcx": [sys.executable, "-m", "flagcx.cli"],
    "mpirun": [str(MPIRUN), "--allow-run-as-root", "--oversubscribe"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "python": [sys.executable],
}
NEEDS = {"torchrun": "torch", "in_dask": "distributed", "in_ray": "ray", "joblib": "joblib", "mpi": "mpi4py"}


def lines_of_code(path):
    """Lines that are neither empty nor part of the docstring."""
    text = re.sub(r'^""".*?"""', "", path.read_text(), flags=re.DOTALL)
    return sum(1 for line in text.splitlines() if line.strip())


def test_the_page_has_all_places_and_their_lines():
    assert len(ROWS) == 8
    for command, lines in ROWS:
        path = next(ROOT / word for word in command.split() if word.endswith(".py"))
        assert lines_of_code(path) == int(lines), path


@pytest.mark.slow
def test_the_job_in_a_notebook(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "places"))
    from fit import fit

    assert fc.launch(fit, ranks=4) == [(4, [1.0, -2.0, 0.5])] * 4


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [command for command, _ in ROWS])
def test_the_job_ends_alike_everywhere(command):
    for word, package in NEEDS.items():
        if word in command:
            pytest.importorskip(package, reason=f"this place needs {package}")
    program, *rest = shlex.split(command)
    rest = [sys.executable if word == "python" else word for word in rest]
    environ = bare_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    ran = subprocess.run(
        [*PROGRAMS[program], *rest],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    if "from_mpi" in command:
        assert sorted(re.findall(r"of 2: (\d)", ran.stdout)) == ["2", "2", "4", "4"]
    else:
        assert ran.stdout.count("[1.0, -2.0, 0.5]") == 4, ran.stdout
