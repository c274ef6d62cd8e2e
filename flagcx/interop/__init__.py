"""flagcx in other frameworks. A framework is imported only by the functions that need it."""

from __future__ import annotations

from typing import Any


def enhance_process_group(group: Any = None, **options: Any) -> Any:
    """Has a process group of ``torch.distributed`` communicate through flagcx from now on.

    Call it on every rank of the group, after ``dist.init_process_group``. Then ``dist.all_reduce``,
    ``reduce``, ``broadcast``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``gather``, ``scatter``,
    their variants on single tensors and coalesced ones, ``barrier``, and the gradients of
    ``DistributedDataParallel`` on that group are flagcx's: tensors on the CPU go through shared memory,
    those on GPUs through its transports there. The group's former backend keeps the calls that flagcx does
    not serve: ranks on several hosts, ``send`` and ``recv``, sparse tensors, other dtypes and operations.

    Args:
        group: The process group; the default one where it is None.
        options: Fields of ``fc.Config``, such as ``cross_memory=False``. The time-out is the group's own
            unless ``timeout_s`` says otherwise.

    Returns:
        The process group to use. The default group is replaced, so that calls without a group use it; use any
        other in place of the one given.

    Raises:
        MissingDependencyError: torch is not installed.
        ArgumentError: There is no such group or option.

    Example:
        >>> dist.init_process_group("gloo")  # doctest: +SKIP
        >>> fc.enhance_process_group()       # doctest: +SKIP
        >>> dist.all_reduce(tensor)          # doctest: +SKIP
    """
    from flagcx.interop import torch

    return torch.enhance_process_group(group, **options)


def restore_process_group(group: Any = None) -> Any:
    """Undoes ``enhance_process_group``, on every rank of the group.

    Args:
        group: The group that ``enhance_process_group`` returned; the default group where it is None. A group
            that is not enhanced stays as it is.

    Returns:
        The process group as it was before, in its old place.

    Raises:
        MissingDependencyError: torch is not installed.
        ArgumentError: There is no such group.
    """
    from flagcx.interop import torch

    return torch.restore_process_group(group)
