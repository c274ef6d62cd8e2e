"""Puts flagcx's process group into the place of one of torch's, and takes it out again."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from flagcx.config import Config, environment
from flagcx.errors import ArgumentError
from flagcx.interop.process_group import FlagcxProcessGroup


def enhance_process_group(group: Any = None, **options: Any) -> Any:
    """Implements ``flagcx.enhance_process_group``."""
    config_of(None, options)
    group = current(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, FlagcxProcessGroup):
        return group
    made = FlagcxProcessGroup(group, c10d._world.pg_map[group][1], config_of(_timeout(group), options))
    made.membership.host_queue()
    _swap(group, made)
    made.route()
    return made


def restore_process_group(group: Any = None) -> Any:
    """Implements ``flagcx.restore_process_group``."""
    group = current(group)
    if not isinstance(group, FlagcxProcessGroup):
        return group
    group.leave()
    _swap(group, group.original)
    return group.original


def config_of(timeout: timedelta | None, options: dict[str, Any]) -> Config:
    """The settings for a group.

    Args:
        timeout: The group's time-out; None for flagcx's own.
        options: Settings by name, which take precedence.

    Raises:
        ArgumentError: There is no such setting, or it has no such value.
    """
    known = [field.name for field in fields(Config)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ArgumentError(
            f"enhance_process_group has no option {unknown[0]!r}; expected group or one of {', '.join(known)}"
        )
    environ = environment()
    if timeout is not None:
        for name in ("timeout_s", "init_timeout_s"):
            if f"FLAGCX_{name.upper()}" not in environ:
                options = {name: timeout.total_seconds()} | options
    return Config.from_environment(environ, **options)


def current(group: Any) -> Any:
    """The group in use for a given one: flagcx's, if that has replaced it.

    Args:
        group: A process group, or None for the default one.

    Raises:
        ArgumentError: There is no default group, or the group is not in use.
    """
    if group is None:
        if not dist.is_initialized():
            raise ArgumentError(
                "torch.distributed has no default process group yet; call dist.init_process_group(...) first"
            )
        return dist.group.WORLD
    groups = c10d._world.pg_map
    if group is dist.GroupMember.NON_GROUP_MEMBER or group in groups:
        return group
    for other in groups:
        if isinstance(other, FlagcxProcessGroup) and other.original is group:
            return other
    raise ArgumentError(
        f"{group!r} is not a process group of torch.distributed that is in use; expected one that "
        f"dist.new_group returned, or None for the default group"
    )


def _timeout(group: Any) -> timedelta | None:
    """The time-out that torch's backends of a group have."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta) and timeout > timedelta():
            return timeout
    return None


def _swap(old: Any, new: Any) -> None:
    """Replaces one group by another in all of torch's registers."""
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        if old in table:
            table[new] = table.pop(old)
    # Both stay known by rank: the original still makes calls, and callers may hold it.
    world.pg_group_ranks[new] = world.pg_group_ranks[old]
    if isinstance(old, FlagcxProcessGroup):
        del world.pg_group_ranks[old]
    for tagged in world.tags_to_pg.values():
        tagged[:] = [new if group is old else group for group in tagged]
    name = world.pg_names[new]
    torch._C._distributed_c10d._unregister_process_group(name)
    torch._C._distributed_c10d._register_process_group(name, new)
    if world.default_pg is old:
        c10d._update_default_pg(new)


# -- the backend -------------------------------------------------------------------------------------


def create_backend(prepared: Any, options: Any) -> ProcessGroup:
    """Makes the process group for ``backend="flagcx"``, around torch's own backends.

    Args:
        prepared: torch's description of the group: store, rank, size, time-out.
        options: flagcx's settings by name, as ``pg_options``; or None.
    """
    if options is not None and not isinstance(options, dict):
        raise ArgumentError(
            f"pg_options of backend 'flagcx' is a {type(options).__name__}; expected a dict of settings, "
            f"such as {{'cross_memory': False}}"
        )
    config = config_of(prepared.timeout, options or {})
    rank, size, store = prepared.group_rank, prepared.group_size, prepared.store
    original = ProcessGroup(store, rank, size)
    gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, size, timeout=prepared.timeout)
    kinds = ProcessGroup.BackendType
    original._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    original._set_default_backend(kinds.GLOO)
    if torch.cuda.is_available() and dist.is_nccl_available():
        settings = c10d.ProcessGroupNCCL.Options()
        settings._timeout = prepared.timeout
        settings.global_ranks_in_group = prepared.global_ranks_in_group
        settings.group_name = prepared.group_id
        nccl = c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), rank, size, settings)
        original._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    original._set_group_name(prepared.group_id)
    original._set_group_desc("flagcx")
    made = FlagcxProcessGroup(original, store, config, name="flagcx")
    made.route()
    return made


def register_backend() -> None:
    """Registers ``backend="flagcx"``, unless it is registered."""
    if "FLAGCX" not in dist.Backend._plugins:
        dist.Backend.register_backend("flagcx", create_backend, extended_api=True, devices=["cpu", "cuda"])
