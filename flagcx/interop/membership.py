"""This rank's part in flagcx's communicator for a process group: made when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flagcx.config import Config
from flagcx.errors import FlagcxError
from flagcx.interop.joining import Bond, join
from flagcx.interop.lanes import DeviceLane, HostLane, Lane
from flagcx.interop.tensors import is_ours

dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many modes see every operation, such as one for tensors without data: those see torch's own calls."""


class Membership:
    """Where the calls of one rank of a process group run, if flagcx runs them.

    Args:
        store: The process group's store.
        rank: This rank of the group.
        size: Number of ranks.
        config: Settings.
        tell: Called with what flagcx cannot do for this group.
    """

    def __init__(self, store: Any, rank: int, size: int, config: Config, tell: Callable[[str], None]) -> None:
        self._store, self._rank, self._size, self._config = store, rank, size, config
        self._tell = tell
        self._bond: Bond | None = None
        self._joined = False
        self._host: HostLane | None = None
        self._devices: dict[int, DeviceLane | None] = {}
        self._joining = threading.RLock()

    def host_lane(self) -> HostLane | None:
        """Where calls on tensors of the CPU run; None if flagcx cannot join the ranks."""
        if not self._joined:
            with self._joining:
                if not self._joined:
                    self._bond = join(self._store, self._rank, self._size, self._config)
                    self._host = None if self._bond is None else HostLane(self._bond.comm)
                    self._joined = True
        return self._host

    def device_lane(self, device: int) -> DeviceLane | None:
        """Where calls on tensors of a GPU run; made, by all ranks together, at the first of them."""
        if device not in self._devices:
            if torch.cuda.is_current_stream_capturing():
                self._tell("calls on a GPU, the first of which is in a graph capture; make one before it")
                return None
            host = self.host_lane()
            with self._joining:
                if device not in self._devices:
                    self._devices[device] = None if host is None else self._join_devices(host, device)
        return self._devices[device]

    def _join_devices(self, host: HostLane, device: int) -> DeviceLane | None:
        lane, problem = None, ""
        try:
            from flagcx.kernels.cuda import load_cupy

            cupy = load_cupy()
        except FlagcxError as error:
            problem = str(error)
        problems = self._problems(host, problem)
        if not problems:
            try:
                lane = DeviceLane(host.comm, cupy, device)
                lane.probe()
            except Exception as error:  # Whatever it is, all ranks must learn of it and decide alike.
                problem = str(error) or type(error).__name__
            problems = self._problems(host, problem)
        if problems:
            self._tell(f"tensors on GPUs: {problems[0]}")
            return None
        return lane

    def _problems(self, host: HostLane, problem: str) -> list[str]:
        """What the ranks tell each other that they cannot do."""
        told: list[str] = []
        host.run(lambda: told.extend(host.comm.allgather_object(problem)), (), True)
        return [text for text in told if text]

    def lane_of(self, tensors: Sequence[Any]) -> Lane | None:
        """Where a call on these tensors runs; None where torch's own backend makes it."""
        first = tensors[0] if tensors else None
        if first is None or dispatch_modes() or not all(map(is_ours, tensors)):
            return None
        if first.is_cpu:
            return self.host_lane() if all(t.is_cpu for t in tensors) else None
        device = first.device
        return self.device_lane(device.index) if all(t.device == device for t in tensors) else None

    def leave(self) -> None:
        """Ends flagcx's part: from now on no call has a lane. Waits for what was started. Idempotent."""
        with self._joining:
            self._joined, host, self._host = True, self._host, None
            devices, self._devices = self._devices, dict.fromkeys(self._devices)
            for lane in (host, *devices.values()):
                if lane is not None:
                    lane.close()
            if self._bond is not None:
                self._bond.close()
