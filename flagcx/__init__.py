"""flagcx: collective communication for NumPy and CuPy arrays.

    import flagcx as fc

    comm = fc.init()
    comm.allreduce(x)

See ``Communicator`` for all that ranks can do together, ``Algorithm`` for how, and ``errors`` for what can
go wrong.
"""

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
from flagcx.launch import launch
from flagcx.work import Work
from flagcx.world import init

__version__ = "0.1.0"

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
    "TopologyError",
    "Work",
    "init",
    "launch",
    "register",
    "scaled_sum",
    "unregister",
]
