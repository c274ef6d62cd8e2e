"""Reads GPUs and their NVLinks from the driver, through NVML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flagcx.topology.builder import Notes

_TO_SWITCH = 2
_HIDDEN_DOMAIN = "ffffffff"


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """The driver's facts about one GPU.

    ``links`` has the remote end of each active NVLink: a PCI address, "switch:<address>", or "switch:" for
    one that the driver hides.
    """

    index: int  # NVML's, which follows the PCI address
    name: str
    bus_id: str  # as the kernel writes it, 0000:0f:00.0
    sm: int | None  # compute capability times ten
    links: tuple[str, ...]


def load() -> Any | None:
    """The pynvml module, or None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def read_gpus(nvml: Any, notes: Notes) -> list[DriverGpu] | None:
    """The GPUs that the driver knows.

    Args:
        nvml: The pynvml module, or one that behaves like it.
        notes: Counts the facts that could not be read.

    Returns:
        GPUs by number; None where there is no driver to ask.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        notes.add(f"the NVIDIA driver cannot be asked ({error})")
        return None
    try:
        return _read(nvml, notes)
    except nvml.NVMLError as error:
        notes.add(f"the NVIDIA driver does not list its GPUs ({error})")
        return None
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, notes: Notes) -> list[DriverGpu]:
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = _bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId)
        except nvml.NVMLError as error:
            notes.add(f"GPU {index} is left out: the driver says {error}")
            continue
        name = _ask(nvml, nvml.nvmlDeviceGetName, handle)
        capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
        sm = capability[0] * 10 + capability[1] if capability else None
        gpus.append(DriverGpu(index, _text(name or ""), bus_id, sm, _links(nvml, handle, notes)))
    return gpus


def _links(nvml: Any, handle: Any, notes: Notes) -> tuple[str, ...]:
    ends = []
    # NVML refuses the first number that a GPU does not have.
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        state = _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break
        if state != 1:
            notes.add("an NVLink of a GPU is down")
            continue
        remote = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        kind = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        address = _bus_id(remote.busId) if remote is not None else ""
        hidden = not address or address.startswith(_HIDDEN_DOMAIN)
        if kind == _TO_SWITCH or (hidden and kind is None):
            ends.append("switch:" if hidden else f"switch:{address}")
        elif hidden:
            notes.add("an NVLink's remote end cannot be read, and it is left out")
        else:
            ends.append(address)
    return tuple(ends)


def _ask(nvml: Any, function: Any, *args: Any) -> Any:
    """The result of a call, or None where this GPU or driver does not support it."""
    try:
        return function(*args)
    except nvml.NVMLError:
        return None


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _bus_id(value: bytes | str) -> str:
    """NVML's ``00000000:0F:00.0`` as the kernel writes it, ``0000:0f:00.0``."""
    domain, _, rest = _text(value).strip("\0 ").lower().partition(":")
    short = domain[4:] if len(domain) == 8 and domain.startswith("0000") else domain
    return f"{short}:{rest}" if rest else ""
