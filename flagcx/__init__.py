"""flagcx: collective communication for NumPy and CuPy arrays.

    import flagcx as fc

    comm = fc.init()
    comm.allreduce(x)

See ``Communicator`` for all that ranks can do together, ``Algorithm`` for how, and ``errors`` for what can
go wrong. A name is imported when it is first used, so that ``import flagcx`` itself costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flagcx._version import __version__ as __version__

if TYPE_CHECKING:
    from flagcx import compression
    from flagcx._launch.notebook import launch
    from flagcx.algorithms import Algorithm, register, unregister
    from flagcx.communicator import Communicator
    from flagcx.config import Config
    from flagcx.cost.simulation import simulate
    from flagcx.dtypes import scaled_sum
    from flagcx.errors import (
        AbortedError,
        ArgumentError,
        ArrayError,
        BootstrapError,
        CommunicationError,
        CommunicatorError,
        FlagcxError,
        LaunchError,
        MismatchError,
        MissingDependencyError,
        OperationError,
        PeerDiedError,
        PeerTimeoutError,
        RankError,
        ResourceError,
        ScheduleError,
        TopologyError,
    )
    from flagcx.executor.work import Work
    from flagcx.gradients import GradientSynchronizer
    from flagcx.gradients.advise import Advice, advise
    from flagcx.interop import enhance_process_group, restore_process_group
    from flagcx.memory import memory_stats
    from flagcx.schedule.draw import draw
    from flagcx.schedule.verify import verify
    from flagcx.topology import Topology, plot_topology, preset
    from flagcx.world import get_topology, init

_HOMES = {
    "AbortedError": "errors",
    "Advice": "gradients.advise",
    "Algorithm": "algorithms",
    "ArgumentError": "errors",
    "ArrayError": "errors",
    "BootstrapError": "errors",
    "CommunicationError": "errors",
    "Communicator": "communicator",
    "CommunicatorError": "errors",
    "Config": "config",
    "FlagcxError": "errors",
    "GradientSynchronizer": "gradients",
    "LaunchError": "errors",
    "MismatchError": "errors",
    "MissingDependencyError": "errors",
    "OperationError": "errors",
    "PeerDiedError": "errors",
    "PeerTimeoutError": "errors",
    "RankError": "errors",
    "ResourceError": "errors",
    "ScheduleError": "errors",
    "Topology": "topology",
    "TopologyError": "errors",
    "Work": "executor.work",
    "advise": "gradients.advise",
    "compression": "compression",
    "draw": "schedule.draw",
    "enhance_process_group": "interop",
    "get_topology": "world",
    "init": "world",
    "launch": "_launch.notebook",
    "memory_stats": "memory",
    "plot_topology": "topology",
    "preset": "topology",
    "register": "algorithms",
    "restore_process_group": "interop",
    "scaled_sum": "dtypes",
    "simulate": "cost.simulation",
    "unregister": "algorithms",
    "verify": "schedule.verify",
}

__all__ = [
    "AbortedError",
    "Advice",
    "Algorithm",
    "ArgumentError",
    "ArrayError",
    "BootstrapError",
    "CommunicationError",
    "Communicator",
    "CommunicatorError",
    "Config",
    "FlagcxError",
    "GradientSynchronizer",
    "LaunchError",
    "MismatchError",
    "MissingDependencyError",
    "OperationError",
    "PeerDiedError",
    "PeerTimeoutError",
    "RankError",
    "ResourceError",
    "ScheduleError",
    "Topology",
    "TopologyError",
    "Work",
    "advise",
    "compression",
    "draw",
    "enhance_process_group",
    "get_topology",
    "init",
    "launch",
    "memory_stats",
    "plot_topology",
    "preset",
    "register",
    "restore_process_group",
    "scaled_sum",
    "simulate",
    "unregister",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flagcx' has no attribute {name!r}")
    home = importlib.import_module(f"flagcx.{_HOMES[name]}")
    value = home if name == _HOMES[name] else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
