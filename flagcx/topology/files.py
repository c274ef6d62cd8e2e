"""Reads a machine from a file of any kind that is known, by looking at how it begins."""

from __future__ import annotations

from pathlib import Path

from flagcx.topology import markup, nccl_xml, nvidia_smi
from flagcx.topology.topology import Topology


def read(path: str | Path) -> Topology:
    """Reads NCCL's topology XML, or the output of ``nvidia-smi topo -m``.

    Args:
        path: The file.

    Raises:
        TopologyError: The file cannot be opened or is neither; names file, place and reason.
    """
    text = markup.read_text(path, "a topology (NCCL's XML, or the output of nvidia-smi topo -m)")
    if text.lstrip().startswith("<"):
        return nccl_xml.parse(text, str(path))
    return nvidia_smi.parse(text, str(path))
