"""The algorithms of this process with those of its user, and the schedules made so far.

Those that the user, or an installed package (see ``packages``), registers stand beside the built-in ones.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import index
from re import fullmatch

from flagcx.algorithms.catalogue import Algorithm, AlgorithmEntry, builtin_entries, takes
from flagcx.algorithms.packages import load_packages
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES, check_collective
from flagcx.schedule.model import Schedule

VERIFIED_RANKS = 64
"""A user's algorithm is verified at every new number of ranks up to this one."""
_TRIED_RANKS = 10
"""Where the numbers of ranks begin that are not tried when an algorithm is registered."""
_NAME = r"[A-Za-z][A-Za-z0-9_.-]*"
_RESERVED = ("native", "auto")


class _Registry:
    """The entries by collective and name, and the schedules made so far.

    This is state of the process that ``register`` and ``unregister`` change; a lock guards it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries = {(e.collective, str(e.algorithm)): e for e in builtin_entries()}
        self.build = lru_cache(maxsize=1024)(_build)


@lru_cache(maxsize=1)
def _registry() -> _Registry:
    """The one registry of the process, made when first needed."""
    return _Registry()


def _build(collective: str, algorithm: str, size: int, root, pieces: int, groups) -> Schedule:
    known = entry(collective, algorithm)
    schedule = known.make(size, root, pieces, groups)
    if known.trusted:
        return schedule
    return _verified(known, schedule, size, root)


def catalogue() -> tuple[AlgorithmEntry, ...]:
    """Every algorithm for every collective, those registered by the user last."""
    registry = _registry()
    with registry.lock:
        return tuple(registry.entries.values())


def entries(collective: str) -> tuple[AlgorithmEntry, ...]:
    """The algorithms that serve a collective.

    Raises:
        ArgumentError: There is no such collective; the message lists them.

    Example:
        >>> [str(entry.algorithm) for entry in entries("scatter")]
        ['binomial', 'direct']
    """
    check_collective(collective)
    return tuple(found for found in catalogue() if found.collective == collective)


def entry(collective: str, algorithm: str | Algorithm) -> AlgorithmEntry:
    """One algorithm of a collective.

    Raises:
        ArgumentError: There is none of that name; the message lists those there are.

    Example:
        >>> entry("allreduce", "ring").steps(8)
        14
    """
    key = (collective, str(algorithm))
    found = _registry().entries.get(key)
    if found is None:
        failures = load_packages()
        found = _registry().entries.get(key)
    if found is None:
        names = ", ".join(str(known.algorithm) for known in entries(collective))
        hint = " (it is the library's own, and has no schedule)" if algorithm == Algorithm.NATIVE else ""
        raise ArgumentError(
            f"algorithm={str(algorithm)!r} does not serve {collective}{hint}; expected one of {names}"
            + "".join(f"; {failure}" for failure in failures)
        )
    return found


def build(
    collective: str,
    algorithm: str | Algorithm,
    size: int,
    root: int | None = None,
    pieces: int = 1,
    groups: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """The schedule of an algorithm, made once and kept.

    Args:
        collective: Name of the collective.
        algorithm: A member of ``Algorithm``, its value, or a name that the user registered.
        size: Number of ranks.
        root: The root of a rooted collective, else None.
        pieces: Pieces that a block (ring), the message (tree, chain) or half of it (double binary tree) is
            cut into, so that they follow each other; 1 for algorithms that are not pipelined.
        groups: For hierarchical: the ranks of each group (host); None for equal groups of consecutive ranks.

    Raises:
        ArgumentError: There is no such algorithm, or it does not take one of the arguments.
        RankError: The root is not one of the ranks.
        ScheduleError: An algorithm of the user's own is wrong for this number of ranks.

    Example:
        >>> build("broadcast", Algorithm.TREE, size=8, root=3, pieces=4).chunks
        4
    """
    frozen = None if groups is None else tuple(tuple(group) for group in groups)
    return _registry().build(collective, str(algorithm), size, root, pieces, frozen)


def register(
    name: str,
    collective: str,
    build: Callable[..., Schedule],
    *,
    uneven: bool = False,
    sizes: Iterable[int] | None = None,
) -> None:
    """Adds an algorithm of the user's own, for ``algorithm=name`` in calls of ``collective``.

    It is verified here for the numbers of ranks in ``sizes``, all roots and, if it takes ``pieces``, one and
    two of them; and again when it is first used with other numbers (up to 64 ranks). All ranks must register
    it alike. ``flagcx.schedule.compose`` has the words in which it is written.

    A function registered again under its name, as when a notebook's cell is run again, takes the place of
    the one before; a communicator that is open goes on with the schedules that it has compiled.

    Args:
        name: The name to call it by: a letter, then letters, digits, ``_``, ``-`` and ``.``.
        collective: The collective that it serves.
        build: ``build(size)`` makes the schedule. It takes a keyword ``root`` if the collective is rooted,
            and may take ``pieces``. For a number of ranks that it cannot serve it raises ArgumentError.
        uneven: Whether it also serves blocks of different sizes.
        sizes: Numbers of ranks to verify it for, all of which it must serve. By default those of 1 to 9 that
            it serves, or, if none, the first that it serves up to 64.

    Raises:
        ArgumentError: The name cannot be used or is taken, the collective is unknown, or ``build`` is not
            such a function or serves no number of ranks.
        ScheduleError: The schedule would hang, race, give a wrong result, or as an all-reduce other bits on
            some rank (see ``verify``); nothing is registered.

    Example:
        >>> from flagcx.algorithms.direct import direct_broadcast, direct_reduce
        >>> from flagcx.schedule.compose import then
        >>> register("star", "allreduce", lambda size: then(direct_reduce(size), direct_broadcast(size)))
        >>> build("allreduce", "star", 4).algorithm
        'star'
        >>> unregister("star", "allreduce")
    """
    entries(collective)
    key = (collective, str(name))
    _check_name(name)
    _check_function(build, name, collective)
    made = AlgorithmEntry(key[1], collective, build, pipelined=takes(build, "pieces"), uneven=uneven)
    _check_free(key, made)
    if sizes is None:
        _verify_served(made)
    else:
        for size in _checked_sizes(sizes):
            _verify_size(made, size)
    registry = _registry()
    with registry.lock:
        _check_free(key, made)
        registry.entries[key] = made
    registry.build.cache_clear()


def _check_name(name: str) -> None:
    """Refuses a name that a call, or a table of measured times, could not tell from something else."""
    if not isinstance(name, str) or name in _RESERVED or not fullmatch(_NAME, name):
        raise ArgumentError(
            f"name={name!r} cannot be an algorithm's; expected a letter and then letters, digits or any of "
            f"_ - . (and not {' or '.join(_RESERVED)})"
        )


def _checked_sizes(sizes: Iterable[int]) -> list[int]:
    """The numbers of ranks that a caller wants an algorithm to be verified for."""
    try:
        found = [index(size) for size in sizes]
    except TypeError:
        found = []
    if not found or min(found) < 1:
        raise ArgumentError(f"sizes={sizes!r}; expected numbers of ranks, at least one, each from 1 up")
    return found


def _check_free(key: tuple[str, str], made: AlgorithmEntry) -> None:
    """Refuses a name that is taken, other than by an earlier version of the same function."""
    known = _registry().entries.get(key)
    if known is None or (not known.trusted and _home(known) == _home(made)):
        return
    whose = "of the library's own" if known.trusted else f"that {'.'.join(_home(known))} makes"
    raise ArgumentError(f"{key[0]} has an algorithm {key[1]!r} already, {whose}; give another name")


def _home(entry: AlgorithmEntry) -> tuple[str, str]:
    """Where the function of an algorithm was written."""
    function = entry.function
    kind = type(function)
    return (
        getattr(function, "__module__", kind.__module__),
        getattr(function, "__qualname__", kind.__qualname__),
    )


def _verify_served(made: AlgorithmEntry) -> None:
    """Verifies an algorithm for those of the first numbers of ranks that it serves, or a later one."""
    served = False
    for size in range(1, VERIFIED_RANKS + 1):
        if served and size >= _TRIED_RANKS:
            return
        if made.allows(size):
            _verify_size(made, size)
            served = True
    if not served:
        raise ArgumentError(
            f"algorithm {made.algorithm!r} of {made.collective} serves no number of ranks from 1 to "
            f"{VERIFIED_RANKS}; for 8 it says: {made.refusal(8)}"
        )


def _verify_size(made: AlgorithmEntry, size: int) -> None:
    for root in range(size) if made.rooted else (None,):
        for pieces in (1, 2) if made.pipelined else (1,):
            _verified(made, made.make(size, root, pieces), size, root)


def _verified(made: AlgorithmEntry, schedule: Schedule, size: int, root: int | None) -> Schedule:
    """The schedule under the algorithm's name. What its programs raise, which are made now, is said to."""
    from flagcx.schedule.verify import verify

    schedule = _checked(made, schedule, size, root)
    if size <= VERIFIED_RANKS:
        try:
            verify(schedule, uneven=made.uneven, same_bits=True)
        except Exception as error:
            raise made.broken(size, root, error) from error
    return schedule


def _check_function(build: Callable[..., Schedule], name: str, collective: str) -> None:
    """Refuses a user's function that cannot be called as an algorithm is."""
    root = {"root": 0} if COLLECTIVES[collective].rooted else {}
    wanted = "build(size, root=...)" if root else "build(size)"
    try:
        inspect.signature(build).bind(2, **root)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"algorithm {str(name)!r} of {collective}: build={build!r} cannot be called as {wanted} "
            f"({error}); expected a function that takes these and returns a flagcx.schedule.model.Schedule"
        ) from None


def _checked(entry: AlgorithmEntry, schedule: Schedule, size: int, root: int | None) -> Schedule:
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"the function of algorithm {entry.algorithm!r} returned {schedule!r} for size={size}; it must "
            f"return a Schedule (see flagcx.schedule.compose and flagcx.schedule.model), or raise "
            f"ArgumentError for a number of ranks that it cannot serve"
        )
    got = (schedule.collective, schedule.size, schedule.root)
    if got != (entry.collective, size, root):
        raise ArgumentError(
            f"algorithm {entry.algorithm!r} made a schedule for (collective, size, root) = {got}; expected "
            f"{(entry.collective, size, root)}"
        )
    return replace(schedule, algorithm=str(entry.algorithm))


def unregister(name: str, collective: str) -> None:
    """Removes an algorithm that ``register`` added.

    Raises:
        ArgumentError: There is none of that name, or it comes with flagcx.
    """
    if entry(collective, name).trusted:
        raise ArgumentError(f"algorithm {name!r} of {collective} comes with flagcx and cannot be removed")
    registry = _registry()
    with registry.lock:
        registry.entries.pop((collective, str(name)), None)
    registry.build.cache_clear()
