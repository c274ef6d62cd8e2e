"""Runs the notebooks of ``examples/`` from top to bottom, and as a program stores their outputs.

python -m tests.examples.notebooks examples/01_first_allreduce.ipynb ...    # all, where none is named
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("0*.ipynb"))
TIMEOUT_S = 180
"""For one cell: a cell that takes so long hangs, whatever else the machine does."""


def execute(path: Path) -> Any:
    """The notebook with the outputs of a run in a fresh kernel; raises the error of a cell that fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(EXAMPLES)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=place).execute()
    return notebook


def smaller(picture: str) -> str:
    """A PNG in base64 with a palette of 128 colours, a third of the bytes."""
    from PIL import Image

    found = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(128).save(
        found, "png", optimize=True
    )
    return base64.b64encode(found.getvalue()).decode()


def store(path: Path) -> None:
    """Runs a notebook and writes it with its outputs; a picture is kept once, and no times of cells."""
    import nbformat

    notebook = execute(path)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data.pop("text/html", None)
                data["image/png"] = smaller(data["image/png"])
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for one in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        store(one)
