"""From mpi4py, torch.distributed, Horovod and cupyx.distributed: how flagcx spells what they do.

Errors hint at the same table: ``Allreduce`` and ``op=MPI.SUM`` are answered with what to write instead.

"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

MPI4PY, TORCH = "mpi4py", "torch.distributed"
HOROVOD, CUPYX = "Horovod", "cupyx.distributed"


class Spelling(NamedTuple):
    """One row: what another library calls something, and what flagcx does.

    Attributes:
        library: The other library.
        foreign: A call, as it is written there.
        ours: The same with flagcx.
    """

    library: str
    foreign: str
    ours: str


_CALLS: dict[str, dict[str, str]] = {
    MPI4PY: {
        "MPI.COMM_WORLD": "fc.init()",
        "comm.Get_rank()": "comm.rank",
        "comm.Get_size()": "comm.size",
        "comm.Allreduce(a, b, op=MPI.SUM)": 'comm.allreduce(a, "sum", out=b)',
        "comm.Allreduce(MPI.IN_PLACE, a)": "comm.allreduce(a)",
        "comm.Iallreduce(a, b)": "comm.allreduce(a, out=b, async_op=True)",
        "comm.Reduce(a, b, op=MPI.MAX, root=0)": 'comm.reduce(a, "max", root=0, out=b)',
        "comm.Bcast(a, root=0)": "comm.broadcast(a, root=0)",
        "comm.Ibcast(a, root=0)": "comm.broadcast(a, root=0, async_op=True)",
        "comm.bcast(obj, root=0)": "comm.broadcast_object(obj, root=0)",
        "comm.Allgather(a, b)": "comm.allgather(a, out=b)",
        "comm.Allgatherv(a, [b, counts])": "comm.allgatherv(a, counts, out=b)",
        "comm.Gather(a, b, root=0)": "comm.gather(a, root=0, out=b)",
        "comm.Gatherv(a, [b, counts], root=0)": "comm.gatherv(a, counts, root=0, out=b)",
        "comm.Scatter(a, b, root=0)": "comm.scatter(a, root=0, out=b)",
        "comm.Scatterv([a, counts], b, root=0)": "comm.scatterv(a, counts, root=0, out=b)",
        "comm.Reduce_scatter_block(a, b)": "comm.reduce_scatter(a, out=b)",
        "comm.Reduce_scatter(a, b, counts)": "comm.reduce_scatterv(a, counts, out=b)",
        "comm.Alltoall(a, b)": "comm.alltoall(a, out=b)",
        "comm.Alltoallv([a, counts], [b, counts])": "comm.alltoallv(a, counts, counts, out=b)",
        "comm.Send(a, dest=1)": "comm.send(a, to=1)",
        "comm.Recv(a, source=0)": "comm.recv(a, source=0)",
        "comm.Isend(a, dest=1)": "comm.send(a, to=1, async_op=True)",
        "comm.Irecv(a, source=0)": "comm.recv(a, source=0, async_op=True)",
        "comm.isend(a, dest=1)": "comm.send(a, to=1, async_op=True)",
        "comm.irecv(a, source=0)": "comm.recv(a, source=0, async_op=True)",
        "comm.Sendrecv(a, dest=1, recvbuf=b, source=0)": "comm.sendrecv(a, to=1, out=b, source=0)",
        "comm.Barrier()": "comm.barrier()",
        "comm.Split(color, key)": "comm.split(color, key)",
        "comm.Dup()": "comm.split(0)",
        "comm.Abort()": "comm.abort()",
        "comm.Free()": "comm.close()",
    },
    TORCH: {
        'dist.init_process_group("nccl")': "fc.init()",
        "dist.get_rank()": "comm.rank",
        "dist.get_world_size()": "comm.size",
        "dist.all_reduce(t)": "comm.allreduce(t)",
        "dist.all_reduce(t, dist.ReduceOp.AVG, async_op=True)": 'comm.allreduce(t, "avg", async_op=True)',
        "dist.reduce(t, dst=0)": "comm.reduce(t, root=0)",
        "dist.broadcast(t, src=0)": "comm.broadcast(t, root=0)",
        "dist.all_gather(list, t)": "comm.allgather(t)",
        "dist.all_gather_into_tensor(out, t)": "comm.allgather(t, out=out)",
        "dist.reduce_scatter_tensor(out, t)": "comm.reduce_scatter(t, out=out)",
        "dist.gather(t, list, dst=0)": "comm.gather(t, root=0)",
        "dist.scatter(out, list, src=0)": "comm.scatter(t, root=0, out=out)",
        "dist.all_to_all_single(out, t)": "comm.alltoall(t, out=out)",
        "dist.send(t, dst=1)": "comm.send(t, to=1)",
        "dist.recv(t, src=0)": "comm.recv(t, source=0)",
        "dist.batch_isend_irecv(ops)": "comm.group()",
        "dist.all_gather_object(list, obj)": "comm.allgather_object(obj)",
        "dist.broadcast_object_list([obj], src=0)": "comm.broadcast_object(obj, root=0)",
        "dist.new_group(ranks)": "comm.split(0 if comm.rank in ranks else None)",
        "dist.monitored_barrier()": "comm.barrier()",
        "dist.destroy_process_group()": "comm.close()",
    },
    HOROVOD: {
        "hvd.init()": "fc.init()",
        "hvd.rank()": "comm.rank",
        "hvd.size()": "comm.size",
        "hvd.allreduce(t)": 'comm.allreduce(t, "avg")',
        "hvd.allreduce(t, op=hvd.Sum)": "comm.allreduce(t)",
        "hvd.allreduce_async(t)": 'comm.allreduce(t, "avg", async_op=True)',
        "hvd.allreduce(t, compression=hvd.Compression.fp16)": 'comm.allreduce(t, "avg", compression="fp16")',
        "hvd.grouped_allreduce(tensors)": 'comm.allreduce(tensors, "avg")',
        "hvd.allgather(t)": "comm.allgather(t)",
        "hvd.broadcast(t, root_rank=0)": "comm.broadcast(t, root=0)",
        "hvd.broadcast_parameters(parameters, root_rank=0)": (
            "[comm.broadcast(p, root=0) for p in parameters.values()]"
        ),
        "hvd.broadcast_object(obj, root_rank=0)": "comm.broadcast_object(obj, root=0)",
        "hvd.DistributedOptimizer(optimizer)": "fc.GradientSynchronizer(comm, gradients)",
        "hvd.shutdown()": "comm.close()",
    },
    CUPYX: {
        "init_process_group(n, rank)": 'fc.init(rank=rank, size=n, address="127.0.0.1:29400")',
        'comm.all_reduce(a, b, op="sum")': "comm.allreduce(a, out=b)",
        "comm.all_gather(a, b, count)": "comm.allgather(a, out=b)",
        "comm.all_to_all(a, b)": "comm.alltoall(a, out=b)",
        "comm.reduce(a, b, root=0)": "comm.reduce(a, root=0, out=b)",
        "comm.broadcast(a, root=0)": "comm.broadcast(a, root=0)",
        "comm.reduce_scatter(a, b, count)": "comm.reduce_scatter(a, out=b)",
        "comm.gather(a, b, root=0)": "comm.gather(a, root=0, out=b)",
        "comm.scatter(a, b, root=0)": "comm.scatter(a, root=0, out=b)",
        "comm.send(a, peer)": "comm.send(a, to=peer)",
        "comm.recv(b, peer)": "comm.recv(b, source=peer)",
        "comm.send_recv(a, b, peer)": "comm.sendrecv(a, to=peer, out=b, source=peer)",
        "comm.barrier()": "comm.barrier()",
    },
}

SPELLINGS = tuple(
    Spelling(library, foreign, ours) for library, calls in _CALLS.items() for foreign, ours in calls.items()
)
"""The table."""

OPERATIONS = {
    "SUM": "sum",
    "PROD": "prod",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "AVG": "avg",
    "AVERAGE": "avg",
    "MEAN": "avg",
    "ADD": "sum",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
    "LAND": "land",
    "LOR": "lor",
}
"""Names of operations elsewhere, such as ``MPI.SUM``, ``dist.ReduceOp.AVG``, ``hvd.Average`` and "mean"."""

KEYWORDS = {
    "sendbuf": ("x",),
    "recvbuf": ("out",),
    "buf": ("x", "out"),
    "sendobj": ("value", "x"),
    "obj": ("value", "x"),
    "object": ("value",),
    "tensor": ("x", "out"),
    "input": ("x",),
    "input_tensor": ("x",),
    "output": ("out",),
    "output_tensor": ("out",),
    "in_array": ("x",),
    "out_array": ("out",),
    "dest": ("to", "root"),
    "dst": ("to", "root"),
    "source": ("root",),
    "src": ("source", "root"),
    "peer": ("to", "source"),
    "root_rank": ("root",),
    "sendcounts": ("send_counts", "counts"),
    "recvcounts": ("receive_counts", "counts"),
    "input_split_sizes": ("send_counts",),
    "output_split_sizes": ("receive_counts",),
    "reduce_op": ("op",),
    "colour": ("color",),
    "world_size": ("size",),
    "init_method": ("address",),
}
"""Names of arguments elsewhere, and ours, of which a call has the first that it knows."""
_KEYWORDS_WITHOUT = {
    "tag": "there are no tags: what a rank sends to another is received in the order of its calls",
    "sendtag": "there are no tags",
    "recvtag": "there are no tags",
    "group": "a group is a communicator of its own: comm.split(0 if comm.rank in ranks else None)",
    "average": 'averages are made by op="avg"',
    "backend": "the kind of a call's arrays decides what carries them",
    "device_id": "each rank has the GPU of its local rank, or the current one",
}

_NAME = re.compile(r"(?:comm|dist|hvd|MPI)\.(\w+)|(\w+)\(")
_OURS = re.compile(r"comm\.(\w+)")


def _by_name() -> dict[str, list[Spelling]]:
    found: dict[str, list[Spelling]] = {}
    for row in SPELLINGS:
        match = _NAME.match(row.foreign)
        if match is not None:
            found.setdefault(match.group(1) or match.group(2), []).append(row)
    return found


_BY_NAME = _by_name()
_METHODS = frozenset(name for row in SPELLINGS for name in _OURS.findall(row.ours))
"""What a communicator has."""
_HOMES_OF_OPERATIONS = ("MPI", "ReduceOp")
FOREIGN_NAMES = (frozenset(_BY_NAME) | {*OPERATIONS, *_HOMES_OF_OPERATIONS}) - _METHODS - {"init"}
"""The names of methods and functions elsewhere that flagcx has under another name."""


def hint_for(name: str) -> str:
    """What to write in place of a name that another library has; empty where none is known to.

    Example:
        >>> hint_for("Get_rank")
        "; mpi4py's comm.Get_rank() is comm.rank"
    """
    if name in _METHODS:
        return f"; it is the communicator's: comm = fc.init(), then comm.{name}"
    if name in _HOMES_OF_OPERATIONS:
        return '; operations are named by strings: op="sum", "prod", "min", "max", "avg"'
    if name[:1].isupper() and name.upper() in OPERATIONS:
        return f'; operations are named by strings: op="{OPERATIONS[name.upper()]}"'
    return "".join(f"; {row.library}'s {row.foreign} is {row.ours}" for row in _BY_NAME.get(name, ()))


def operation_hint(op: Any) -> str:
    """What to write in place of an operation of another library; empty where it is none that is known.

    Example:
        >>> operation_hint("mean")
        '; flagcx spells it op="avg"'
    """
    if hasattr(op, "__array_interface__") or hasattr(op, "__dlpack__"):
        return "; an array for the result is given by name, as in comm.allreduce(x, out=y)"
    if isinstance(op, str):
        name = op.upper()
    elif type(op).__module__.startswith("mpi4py"):
        constants = vars(sys.modules["mpi4py.MPI"])
        name = next((one for one in OPERATIONS if constants.get(one) == op), "")
    else:
        name = str(op).rpartition(".")[2].upper()  # RedOpType.SUM, of torch
    return f'; flagcx spells it op="{OPERATIONS[name]}"' if name in OPERATIONS else ""


def keyword_hint(name: str, known: Collection[str]) -> str:
    """What to write in place of an argument's name that a call does not have; empty where nothing is like it.

    Args:
        name: The name that was given.
        known: The names that the call has.

    Example:
        >>> keyword_hint("recvbuf", ["x", "out"]), keyword_hint("algoritm", ["x", "algorithm"])
        ('; flagcx spells it out=', '; do you mean algorithm=?')
    """
    ours = next((one for one in KEYWORDS.get(name, ()) if one in known), "")
    if ours:
        return f"; flagcx spells it {ours}="
    if name in _KEYWORDS_WITHOUT:
        return f"; {_KEYWORDS_WITHOUT[name]}"
    from difflib import get_close_matches  # not on import, which must be quick

    near = get_close_matches(name, known, 1)
    return f"; do you mean {near[0]}=?" if near else ""


class ForeignName:
    """A name that other libraries' communicators have: asking for it raises an error that says ours.

    A descriptor and no ``__getattr__``, with which Python would look every other attribute up more slowly.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(
            f"flagcx.Communicator has no attribute {self._name!r}{hint_for(self._name)}",
            name=self._name,
            obj=owner if instance is None else instance,
        )


class ForeignNames:
    """Base of classes that hint at their own spelling of what other libraries have."""

    def __dir__(self) -> list[str]:
        return [name for name in object.__dir__(self) if name not in FOREIGN_NAMES]


for _name in sorted(FOREIGN_NAMES):
    setattr(ForeignNames, _name, _descriptor := ForeignName())
    _descriptor.__set_name__(ForeignNames, _name)


def table() -> str:
    """The whole table as Markdown."""
    lines = []
    for library, calls in _CALLS.items():
        lines += ["", f"| {library} | flagcx |", "|---|---|"]
        lines += [f"| `{foreign}` | `{ours}` |" for foreign, ours in calls.items()]
    words = ", ".join(f'`{name}`: `"{ours}"`' for name, ours in OPERATIONS.items())
    named = ", ".join(f"`{name}`: `{'` or `'.join(ours)}`" for name, ours in KEYWORDS.items())
    return "\n".join([*lines[1:], "", f"Operations: {words}.", "", f"Arguments: {named}."])


__doc__ = f"{__doc__ or ''}{table()}"  # which python -OO has taken away
