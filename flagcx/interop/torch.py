"""flagcx under ``torch.distributed``. Importing this registers ``backend="flagcx"``.

    import torch.distributed as dist
    import flagcx as fc

    dist.init_process_group("nccl")     # or "gloo"
    fc.enhance_process_group()          # from now on its collectives are flagcx's

or, from the start::

    import flagcx.interop.torch
    dist.init_process_group("flagcx")

and for gradients on a slow link::

    model.register_comm_hook(None, flagcx.interop.torch.ddp_hook(compression="int8"))
"""

from __future__ import annotations

from flagcx.errors import MissingDependencyError

try:
    import torch.distributed as _distributed
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "fc.enhance_process_group and flagcx.interop.torch need PyTorch, which is not installed: "
        "pip install 'flagcx[torch]'"
    ) from error
if not _distributed.is_available():
    raise MissingDependencyError(
        "this PyTorch is built without torch.distributed, which flagcx.interop.torch needs; install another: "
        "pip install 'flagcx[torch]'"
    )

from flagcx.interop.enhance import enhance_process_group, register_backend, restore_process_group
from flagcx.interop.fuse_layers import fuse_rmsnorm, unfuse_rmsnorm
from flagcx.interop.hooks import ddp_hook
from flagcx.interop.process_group import FlagcxProcessGroup
from flagcx.interop.row_operators import allreduce_rmsnorm, register_operators

__all__ = [
    "FlagcxProcessGroup",
    "allreduce_rmsnorm",
    "ddp_hook",
    "enhance_process_group",
    "fuse_rmsnorm",
    "restore_process_group",
    "unfuse_rmsnorm",
]

register_backend()
register_operators()
