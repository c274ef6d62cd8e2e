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
from flagcx.migration import FOREIGN_NAMES, OPERATIONS, SPELLINGS, ForeignNames, table


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
    rows = [row for row in SPELLINGS if f".{name}" in row.foreign or row.foreign.startswith(name)]
    assert any(f"{row.library}'s {row.foreign} is {row.ours}" in str(failure.value) for row in rows)
    assert not hasattr(comm, name) and name not in dir(comm)
    with pytest.raises(AttributeError, match=r"is (comm|fc|.comm)[.]"):
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
