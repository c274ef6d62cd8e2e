"""The call queues of one rank of a process group, made when they are first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flagcx.config import Config
from flagcx.errors import FlagcxError
from flagcx.interop.call_queue import CallQueue, DeviceQueue, HostQueue
from flagcx.interop.joining import GroupCommunicator, join
from flagcx.interop.tensors import is_ours

dispatch_modes = torch._C._len_torch_dispatch_stack
"""Modes that intercept all operations, such as that of fake tensors: they need torch's calls."""


class Membership:
    """The call queues of one rank of a process group, if flagcx makes its calls.

    ``tell`` is called with a description of each kind of call that flagcx does not serve.
    """

    def __init__(self, store: Any, rank: int, size: int, config: Config, tell: Callable[[str], None]) -> None:
        self._store, self._rank, self._size, self._config = store, rank, size, config
        self._tell = tell
        self._group: GroupCommunicator | None = None
        self._joined = False
        self._host: HostQueue | None = None
        self._devices: dict[int, DeviceQueue | None] = {}
        self._joining = threading.RLock()

    def host_queue(self) -> HostQueue | None:
        """The queue for tensors of the CPU; None if flagcx cannot join the ranks."""
        if not self._joined:
            with self._joining:
                if not self._joined:
                    self._group = join(self._store, self._rank, self._size, self._config)
                    self._host = None if self._group is None else HostQueue(self._group.comm)
                    self._joined = True
        return self._host

    def device_queue(self, device: int) -> DeviceQueue | None:
        """The queue for tensors of a GPU; all ranks together make it at the first call."""
        if device not in self._devices:
            if torch.cuda.is_current_stream_capturing():
                self._tell("calls on a GPU, the first of which is in a graph capture; make one before it")
                return None
            host = self.host_queue()
            with self._joining:
                if device not in self._devices:
                    self._devices[device] = None if host is None else self._join_devices(host, device)
        return self._devices[device]

    def _join_devices(self, host: HostQueue, device: int) -> DeviceQueue | None:
        queue, problem = None, ""
        try:
            from flagcx.kernels.cuda import load_cupy

            cupy = load_cupy()
        except FlagcxError as error:
            problem = str(error)
        problems = self._problems(host, problem)
        if not problems:
            try:
                queue = DeviceQueue(host.comm, cupy, device)
                queue.probe()
            except Exception as error:  # Every error must reach all ranks, so that they decide alike.
                problem = str(error) or type(error).__name__
            problems = self._problems(host, problem)
        if problems:
            self._tell(f"tensors on GPUs: {problems[0]}")
            return None
        return queue

    def _problems(self, host: HostQueue, problem: str) -> list[str]:
        """The problems of all ranks."""
        told: list[str] = []
        host.run(lambda: told.extend(host.comm.allgather_object(problem)), (), True)
        return [text for text in told if text]

    def queue_of(self, tensors: Sequence[Any]) -> CallQueue | None:
        """The queue for a call on these tensors; None if torch's own backend makes it."""
        first = tensors[0] if tensors else None
        if first is None or dispatch_modes() or not all(map(is_ours, tensors)):
            return None
        if len(tensors) == 1:
            return self.host_queue() if first.is_cpu else self.device_queue(first.get_device())
        if first.is_cpu:
            return self.host_queue() if all(t.is_cpu for t in tensors) else None
        device = first.device
        return self.device_queue(device.index) if all(t.device == device for t in tensors) else None

    def leave(self) -> None:
        """Waits for the started tasks, and closes the communicator: from now on no call has a queue."""
        with self._joining:
            self._joined, host, self._host = True, self._host, None
            devices, self._devices = self._devices, dict.fromkeys(self._devices)
            for queue in (host, *devices.values()):
                if queue is not None:
                    queue.close()
            if self._group is not None:
                self._group.close()
