"""Reads a machine from a file of any kind that is known, by looking at how it begins."""

from __future__ import annotations

from pathlib import Path

from flagcx.topology import markup, nccl_xml, nvidia_smi, pasted, smi_text
from flagcx.topology.topology import Topology


def read(path: str | Path, *, sm: int | None = None) -> Topology:
    """Reads NCCL's topology XML, or the output of ``nvidia-smi topo -m``, with or without text around it.

    Args:
        path: The file.
        sm: Compute capability times ten of the GPUs, where the file does not name it.

    Raises:
        TopologyError: The file cannot be opened or is neither; names file, place and reason.
    """
    text = markup.read_text(path)
    if pasted.is_xml(text) or (text.lstrip().startswith("<") and not smi_text.has_table(text)):
        return nccl_xml.parse(text, str(path), sm=sm)
    return nvidia_smi.parse(text, str(path), sm=sm)
