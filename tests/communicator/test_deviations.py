"""Random programs in which one rank deviates in one call: every rank is told of it.

A program has a communicator of its own. It makes some calls, so that plans exist and repeat; then one rank
makes another call than the rest, and all go on to a barrier and close.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flagcx as fc
from tests.mpi import run_mpi
from tests.ranks import run_ranks

Program = Callable[[fc.Communicator], object]

COUNTS = (1, 7, 64, 604, 5998, 20_000, 100_000)
DTYPES = ("float32", "int32", "float64", "uint8")
OPS = ("sum", "max", "min", "prod")
REDUCING, ROOTED = ("allreduce", "reduce", "reduce_scatter"), ("broadcast", "reduce", "gather", "scatter")
COLLECTIVES = tuple(dict.fromkeys((*REDUCING, *ROOTED, "allgather", "alltoall")))
KINDS = ("count", "dtype", "op", "root", "collective", "algorithm", "codec", "parts", "kind", "order")
ALGORITHMS = ("ring", "tree", "one_shot", "two_shot", "recursive_doubling")
CODECS = ("int8", "fp8", "fp16", "bf16", "int4", "topk")


def call(
    comm: fc.Communicator, xp: Any, name: str, count: int, dtype: str, op: str, root: int, more: dict
) -> None:
    """One collective of ``count`` elements (a block), with arrays of its own from the module ``xp``."""
    x = xp.ones((comm.size, count) if name in ("reduce_scatter", "alltoall", "scatter") else count, dtype)
    waits = more.get("async_op", False)
    if name in ("allreduce", "reduce", "reduce_scatter"):
        more = {"op": op, **more}
    if name in ("broadcast", "reduce", "gather", "scatter"):
        more = {"root": root, **more}
    if name == "scatter":
        more = {"out": xp.empty(count, dtype), **more}
    done = getattr(comm, name)(x, **more)
    if waits:
        done.wait()


def together(comm: fc.Communicator, xp: Any, counts: tuple[int, ...], how: str, dtype: str) -> None:
    """All-reduces of several arrays, as a list or in a group."""
    arrays = [xp.ones(count, dtype) for count in counts]
    if how == "list":
        comm.allreduce(arrays)
        return
    with comm.group():
        for array in arrays:
            comm.allreduce(array)


def some_call(draw: random.Random, size: int) -> tuple:
    """A random collective, as the arguments of ``call``."""
    name = draw.choice(COLLECTIVES)
    more: dict = {"async_op": True} if draw.random() < 0.2 else {}
    return name, draw.choice(COUNTS), draw.choice(DTYPES), draw.choice(OPS), draw.randrange(size), more


def without(values: tuple, one: object) -> list:
    return [value for value in values if value != one]


def program_of(arguments: tuple, xp: Any = np) -> Program:
    name, count, dtype, op, root, more = arguments
    return partial(call, xp=xp, name=name, count=count, dtype=dtype, op=op, root=root, more=more)


def deviating(draw: random.Random, size: int, xp: Any = np) -> tuple[str, Program, Program]:
    """What differs, the call of most ranks, and that of one."""
    kind = draw.choice(KINDS if xp is np else (*KINDS, "module"))
    name, count, dtype, op, root, more = some_call(draw, size)
    if kind == "op":
        name = draw.choice(REDUCING)
    elif kind == "root":
        name = draw.choice(ROOTED)
    elif kind == "algorithm":
        name, more = "allreduce", {"algorithm": draw.choice(ALGORITHMS)}
    elif kind == "codec":
        name, count, dtype, op, more = (
            "allreduce",
            5000,
            "float32",
            "sum",
            {"compression": draw.choice(CODECS)},
        )
    elif kind in ("parts", "kind"):
        parts = tuple(draw.sample((3, 10, 20, 500, 40), 3))
        several = partial(together, xp=xp, how=draw.choice(("list", "group")), dtype=dtype)
        whole = program_of(("allreduce", sum(parts), dtype, "sum", 0, {}), xp)
        moved = partial(several, counts=parts[1:] + parts[:1])
        return kind, partial(several, counts=parts), moved if kind == "parts" else whole
    right = (name, count, dtype, op, root, more)
    if kind == "module":
        return kind, program_of(right, xp), program_of(right)
    if kind == "order":
        other = some_call(draw, size)
        while other[0] == name:
            other = some_call(draw, size)
        calls = [program_of(right, xp), program_of(other, xp)]
        return kind, in_turn(calls), in_turn(calls[::-1])
    wrong = {
        "count": lambda: (name, draw.choice(without(COUNTS, count)), dtype, op, root, more),
        "dtype": lambda: (name, count, draw.choice(without(DTYPES, dtype)), op, root, more),
        "op": lambda: (name, count, dtype, draw.choice(without(OPS, op)), root, more),
        "root": lambda: (name, count, dtype, op, (root + 1) % size, more),
        "collective": lambda: (draw.choice(without(COLLECTIVES, name)), count, dtype, op, root, more),
        "algorithm": lambda: (*right[:5], {"algorithm": draw.choice(without(ALGORITHMS, more["algorithm"]))}),
        "codec": lambda: (*right[:5], {"compression": draw.choice(without(CODECS, more["compression"]))}),
    }[kind]()
    return kind, program_of(right, xp), program_of(wrong, xp)


def in_turn(calls: list[Program]) -> Program:
    """One program after the other."""

    def run(comm: fc.Communicator) -> None:
        for one in calls:
            one(comm)

    return run


def outcome(comm: fc.Communicator, programs: list[Program], settle: Callable[[], object] = int) -> str:
    """What this rank is told, in some call or when the communicator closes.

    ``settle()`` is called after the programs.

    A rank that has not quite done with a right call may be told of the wrong one of a peer that went on.
    """
    told = []
    for step in (*(partial(program, comm) for program in programs), settle, comm.barrier, comm.close):
        try:
            step()
        except fc.CommunicatorError:
            pass  # the error before has said all
        except fc.FlagcxError as error:
            told.append(f"{type(error).__name__}: {error}")
    return " | ".join(told) or "nothing"


def deviate(seeds: range, module: str = "numpy", **settings: Any) -> list[tuple[int, str, str]]:
    """Runs programs; what each comes to here: its seed, what differs, what this rank is told."""
    xp = importlib.import_module(module)
    world = fc.init(timeout_s=20, **settings)
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        comm = world.split(0)
        before = [program_of(some_call(draw, world.size), xp) for _ in range(draw.randrange(4))] * 2
        kind, right, wrong = deviating(draw, world.size, xp)
        culprit = draw.randrange(world.size)
        if draw.random() < 0.5:  # plans of both exist already, on all ranks
            before += [right, right, wrong, wrong]
        settle = int if xp is np or draw.random() < 0.5 else xp.cuda.get_current_stream().synchronize
        told = outcome(comm, [*before, wrong if world.rank == culprit else right], settle)
        found.append((seed, kind, told))
        world.barrier()
    return found


def not_told(by_rank: list[list[tuple[int, str, str]]]) -> list[tuple]:
    """The programs of ``deviate`` whose ranks were not all told."""
    wrong = []
    for told in zip(*by_rank, strict=True):
        texts = [text for _, _, text in told]
        by_all = all("MismatchError" in text or "AbortedError" in text for text in texts)
        if not (by_all and any("MismatchError" in text for text in texts)):
            wrong.append((len(by_rank), *told[0][:2], texts))
    return wrong


def check(by_rank: list[list[tuple[int, str, str]]]) -> None:
    wrong = not_told(by_rank)
    assert not wrong, f"{len(wrong)} of {len(by_rank[0])}\n" + "\n".join(map(str, wrong[:5]))


def check_between_hosts(size: int, seeds: range) -> None:
    """The same on two hosts, which MPI joins."""
    with tempfile.TemporaryDirectory() as directory:
        bounds = [str(bound) for bound in (seeds.start, seeds.stop)]
        code, printed = run_mpi(size, "tests.communicator.test_deviations", *bounds, directory, timeout_s=300)
        assert code == 0, printed
        by_rank = [json.loads((Path(directory) / str(rank)).read_text()) for rank in range(size)]
    check(by_rank)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_deviating_call_is_told_to_every_rank(size):
    check(run_ranks(deviate, size, range(size * 1000, size * 1000 + 20), timeout_s=300))


def test_each_call_is_compared_before_it_runs():
    told = run_ranks(partial(deviate, debug="check"), 3, range(5000, 5010), timeout_s=300)
    check(told)
    for _, _, text in (one for each in told for one in each):
        assert "the ranks call different operations, first rank " in text, text


def test_each_call_of_threads_is_compared_before_it_runs():
    check(fc.launch(partial(deviate, debug="check"), 3, (range(5010, 5015),), threads=True))


@pytest.mark.exhaustive
def test_many_deviating_calls():
    check(run_ranks(deviate, 4, range(4020, 4100), timeout_s=300))


@pytest.mark.slow
def test_a_deviating_call_between_hosts_is_told_to_every_rank():
    check_between_hosts(3, range(13_000, 13_030))


@pytest.mark.exhaustive
def test_many_deviating_calls_between_hosts():
    check_between_hosts(4, range(40_000, 40_030))


if __name__ == "__main__":
    first, last, directory = sys.argv[1:]
    told = deviate(range(int(first), int(last)))
    assert fc.init().hosts[0] != fc.init().hosts[-1]
    (Path(directory) / str(fc.init().rank)).write_text(json.dumps(told))
