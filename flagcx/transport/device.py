"""The GPU of a rank, the other ranks that use it, and the addresses of arrays on it."""

from __future__ import annotations

import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flagcx.config import set_default
from flagcx.errors import ArrayError, MissingDependencyError, ResourceError
from flagcx.kernels.cuda import load_cupy
from flagcx.transport.stream_order import StreamOrder

_DRIVER = "/dev/nvidiactl"
_MULTI_RANK_SINCE = 23000


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """A rank's GPU, as it describes it to the other ranks.

    Attributes:
        host: Name of the host.
        pid: Process of the rank.
        device: The number of the GPU in that process.
        uuid: The unique identifier of the GPU, or of its part if it is partitioned.
        nccl: Version of NCCL as an integer: 23007 is 2.30.7.
        pci_bus_id: PCI address of the GPU, such as ``0000:0c:00.0``; "" where unknown.
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
    """The number of the GPU for a local rank, of ``visible`` ones; ranks may use one together if ``shared``.

    Raises:
        ResourceError: There are fewer GPUs than ranks.

    Example:
        >>> choose_device(5, 4, shared=True)
        1
    """
    if local_rank < visible:
        return local_rank
    if shared or visible == 1:
        # A process may see only the GPU that it was given; ``check_devices`` finds out whether it is shared.
        return local_rank % visible
    raise ResourceError(
        f"local rank {local_rank} needs a GPU of its own, and this process sees {visible} of them; "
        f"start at most {visible} ranks on this host, or let ranks share GPUs: flagcx run --share-gpu"
    )


def bind_local_device(local_rank: int, shared: bool) -> int | None:
    """Makes the rank's GPU the current device of this thread, where there is one.

    A rank without a GPU may still use NumPy arrays, so ``check_devices`` refuses it only when it makes a call
    with an array on a GPU.

    Returns:
        The device's number, or None if there is no GPU for the rank, or no CuPy.
    """
    if local_rank == 0:
        return 0  # CUDA's initial device: no need to load CuPy for it.
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
    """Refuses a set of ranks that NCCL could not connect; they may use one GPU together if ``shared``.

    Raises:
        ResourceError: Ranks share a GPU without ``shared``, or use different versions of NCCL.
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
    """The largest number of ranks that use one GPU."""
    return max(map(len, _users(identities).values()))


def prepare_sharing(cupy: Any, device: int, identities: Sequence[DeviceIdentity], rank: int) -> None:
    """Prepares NCCL's settings for ranks that share a GPU, before NCCL reads them."""
    crowd = most_on_one_gpu(identities)
    if crowd == 1:
        return
    if identities[rank].nccl >= _MULTI_RANK_SINCE:
        set_default("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    else:
        # NCCL accepts ranks that seem to be on different hosts, and connects them through sockets.
        set_default("NCCL_HOSTID", f"rank-{rank}")
        set_default("NCCL_SOCKET_IFNAME", "lo")
    # The kernels of all ranks wait for each other, so they must fit on the GPU together.
    processors = cupy.cuda.Device(device).attributes["MultiProcessorCount"]
    set_default("NCCL_MAX_CTAS", str(max(1, processors // (2 * crowd))))


def surroundings_of(
    cupy: Any, device: int, identities: Sequence[DeviceIdentity], nccl_version: int
) -> dict[str, dict[str, object]]:
    """What measured times depend on: ``machine`` (GPUs, and ranks on each) and ``versions``."""
    users, runtime = _users(identities), cupy.cuda.runtime
    name = runtime.getDeviceProperties(device)["name"]
    machine: dict[str, object] = {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "gpus": len(users),
        "ranks_on_a_gpu": most_on_one_gpu(identities),
    }
    versions: dict[str, object] = {
        "nccl": str(nccl_version),
        "cupy": str(cupy.__version__),
        "driver": str(runtime.driverGetVersion()),
    }
    return {"machine": machine, "versions": versions}


def _users(identities: Sequence[DeviceIdentity]) -> dict[tuple[str, str], list[int]]:
    """The ranks of each GPU."""
    users = defaultdict(list)
    for rank, identity in enumerate(identities):
        users[identity.host, identity.uuid].append(rank)
    return users


def address(array: Any, order: StreamOrder) -> int:
    """Address of an array on the rank's device; 0 for None.

    Raises:
        ArrayError: The array is on another device.
    """
    if array is None:
        return 0
    data = array.data
    if data.device_id != order.device:
        raise ArrayError(
            f"the array is on device {data.device_id}, but rank {order.rank} uses device {order.device}; "
            f"allocate it under cupy.cuda.Device({order.device}), which fc.init() makes the current one"
        )
    return data.ptr


def check_alignment(alignment: int, *addresses: int) -> None:
    """Raises ArrayError if an address is not a multiple of ``alignment`` bytes."""
    for at in addresses:
        if at % alignment:
            raise ArrayError(
                f"an array begins at address {at:#x}, and its dtype needs a multiple of {alignment} bytes; "
                f"pass a copy of it, x.copy()"
            )
