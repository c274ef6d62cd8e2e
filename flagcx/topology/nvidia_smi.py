"""Reads the output of ``nvidia-smi topo -m``.

The matrix has classes, not the tree of devices, and a cell with an NVLink class hides the PCIe path.
``parse`` builds the simplest tree that gives the same matrix; the notes name its guesses.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from flagcx.errors import TopologyError
from flagcx.topology import paths, smi_tree
from flagcx.topology.smi_matrix import parse_matrix
from flagcx.topology.topology import Topology


def parse(text: str, source: str = "<text>", *, sm: int | None = None) -> Topology:
    """Builds a topology from the output of ``nvidia-smi topo -m``.

    Args:
        text: The output, with or without its legend, as people paste it.
        source: Its name in messages.
        sm: Compute capability times ten of the GPUs, where known; it gives the NVLinks' speed.

    Returns:
        A topology whose matrix is that of the text. Bandwidths are assumed, as the text has none.

    Raises:
        TopologyError: It is no such output, or contradicts itself.
    """
    matrix = parse_matrix(text, source)
    try:
        topology = smi_tree.build(matrix, Path(source).stem, sm)
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from None
    built = paths.matrix(topology)
    rows = dict(zip(built, matrix.names, strict=True))
    wrong = [
        (a, b)
        for a, b in combinations(built, 2)
        if (cell := matrix.cells[rows[a], rows[b]]) != built[a][b] and cell != "N/A"
    ]
    if wrong:
        a, b = wrong[0]
        raise TopologyError(
            f"{source}: the matrix is not that of a machine: {rows[a]} to {rows[b]} says "
            f"{matrix.cells[rows[a], rows[b]]}, and the other cells say {built[a][b]}"
        )
    return topology
