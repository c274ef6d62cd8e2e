"""Which GPU a rank uses, and who else uses it."""

from __future__ import annotations

import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flagcx.errors import ArrayError, MissingDependencyError, ResourceError
from flagcx.kernels.cuda import load_cupy

_DRIVER = "/dev/nvidiactl"


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """A rank's GPU, as the other ranks have to know it.

    Attributes:
        host: Tells hosts apart.
        pid: Process of the rank.
        device: The number of the GPU in that process.
        uuid: Tells the GPUs of the world apart, or the parts of a partitioned one.
        nccl: Version of NCCL, as it counts: 23007 is 2.30.7.
        pci_bus_id: Where the GPU is: ``0000:0c:00.0``; "" where unknown.
    """

    host: str
    pid: int
    device: int
    uuid: str
    nccl: int
    pci_bus_id: str = ""

    def pack(self) -> bytes:
        """The identity as bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def unpack(data: bytes) -> DeviceIdentity:
        """The inverse of ``pack``."""
        return DeviceIdentity(**json.loads(data))


def choose_device(local_rank: int, visible: int, shared: bool) -> int:
    """The GPU for a rank of a host: that of its local number, if the process sees so many.

    Args:
        local_rank: The rank's number among those of its host.
        visible: GPUs that the process sees.
        shared: Whether ranks may use one GPU together.

    Raises:
        ResourceError: There are fewer GPUs than ranks.

    Example:
        >>> choose_device(5, 4, shared=True)
        1
    """
    if local_rank < visible:
        return local_rank
    if shared or visible == 1:
        # A process that sees one GPU may have been given that one; whether it is shared, its uuid tells.
        return local_rank % visible
    raise ResourceError(
        f"local rank {local_rank} needs a GPU of its own, and this process sees {visible} of them; "
        f"start at most {visible} ranks on this host, or let ranks share GPUs: flagcx run --share-gpu"
    )


def bind_local_device(local_rank: int, shared: bool) -> int | None:
    """Makes the rank's GPU the current device of this thread, where there is one.

    Ranks with no GPU for them may still work with NumPy arrays, so they are refused only when they come
    with an array on a GPU; see ``check_devices``.

    Args:
        local_rank: The rank's number among those of its host.
        shared: Whether ranks may use one GPU together.

    Returns:
        The device's number, or None if there is no GPU for the rank, or no CuPy.
    """
    if local_rank == 0:
        return 0  # The device that CUDA begins with: no need to load CuPy for it.
    if not os.path.exists(_DRIVER) or importlib.util.find_spec("cupy") is None:
        return None
    try:
        cupy = load_cupy()
        device = choose_device(local_rank, cupy.cuda.runtime.getDeviceCount(), shared)
    except (MissingDependencyError, ResourceError):
        return None
    cupy.cuda.Device(device).use()
    return device


def identify_device(cupy: Any, device: int, host: str, nccl_version: int) -> DeviceIdentity:
    """Describes a device of this process to the other ranks."""
    runtime = cupy.cuda.runtime
    uuid = bytes(runtime.getDeviceProperties(device)["uuid"]).hex()
    bus_id = runtime.deviceGetPCIBusId(device)
    return DeviceIdentity(host, os.getpid(), device, uuid, nccl_version, bus_id)


def check_devices(identities: Sequence[DeviceIdentity], shared: bool) -> None:
    """Refuses a set of ranks that NCCL could not connect.

    Args:
        identities: Those of all ranks, in their order.
        shared: Whether ranks may use one GPU together.

    Raises:
        ResourceError: Ranks share a GPU without having been told to, or use different versions of NCCL.
    """
    versions = {i.nccl for i in identities}
    if len(versions) > 1:
        each = ", ".join(f"rank {r}: {i.nccl}" for r, i in enumerate(identities))
        raise ResourceError(
            f"all ranks must use one version of NCCL, got {each}; install the same one everywhere"
        )
    users = _users(identities)
    doubled = {gpu: ranks for gpu, ranks in users.items() if len(ranks) > 1}
    if doubled and not shared:
        (_, uuid), ranks = next(iter(doubled.items()))
        raise ResourceError(
            f"ranks {', '.join(map(str, ranks))} use one GPU (device {identities[ranks[0]].device}, "
            f"uuid {uuid}); give each its own (at most one rank a GPU; CUDA_VISIBLE_DEVICES), or let them "
            f"share it: flagcx run -n {len(identities)} --share-gpu script.py"
        )


def most_on_one_gpu(identities: Sequence[DeviceIdentity]) -> int:
    """How many ranks use the GPU that most ranks use."""
    return max(map(len, _users(identities).values()))


def _users(identities: Sequence[DeviceIdentity]) -> dict[tuple[str, str], list[int]]:
    """The ranks of each GPU."""
    users = defaultdict(list)
    for rank, identity in enumerate(identities):
        users[identity.host, identity.uuid].append(rank)
    return users


def check_home(array_device: int, device: int, rank: int) -> None:
    """Raises ArrayError if an array does not live on the rank's device."""
    if array_device != device:
        raise ArrayError(
            f"the array is on device {array_device}, but rank {rank} uses device {device}; allocate it under "
            f"cupy.cuda.Device({device}), which fc.init() makes the current one"
        )
