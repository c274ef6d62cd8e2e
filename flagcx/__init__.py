"""flagcx: collective communication for NumPy and CuPy arrays.

    import flagcx as fc

    comm = fc.init()
    comm.allreduce(x)

See ``Communicator`` for all that ranks can do together, ``Algorithm`` for how, and ``errors`` for what can
go wrong. A name is imported when it is first used, so that ``import flagcx`` itself costs next to nothing.

The way of one call, and where to read on; each room imports only from those below it::

    cli/ interop/ gradients/ world.py    the command line, other frameworks, training, fc.init()
    communicator/  comm.allreduce(x)     operations.py lists the calls, caller.py makes them; a call that
                                         repeats goes from here straight to its plan
    compression/ fusion/                 codecs, and many small arrays in few messages
    executor/      executor.find, .run   the plans of a communicator, and their order: now or in a group
    selection/     selector.choose       -> a candidate, by rule, measured table or model; explain and tune
    cost/ profiler/                      what schedules cost on a network; records of what ran
    diagnosis/     flagcx status         the page of each rank; which one keeps the others waiting
    transport/     transport.compile     -> a plan: shared_memory/ mpi threads nccl/ peer_memory/, listed in
                                         registry.py; base.py says how to add one
    algorithms/    candidate.build       -> a schedule: ring, tree, ...; topology/: the machine and its rings
    schedule/      programs of steps     composed, verified, drawn; kernels/: CUDA; bootstrap/: how ranks meet

An algorithm is data: a pure function that returns a schedule, which says what each rank sends to whom in
which step, and what is added where. The same schedule is verified, run, simulated and drawn.
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
    from flagcx.interop.mpi import from_mpi
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
    "from_mpi": "interop.mpi",
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
    "from_mpi",
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


if not TYPE_CHECKING:  # for which any name would be there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'flagcx' has no attribute {name!r}{_hint(name)}", name=name)
        home = importlib.import_module(f"flagcx.{_HOMES[name]}")
        value = home if name == _HOMES[name] else getattr(home, name)
        globals()[name] = value
        return value


def _hint(name: str) -> str:
    if name.startswith("_"):  # protocols of Python's, and tools, ask for many of these
        return ""
    from flagcx.migration import hint_for

    return hint_for(name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
