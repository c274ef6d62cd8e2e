"""Bandwidths and latencies of links, and the values assumed where the source names none.

All bandwidths are GB/s (10^9 bytes) for each direction, as a transfer gets them, which is less than the
data sheet promises: they follow the constants that NCCL plans with, so that plans and costs can be compared.

Source: NCCL's topology search (``graph/topo.h``) for NVLink, PCIe, sockets and NICs; RCCL's for xGMI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

#: GB/s for each NVLink and direction, by the least compute capability (times ten) that has it.
_NVLINK_BY_SM = ((100, 40.1), (90, 20.6), (86, 12.0), (70, 20.0), (60, 18.0))
#: GB/s for each xGMI link and direction, by the least ``gcn`` number that has it.
_XGMI_BY_GCN = ((0x940, 48.0), (0x90A, 36.0), (0x900, 24.0))
#: GB/s for each NVLink and direction by the makers' data sheets, by the least compute capability that has it.
_NVLINK_SPEC_BY_SM = ((100, 50.0), (90, 25.0), (86, 14.0625), (70, 25.0), (60, 20.0))
#: The same for xGMI.
_XGMI_SPEC_BY_GCN = ((0x940, 64.0), (0x90A, 50.0), (0x900, 46.0))
#: GB/s of a GPU's memory, of the least of its generation, by the least compute capability (times ten).
_MEMORY_BY_SM = (
    (121, 273.0),
    (120, 1300.0),
    (100, 8000.0),
    (90, 3350.0),
    (86, 700.0),
    (80, 1555.0),
    (75, 320.0),
    (70, 900.0),
)
DEFAULT_MEMORY_GB_PER_S = 900.0
#: Units of width/80 GB/s for each PCIe generation, by its GT/s.
_PCIE_UNITS_BY_GT = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}

#: Assumed where a file or driver names no generation: PCIe 3.0, 16 lanes wide.
DEFAULT_PCIE_GT = 8.0
DEFAULT_PCIE_WIDTH = 16
#: For the link between a PCIe root and its CPU, which limits nothing.
UNBOUND_GB_PER_S = 1000.0
#: Assumed for a link between sockets of an unnamed CPU.
DEFAULT_SOCKET_GB_PER_S = 10.0
#: Assumed for a NIC whose speed is not known, as NCCL does: 10 Gbit/s.
DEFAULT_NIC_GB_PER_S = 1.25
#: Assumed for an NVLink of an unnamed GPU.
DEFAULT_NVLINK_GB_PER_S = 20.0
DEFAULT_XGMI_GB_PER_S = 24.0

#: One way over one link, in microseconds, by kind. A path's latency is the sum over its links.
LATENCY_US = MappingProxyType(
    {"nvlink": 0.6, "xgmi": 0.6, "c2c": 0.3, "pcie": 0.5, "socket": 0.5, "network": 1.35}
)
NVSWITCH_LATENCY_US = 0.3


def nvlink_gb_per_s(sm: int | None) -> float | None:
    """Bandwidth of one NVLink in one direction, GB/s.

    Args:
        sm: Compute capability times ten (80 for an A100), or None where it is unknown.

    Returns:
        GB/s, or None where ``sm`` is unknown or has no NVLink in the table.
    """
    return _by_least(sm, _NVLINK_BY_SM)


def spec_gb_per_s(sm: int | None, gcn: str) -> float | None:
    """Bandwidth of one NVLink or xGMI link in one direction by the data sheet, GB/s.

    ``nvlink_gb_per_s`` and ``xgmi_gb_per_s`` have what NCCL and RCCL plan with, which is less.

    Args:
        sm: Compute capability times ten, or None.
        gcn: AMD's name of the architecture, or "".
    """
    if gcn:
        return _by_gcn(gcn, _XGMI_SPEC_BY_GCN)
    return _by_least(sm, _NVLINK_SPEC_BY_SM)


def pcie_gt_of(sm: int) -> float:
    """GT/s of the PCIe links of servers with GPUs of a compute capability (times ten)."""
    return 8.0 if sm < 80 else 16.0 if sm < 90 else 32.0


def may_have_nvlink(sm: int) -> bool:
    """Whether servers with several GPUs of a compute capability (times ten) as a rule have NVLinks."""
    return sm in (60, 70, 75, 80, 86, 90) or 100 <= sm < 110


def memory_gb_per_s(sm: int | None) -> float:
    """Bandwidth of a GPU's memory, GB/s, by its compute capability times ten; a V100's where unknown."""
    return _by_least(sm, _MEMORY_BY_SM) or DEFAULT_MEMORY_GB_PER_S


def xgmi_gb_per_s(gcn: str) -> float | None:
    """Bandwidth of one xGMI link in one direction, GB/s, by a name like ``gfx90a`` or ``gfx942:xnack-``.

    Returns:
        GB/s, or None where the name is not one of a GPU with xGMI.
    """
    return _by_gcn(gcn, _XGMI_BY_GCN)


def _by_gcn(gcn: str, table: tuple[tuple[int, float], ...]) -> float | None:
    digits = gcn.lower().removeprefix("gfx").partition(":")[0]
    if not re.fullmatch(r"[0-9a-f]{3}", digits):
        return None
    return _by_least(int(digits, 16), table)


def _by_least(value: int | None, table: tuple[tuple[int, float], ...]) -> float | None:
    """The first speed of a table whose least value is reached; None where none is, or nothing is known."""
    return next((speed for least, speed in table if value is not None and value >= least), None)


def parse_pcie_gt(text: str) -> float | None:
    """Reads a PCIe speed like ``16 GT/s`` or ``32.0 GT/s PCIe``.

    Returns:
        GT/s for each lane, or None for a speed that is no PCIe generation's ("", "Unknown").
    """
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*GT/s(?:\s+PCIe)?\s*", text)
    if match is None:
        return None
    speed = float(match.group(1))
    return speed if speed in _PCIE_UNITS_BY_GT else None


def pcie_gb_per_s(gt: float | None = None, width: int = 0) -> float:
    """Bandwidth of a PCIe link in one direction, GB/s.

    Args:
        gt: GT/s for each lane, one of 2.5, 5, 8, 16, 32, 64; None where it is not known.
        width: Lanes; 0 where they are not known. For what is not known the default is taken.

    Example:
        >>> pcie_gb_per_s(16.0, 16)
        24.0
    """
    return (width or DEFAULT_PCIE_WIDTH) * _PCIE_UNITS_BY_GT[gt or DEFAULT_PCIE_GT] / 80


def pcie_form(bandwidth_gb_per_s: float) -> tuple[float, int]:
    """The narrowest-generation PCIe link of a bandwidth: (GT/s, lanes), as near as there is one."""
    forms = [(gt, width) for gt in sorted(_PCIE_UNITS_BY_GT) for width in (16, 8, 4, 2, 1)]
    return min(forms, key=lambda form: abs(pcie_gb_per_s(*form) - bandwidth_gb_per_s))


def socket_speed(cpu: Mapping[str, str]) -> float | None:
    """Bandwidth between two sockets (or NUMA nodes) of a CPU in one direction, GB/s.

    Args:
        cpu: ``arch``, ``vendor``, ``familyid`` and ``modelid``, as NCCL's XML has them, where known.

    Returns:
        GB/s, or None for a CPU that is not in the table.
    """
    arch, vendor = cpu.get("arch", ""), cpu.get("vendor", "")
    if arch in ("arm64", "aarch64"):
        return 6.0
    if arch.startswith("ppc"):
        return 32.0
    if vendor == "AuthenticAMD":
        return 16.0
    family, model = (whole(cpu.get(name, "")) for name in ("familyid", "modelid"))
    if vendor == "GenuineIntel" and model is not None and family == 6:
        return next(
            (speed for least, speed in ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0)) if model >= least), 6.0
        )
    return None


def whole(text: str) -> int | None:
    """A whole number of a file, or None for any other text."""
    return int(text) if text.isdecimal() and len(text) < 9 else None


def nic_gb_per_s(speed_mbit_per_s: float) -> float:
    """Bandwidth of a network port in one direction, GB/s, from Mbit/s."""
    return speed_mbit_per_s / 8000
