"""The notebooks run from top to bottom, and are stored with the outputs of such a run."""

import json

import pytest

from tests.examples.notebooks import NOTEBOOKS, execute
from tests.ranges import exhaustive


def cells_of(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_five():
    assert len(NOTEBOOKS) == 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored(path):
    """Every cell ran, in this order and without an error; the last of them shows something."""
    cells = cells_of(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert cells[-1]["outputs"] and all(output["output_type"] != "error" for output in outputs)
    assert "/tmp/" not in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", [NOTEBOOKS[0], *exhaustive(NOTEBOOKS[1:])], ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path):
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package, reason=f"running a notebook needs {package}")
    kinds = [[output["output_type"] for output in cell["outputs"]] for cell in cells_of(path)]
    ran = [cell for cell in execute(path).cells if cell.cell_type == "code"]
    printed = [output.text for cell in ran for output in cell.outputs if output.output_type == "stream"]
    assert [[output.output_type for output in cell.outputs] for cell in ran] == kinds, printed
