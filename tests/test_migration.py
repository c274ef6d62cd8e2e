"""The spellings of other libraries: each is answered with ours, which exists and takes these arguments."""

from __future__ import annotations

import ast
import copy
import enum
import inspect
import pickle
import sys
import types

import numpy as np
import pytest

import flagcx as fc
from flagcx.migration import FOREIGN_NAMES, KEYWORDS, OPERATIONS, SPELLINGS, ForeignNames, table


@pytest.fixture(scope="module")
def comm():
    with fc.init() as made:
        yield made


def _calls(ours):
    for node in ast.walk(ast.parse(ours)):
        place, call = (node.func, node) if isinstance(node, ast.Call) else (node, None)
        if isinstance(place, ast.Attribute) and getattr(place.value, "id", "") in ("comm", "fc"):
            yield place.value.id, place.attr, call


@pytest.mark.parametrize("row", SPELLINGS, ids=lambda row: row.foreign)
def test_ours_exists_and_takes_the_arguments(row, comm):
    found = list(_calls(row.ours))
    assert found
    for owner, name, call in found:
        value = getattr(comm if owner == "comm" else fc, name)
        if call is not None:
            positional = [None] * len(call.args)
            inspect.signature(value).bind(*positional, **{k.arg: None for k in call.keywords})
    ast.parse(row.foreign)


@pytest.mark.parametrize("name", sorted(FOREIGN_NAMES))
def test_a_foreign_name_is_answered_with_ours(name, comm):
    with pytest.raises(AttributeError) as failure:
        getattr(comm, name)
    if name in (*OPERATIONS, "MPI", "ReduceOp"):
        answers = [f'; operations are named by strings: op="{OPERATIONS.get(name, "sum")}"']
    else:
        rows = [row for row in SPELLINGS if f".{name}" in row.foreign or row.foreign.startswith(name)]
        answers = [f"{row.library}'s {row.foreign} is {row.ours}" for row in rows]
    assert any(answer in str(failure.value) for answer in answers)
    assert not hasattr(comm, name) and name not in dir(comm)
    with pytest.raises(AttributeError, match=r"is (comm|fc|.comm)[.]|operations are named by strings"):
        getattr(fc, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "allreduce",
            r"module 'flagcx' has no attribute 'allreduce'; it is the communicator's: comm = fc.init",
        ),
        ("ReduceOp", 'operations are named by strings: op="sum"'),
        ("COMM_WORLD", r"mpi4py's MPI.COMM_WORLD is fc.init\(\)"),
        ("rank", "then comm.rank"),
        ("Average", 'operations are named by strings: op="avg"'),
        ("nonsense", "has no attribute 'nonsense'$"),
    ],
)
def test_names_of_the_module(name, message):
    with pytest.raises(AttributeError, match=message):
        getattr(fc, name)


class _RedOpType(enum.Enum):
    """As torch's prints."""

    SUM, PRODUCT = range(2)


@pytest.mark.parametrize(
    ("op", "ours"), [("SUM", "sum"), ("mean", "avg"), ("Average", "avg"), (_RedOpType.PRODUCT, "prod")]
)
def test_operations_of_others(comm, op, ours):
    with pytest.raises(fc.OperationError, match=f'flagcx spells it op="{ours}"'):
        comm.allreduce(np.ones(3), op)


def test_operations_of_mpi4py(comm, monkeypatch):
    module = types.ModuleType("mpi4py.MPI")
    kind = type("Op", (), {"__module__": "mpi4py.MPI"})
    for name in ("SUM", "MAX"):
        setattr(module, name, kind())
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    with pytest.raises(fc.OperationError, match='flagcx spells it op="max"'):
        comm.allreduce(np.ones(3), op=module.MAX)
    in_place = type("InPlaceType", (int,), {"__module__": "mpi4py.MPI"})()
    with pytest.raises(fc.ArrayError, match=r"MPI.IN_PLACE is not needed"):
        comm.allreduce(in_place, np.ones(3))


x, y = np.ones(4), np.empty(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: c.allgather(x, y),
            r"comm.allgather() takes x by position, and 2 arguments were given",
        ),
        (lambda c: c.allgather(x, y), "is given by name, as in comm.allgather(x, out=y)"),
        (
            lambda c: c.reduce_scatter(x, y, "sum"),
            "takes x, op by position, and 3 arguments were given",
        ),
        (
            lambda c: c.allreduce(sendbuf=x, recvbuf=y),
            "comm.allreduce() has no argument 'sendbuf'",
        ),
        (lambda c: c.allreduce(sendbuf=x, recvbuf=y), "; flagcx spells it x="),
        (
            lambda c: c.alltoall(x, recvbuf=y),
            "has no argument 'recvbuf'; its arguments are x, out, al",
        ),
        (lambda c: c.alltoall(x, recvbuf=y), "stream; flagcx spells it out="),
        (lambda c: c.broadcast(x, src=0), "flagcx spells it root="),
        (lambda c: c.gather(x, dst=0), "flagcx spells it root="),
        (
            lambda c: c.send(x, dest=0),
            "comm.send() has no argument 'dest'; its arguments are x, to, as",
        ),
        (lambda c: c.send(x, dest=0), "flagcx spells it to="),
        (lambda c: c.send(x, 0, tag=7), "there are no tags"),
        (lambda c: c.send(x, 0, 7), "comm.send() takes x, to by position, and 3 arguments were given"),
        (lambda c: c.recv(y, src=0), "flagcx spells it source="),
        (lambda c: c.sendrecv(x, dest=0, recvbuf=y, source=0), "flagcx spells it to="),
        (lambda c: c.broadcast_object(obj={}, root=0), "flagcx spells it value="),
        (lambda c: c.scatterv(x, [4], y), "root is an array; expected"),
        (lambda c: c.alltoallv(x, sendcounts=[4]), "flagcx spells it send_counts="),
        (lambda c: c.allreduce(x, algoritm="ring"), "do you mean algorithm=?"),
        (lambda c: c.allreduce(x, group=None), "a group is a communicator of its own: comm.split("),
        (
            lambda c: c.reduce(x, nonsense=1),
            "has no argument 'nonsense'; its arguments are x, op, root",
        ),
    ],
)
def test_arguments_of_others(comm, call, message):
    for _ in range(2):  # a call that repeats takes another way
        comm.allgather(x, out=y)
        with pytest.raises((TypeError, fc.RankError)) as failure:
            call(comm)
        assert message in str(failure.value)


def test_every_argument_of_ours_that_is_named_exists(comm):
    calls = [getattr(comm, name) for name in dir(comm) if not name.startswith("_")]
    known = {name for call in calls if callable(call) for name in inspect.signature(call).parameters}
    known |= set(inspect.signature(fc.init).parameters)
    assert {ours for few in KEYWORDS.values() for ours in few} <= known
    for foreign, few in KEYWORDS.items():
        assert foreign not in few


def test_settings_of_others():
    for name, hint in (("world_size", "flagcx spells it size="), ("timeout", "do you mean timeout_s=?")):
        with pytest.raises(
            fc.ArgumentError, match=f"no setting '{name}'; expected one of .*; {hint}".replace("?", "[?]")
        ):
            fc.init(**{name: 4})


def test_help_shows_the_arguments_alone(comm):
    assert str(inspect.signature(comm.send)).startswith("(x: 'Any', to: 'Any', *, async_op")
    for name in ("allreduce", "alltoallv", "scatter_object"):
        shown = inspect.signature(getattr(comm, name)).parameters.values()
        assert all(one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in shown)


def test_two_buffers_are_told_where_the_second_goes(comm):
    x, y = np.ones(3), np.empty(3)
    with pytest.raises(fc.OperationError, match=r"^op is a ndarray; .*as in comm.allreduce\(x, out=y\)"):
        comm.allreduce(x, y)
    with pytest.raises(fc.RankError, match=r"root is an array; .*given by name: out=y"):
        comm.gather(x, y)
    with pytest.raises(fc.ArrayError, match=r"x is a builtins.float; .* For a number: x = np.array\(2.5\)"):
        comm.allreduce(2.5)


def test_every_operation_of_ours_is_named():
    assert set(OPERATIONS.values()) == {
        "sum",
        "prod",
        "min",
        "max",
        "avg",
        "band",
        "bor",
        "bxor",
        "land",
        "lor",
    }


def test_the_table_is_in_the_documentation():
    import flagcx.migration

    assert flagcx.migration.__doc__.endswith(table()) and "| `comm.Get_rank()` | `comm.rank` |" in table()


def test_protocols_of_python_see_an_ordinary_object(comm):
    assert not isinstance(inspect.getattr_static(fc.Communicator, "rank", None), property)
    assert not {"__getattr__", "__getattribute__"} & {
        n for c in fc.Communicator.__mro__[:-1] for n in vars(c)
    }
    inspect.getmembers(comm)
    assert inspect.isclass(ForeignNames) and callable(comm.allreduce)
    for action in (pickle.dumps, copy.deepcopy):
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as failure:
            action(comm)
        assert "flagcx.Communicator has no attribute" not in str(failure.value)
