"""Collectives between Ray's actors, in the shape of ``ray.util.collective``: one rank in each actor.

    from flagcx.interop import ray as collective

    @ray.remote
    class Worker:
        def join(self, size, rank):
            collective.init_collective_group(size, rank)  # group_name="default"

        def total(self):
            x = np.ones(1000)
            collective.allreduce(x)  # in place
            return x[0]

The actors may be on any machines; they meet by an address and a secret that travel through an actor of Ray's.
On one host arrays go through shared memory, or the GPUs' memory; between hosts by UCX, or NCCL. For all that
``ray.util.collective`` does not have (averages, started calls, compression, ...) there is ``communicator``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flagcx.arguments import check_integer, check_rank
from flagcx.bootstrap.environment import host_name
from flagcx.bootstrap.meeting import Meeting, MetRank, open_meeting
from flagcx.config import Config, environment
from flagcx.errors import ArgumentError, BootstrapError, MissingDependencyError, what_it_raised
from flagcx.world import init

try:
    import ray
except ImportError as error:
    raise MissingDependencyError(
        "flagcx.interop.ray needs Ray, which is not installed: pip install 'flagcx[ray]'"
    ) from error

if TYPE_CHECKING:
    from flagcx.communicator import Communicator

DEFAULT = "default"
_OPS = {"product": "prod"}
"""Names of ``ray.util.collective.ReduceOp`` that are not ours."""


class _Board:
    """An actor through which the ranks of a group meet, again and again: each full group is a round."""

    def __init__(self) -> None:
        self._hosts: dict[int, str] = {}
        self._full = asyncio.Event()
        self._size = 0
        self._meetings: dict[int, asyncio.Future[Any]] = {}
        self._round = 0

    async def arrive(self, rank: int, size: int, host: str) -> tuple[int, list[str]]:
        """Waits for all ranks; returns the number of the round and their hosts."""
        if self._hosts and size != self._size:
            raise ValueError(f"rank {rank} says that there are {size} ranks, others say {self._size}")
        self._size, self._hosts[rank] = size, host
        hosts, full, number = self._hosts, self._full, self._round
        if len(hosts) == size:
            self._meetings[number] = asyncio.get_running_loop().create_future()
            self._meetings.pop(number - 2, None)
            self._hosts, self._full, self._round = {}, asyncio.Event(), number + 1
            full.set()
        await full.wait()
        return number, [hosts[place] for place in range(size)]

    async def withdraw(self, rank: int) -> list[int]:
        """Forgets a rank that waits no longer; returns those that do."""
        self._hosts.pop(rank, None)
        return sorted(self._hosts)

    async def tell(self, number: int, meeting: Meeting) -> None:
        """What rank 0 has to say."""
        self._meetings[number].set_result(meeting)

    async def told(self, number: int) -> Meeting:
        """What the other ranks wait for."""
        return await self._meetings[number]


class _Group:
    """This actor's part in a group."""

    def __init__(self, name: str, size: int, rank: int, settings: dict[str, Any]) -> None:
        limit_s = Config.from_environment(environment(), **settings).init_timeout_s
        server = None
        try:
            board, number, hosts = _arrive(name, rank, size, limit_s)
            if rank == 0:
                meeting, server = open_meeting(size, len(set(hosts)) == 1, f"ray-{name}")
                board.tell.remote(number, meeting)
            else:
                meeting = ray.get(board.told.remote(number), timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            came = [rank, *ray.get(_GROUPS.board(name).withdraw.remote(rank))]
            missing = [other for other in range(size) if other not in came]
            raise BootstrapError(
                f"rank {rank} of {size} waited {limit_s:g} s for ranks {missing} to join group {name!r}; "
                f"every actor must call init_collective_group, and none may wait for another meanwhile",
                rank=missing[0] if missing else 0,
            ) from None
        self.rank = MetRank(meeting, rank, limit_s, server)
        try:
            self.comm = self.rank.call(init, **settings)
        except BaseException as error:
            self.rank.fail(what_it_raised(error))
            raise
        self.comm.at_close(self.rank.end)


def _arrive(name: str, rank: int, size: int, limit_s: float) -> tuple[Any, int, list[str]]:
    """Waits for the other ranks; returns the board, the number of the round and the ranks' hosts."""
    deadline = time.monotonic() + limit_s
    while True:
        board = _GROUPS.board(name)
        try:
            came = board.arrive.remote(rank, size, host_name())
            return board, *ray.get(came, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.ActorDiedError:  # with the actor that had made it, for an earlier group
            if time.monotonic() > deadline:
                raise
            del _GROUPS.boards[name]


class _Groups(dict[str, _Group]):
    """The groups of which this process is a rank, by name.

    A board ends when the process that has made it lets go of it or ends. So boards are kept when their groups
    end: other ranks may be about to meet on them again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.boards: dict[str, Any] = {}

    def board(self, name: str) -> Any:
        """The board on which the ranks of a group meet."""
        if name not in self.boards:
            made = ray.remote(num_cpus=0)(_Board).options(name=f"flagcx-{name}", get_if_exists=True)
            self.boards[name] = made.remote()
        return self.boards[name]


_GROUPS = _Groups()


def init_collective_group(
    world_size: int, rank: int, backend: str = "flagcx", group_name: str = DEFAULT, **settings: Any
) -> None:
    """Joins a group. All its ranks call it, each in an actor of its own; it returns when all have come.

    Args:
        world_size: Number of ranks.
        rank: This actor's rank.
        backend: Taken for the likeness to ``ray.util.collective``, and without effect: the arrays of a call
            decide what carries them.
        group_name: Name of the group.
        settings: Fields of ``fc.Config``, such as ``timeout_s=60``.

    Raises:
        ArgumentError: This process is in a group of that name already, or there is no such rank or setting.
        BootstrapError: Other ranks did not come within ``init_timeout_s``.
    """
    if is_group_initialized(group_name):
        raise ArgumentError(
            f"this actor is in group {group_name!r} already; call destroy_collective_group({group_name!r}) "
            f"before, or give another group_name"
        )
    world_size = check_integer(world_size, "world_size", 1)
    rank = check_rank(rank, world_size, "rank")
    _GROUPS[group_name] = _Group(group_name, world_size, rank, settings)


def create_collective_group(
    actors: Sequence[Any],
    world_size: int,
    ranks: Sequence[int],
    backend: str = "flagcx",
    group_name: str = DEFAULT,
    **settings: Any,
) -> None:
    """Has actors join a group, from the program that has made them; returns when all have.

    Args:
        actors: Handles of the actors.
        world_size: Number of ranks.
        ranks: The rank of each actor.
        backend: Without effect, as in ``init_collective_group``.
        group_name: Name of the group.
        settings: Fields of ``fc.Config``.

    Raises:
        ArgumentError: The ranks are not 0 to ``world_size - 1``, each once.
    """
    if sorted(ranks) != list(range(world_size)) or len(actors) != world_size:
        raise ArgumentError(
            f"ranks={list(ranks)} of {len(actors)} actors are not the ranks 0 to {world_size - 1}, each once"
        )

    def join(_: Any, rank: int) -> None:
        init_collective_group(world_size, rank, backend, group_name, **settings)

    ray.get([actor.__ray_call__.remote(join, rank) for actor, rank in zip(actors, ranks, strict=True)])


def destroy_collective_group(group_name: str = DEFAULT) -> None:
    """Leaves a group; without effect if this process is in none of that name."""
    group = _GROUPS.pop(group_name, None)
    if group is not None:
        group.comm.close()


def is_group_initialized(group_name: str = DEFAULT) -> bool:
    """Whether this process is in a group of that name."""
    return group_name in _GROUPS


def communicator(group_name: str = DEFAULT) -> Communicator:
    """The communicator of a group, with all that flagcx can do.

    Raises:
        ArgumentError: This process is in no group of that name.
    """
    if group_name not in _GROUPS:
        raise ArgumentError(
            f"this actor is in no group {group_name!r}; call init_collective_group(world_size, rank, "
            f"group_name={group_name!r}) in every actor before, or create_collective_group in the driver"
        )
    return _GROUPS[group_name].comm


def get_rank(group_name: str = DEFAULT) -> int:
    """This actor's rank in a group; -1 if it is in none of that name."""
    return communicator(group_name).rank if is_group_initialized(group_name) else -1


def get_collective_group_size(group_name: str = DEFAULT) -> int:
    """The number of ranks of a group; -1 if this process is in none of that name."""
    return communicator(group_name).size if is_group_initialized(group_name) else -1


def allreduce(tensor: Any, group_name: str = DEFAULT, op: Any = "sum") -> None:
    """Reduces an array over all ranks, in place."""
    communicator(group_name).allreduce(tensor, op=_op(op))


def barrier(group_name: str = DEFAULT) -> None:
    """Waits until all ranks have come."""
    communicator(group_name).barrier()


def reduce(tensor: Any, dst_rank: int = 0, group_name: str = DEFAULT, op: Any = "sum") -> None:
    """Reduces an array over all ranks, in place on ``dst_rank``."""
    communicator(group_name).reduce(tensor, op=_op(op), root=dst_rank)


def broadcast(tensor: Any, src_rank: int = 0, group_name: str = DEFAULT) -> None:
    """Gives all ranks the array of ``src_rank``, in place."""
    communicator(group_name).broadcast(tensor, root=src_rank)


def allgather(tensor_list: Sequence[Any], tensor: Any, group_name: str = DEFAULT) -> None:
    """Puts every rank's ``tensor`` into ``tensor_list``, which has an array for each rank."""
    comm = communicator(group_name)
    _check_list("tensor_list", tensor_list, comm.size)
    tensor_list[comm.rank][...] = tensor
    for root, part in enumerate(tensor_list):
        comm.broadcast(part, root=root)


def reducescatter(
    tensor: Any, tensor_list: Sequence[Any], group_name: str = DEFAULT, op: Any = "sum"
) -> None:
    """Reduces the arrays of ``tensor_list``, one for each rank; each rank gets its own in ``tensor``.

    The others of ``tensor_list`` are left as they are.
    """
    comm = communicator(group_name)
    _check_list("tensor_list", tensor_list, comm.size)
    for root, part in enumerate(tensor_list):
        if root == comm.rank:
            tensor[...] = part
        comm.reduce(tensor if root == comm.rank else part, op=_op(op), root=root)


def send(tensor: Any, dst_rank: int, group_name: str = DEFAULT) -> None:
    """Sends an array to a rank, which receives it."""
    communicator(group_name).send(tensor, dst_rank)


def recv(tensor: Any, src_rank: int, group_name: str = DEFAULT) -> None:
    """Receives an array from a rank, in place."""
    communicator(group_name).recv(tensor, src_rank)


def _op(op: Any) -> Any:
    """Our name of an operation, given as ours or as a member of ``ray.util.collective.ReduceOp``."""
    name = getattr(op, "name", op)
    return _OPS.get(name.lower(), name.lower()) if isinstance(name, str) else op


def _check_list(name: str, tensors: Sequence[Any], size: int) -> None:
    if len(tensors) != size:
        raise ArgumentError(f"{name} has {len(tensors)} arrays; expected one for each of the {size} ranks")
