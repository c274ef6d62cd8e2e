"""GPU models by name: their compute capability."""

from __future__ import annotations

import re
from types import MappingProxyType

from flagcx.errors import TopologyError

#: Compute capability times ten by model.
MODELS = MappingProxyType(
    {
        "P100": 60,
        "V100": 70,
        "T4": 75,
        "A100": 80,
        "A800": 80,
        "A30": 80,
        "A10": 86,
        "A10G": 86,
        "A40": 86,
        "A6000": 86,
        "RTX 3090": 86,
        "L4": 89,
        "L40": 89,
        "L40S": 89,
        "RTX 4090": 89,
        "H100": 90,
        "H200": 90,
        "H800": 90,
        "H20": 90,
        "GH200": 90,
        "B200": 100,
        "GB200": 100,
        "B300": 103,
        "GB300": 103,
        "RTX 5090": 120,
        "GB10": 121,
        "RTX PRO 6000": 120,
    }
)
_IN_TEXT = re.compile(r"(?:NVIDIA|Tesla|GeForce|Quadro)[A-Za-z ]{0,24}[ -]([A-Z0-9]+(?: \d{4})?)\b")


def compute_capability(model: str) -> int:
    """Compute capability times ten of a model.

    Args:
        model: ``H100``, ``B300``, ``RTX 4090``, ...; case and ``NVIDIA`` don't matter.

    Raises:
        TopologyError: It is not known.

    Example:
        >>> compute_capability("nvidia gb200")
        100
    """
    name = " ".join(model.upper().removeprefix("NVIDIA").replace("-", " ").split())
    if name not in MODELS:
        raise TopologyError(
            f"GPU model {model[:40]!r} is not known; known are {', '.join(MODELS)}; or give the compute "
            "capability"
        )
    return MODELS[name]


def named_in(text: str) -> str:
    """The GPU model that a text names, as ``nvidia-smi -L`` does; "" for none, or several generations."""
    words = {
        word for match in _IN_TEXT.finditer(text) for word in (match.group(1), match.group(1).split()[0])
    }
    found = sorted(word for word in words if word in MODELS)
    return found[0] if found and len({MODELS[word] for word in found}) == 1 else ""
