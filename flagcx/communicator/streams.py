"""``stream=``: a call that is enqueued on a stream of the caller's choice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flagcx.arguments import on_device
from flagcx.errors import ArgumentError

if TYPE_CHECKING:
    from flagcx.communicator.dispatch import Dispatch


def on_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    """Gives an operation the argument ``stream``: a CuPy stream, in place of the current one."""

    @functools.wraps(method)
    def operation(self: Dispatch, *args: Any, stream: Any = None, **options: Any) -> Any:
        if stream is None:
            return method(self, *args, **options)
        return run_on(stream, method, self, args, options)

    signature = inspect.signature(method)
    keyword = inspect.Parameter("stream", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any")
    parameters = [*signature.parameters.values(), keyword]
    operation.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return operation


def run_on(
    stream: Any, method: Callable[..., Any], comm: Dispatch, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Calls ``method`` with ``stream`` as the current stream, and keeps its arrays until that has used them.

    Raises:
        ArgumentError: No array of the call is on a GPU, or a group is open.
    """
    given = (*args, options.get("x"), options.get("out"))
    arrays = [a for one in given for a in (one if isinstance(one, (list, tuple)) else [one]) if a is not None]
    if not any(on_device(a) for a in arrays):
        raise ArgumentError("stream= is for arrays on a GPU, and none of this call's is; leave it out")
    if comm._group is not None:
        raise ArgumentError(
            "stream= has no meaning inside comm.group(), whose calls run at its end; put the whole group "
            "into a 'with stream:' block"
        )
    with stream:
        value = method(comm, *args, **options)
    if comm._device is not None:
        comm._device.transport.keep(stream, *arrays, value)
    return value
