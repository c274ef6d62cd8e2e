"""Calls with the arguments of other libraries, such as ``comm.send(x, dest=1)``: refused, with our spelling.

A call takes what it has no name for as ``*more`` and ``**foreign``, which costs less than a wrapper around
it, and hands it to ``refuse``. Arguments that it needs have the default None, since Python would otherwise
miss them before it calls. Type checkers see the overloads, and that nothing is of the type ``NoReturn``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from flagcx.migration import keyword_hint

F = TypeVar("F", bound=Callable[..., Any])
_VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def refuses_foreign(*needed: str) -> Callable[[F], F]:
    """Gives a call the signature that ``help()`` shows: without ``*more`` and ``**foreign``.

    Args:
        needed: The arguments that must be given.
    """

    def shown(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [
            one.replace(default=one.empty) if one.name in needed else one
            for one in signature.parameters.values()
            if one.kind not in _VARIADIC
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return shown


def refuse(function: Callable[..., Any], more: Sequence[Any], foreign: Mapping[str, Any]) -> NoReturn:
    """Raises the TypeError for arguments that a call of a communicator does not take.

    Args:
        function: The call.
        more: What was given by position, after all that may be.
        foreign: What was given by a name that it does not have.
    """
    parameters = [*inspect.signature(function).parameters.values()][1:]
    call, names = f"comm.{function.__name__}", [one.name for one in parameters]
    if foreign:
        name = next(iter(foreign))
        hint = keyword_hint(name, names)
        raise TypeError(f"{call}() has no argument {name!r}; its arguments are {', '.join(names)}{hint}")
    placed = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    hint = f"; an array for the result is given by name, as in {call}(x, out=y)"
    raise TypeError(
        f"{call}() takes {', '.join(placed)} by position, and {len(placed) + len(more)} arguments were given"
        f"{hint if 'out' in names and 'out' not in placed else ''}"
    )
