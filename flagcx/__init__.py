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

if TYPE_CHECKING:
    from flagcx._launch.notebook import launch
    from flagcx.algorithms import Algorithm, register, unregister
    from flagcx.communicator import Communicator
    from flagcx.config import Config
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
    from flagcx.topology import Topology, plot_topology, preset
    from flagcx.work import Work
    from flagcx.world import get_topology, init

__version__ = "0.1.0"

_HOMES = {
    "AbortedError": "errors",
    "Algorithm": "algorithms",
    "ArgumentError": "errors",
    "ArrayError": "errors",
    "BootstrapError": "errors",
    "CommunicationError": "errors",
    "Communicator": "communicator",
    "CommunicatorError": "errors",
    "Config": "config",
    "FlagcxError": "errors",
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
    "Work": "work",
    "get_topology": "world",
    "init": "world",
    "launch": "_launch.notebook",
    "plot_topology": "topology",
    "preset": "topology",
    "register": "algorithms",
    "scaled_sum": "dtypes",
    "unregister": "algorithms",
}

__all__ = [
    "AbortedError",
    "Algorithm",
    "ArgumentError",
    "ArrayError",
    "BootstrapError",
    "CommunicationError",
    "Communicator",
    "CommunicatorError",
    "Config",
    "FlagcxError",
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
    "get_topology",
    "init",
    "launch",
    "plot_topology",
    "preset",
    "register",
    "scaled_sum",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flagcx' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"flagcx.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
