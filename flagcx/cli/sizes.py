"""Reads sizes and machines as the command line takes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from flagcx.errors import ArgumentError, TopologyError

if TYPE_CHECKING:
    from flagcx.topology import Topology

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?(?:[eE]\+?\d{1,2})?)\s*(?:([kKmMgGtT])(i?[bB])?|[bB])?\s*")
_POWERS = "kmgt"
_MOST = 1 << 60


def parse_nbytes(text: str) -> int:
    """Reads a size in bytes: ``4096``, ``1e6``, ``64MiB``, ``64M``, ``10MB``.

    K, M, G and T alone are powers of 1024, as nccl-tests reads them, and so are KiB and so on; KB, MB, GB and
    TB are powers of 1000.

    Raises:
        ArgumentError: It is no size, or no whole number of bytes.

    Example:
        >>> parse_nbytes("64MiB") == parse_nbytes("64M") == 64 << 20, parse_nbytes("10MB")
        (True, 10000000)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ArgumentError(
            f"{text!r} is not a size; write bytes as 4096, 1e6, 64KiB, 64M (MiB) or 10MB (10^6)"
        )
    number, letter, unit = match.groups()
    base = 1000 if unit and unit.lower() == "b" else 1024
    value = float(number) * (base ** (_POWERS.index(letter.lower()) + 1) if letter else 1)
    if value > _MOST or value != int(value):
        raise ArgumentError(f"{text!r} is {value:g} bytes; expected a whole number up to 2^60")
    return int(value)


def machine_for(name: str, ranks: int | None) -> Topology:
    """The topology of a preset's name or a file, as a cluster with a GPU for each of the ``ranks``.

    A file is NCCL's XML or the output of ``nvidia-smi topo -m``. Without ``ranks`` it is one machine.

    Raises:
        TopologyError: There is no such preset or file, it has no GPU, or it cannot make a cluster.
    """
    from flagcx.topology import cluster, files, preset, preset_names

    if name in preset_names():
        machine = preset(name)
    elif Path(name).exists():
        machine = files.read(Path(name))
    else:
        raise TopologyError(
            f"--topology {name!r} is neither a file nor a preset; presets are {', '.join(preset_names())}"
        )
    width = len(machine.gpus)
    if not width:
        raise TopologyError(f"{machine!r} has no GPU, so no place for a rank")
    return machine if ranks is None or ranks <= width else cluster(machine, -(-ranks // width))
