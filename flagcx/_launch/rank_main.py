"""The main program of a rank of ``fc.launch``: calls the launcher's function and gives back the result.

Function and result travel through files in memory (``memfd``) that only the two processes hold, so they may
be of any size, and pickle reads only data that the launcher or its rank wrote.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

from flagcx._launch.failure import Failure
from flagcx._launch.process_groups import end_with_launcher
from flagcx.errors import ResourceError


@dataclass(frozen=True, slots=True)
class PickledCall:
    """The call, and what a rank needs before it can unpickle it.

    Attributes:
        path: The launcher's ``sys.path``.
        sources: The lines of source files that exist in the launcher alone, such as a notebook's cells.
        call: The pickled (function, args, kwargs).
    """

    path: list[str]
    sources: dict[str, list[str]]
    call: bytes


@dataclass(frozen=True, slots=True)
class Success:
    """The pickled result of a rank."""

    value: bytes


def main(call_file: int, result_file: int, pipe: int) -> None:
    """Runs a rank: reads its ``PickledCall`` and writes a ``Success`` or ``Failure``, by descriptors.

    Ends the process with exit code 1 if the function raised. ``pipe`` is that of ``end_with_launcher``.
    """
    end_with_launcher(pipe)
    outcome: Success | Failure
    rank = os.getpid()
    try:
        value = _call(read_file(call_file))
        if os.getpid() != rank:
            return  # a child that the function has forked and that returned too
        outcome = Success(_pickle(value))
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        if os.getpid() != rank or error.code not in (None, 0):
            raise
        outcome = Success(_pickle(None))
    except BaseException as error:
        if os.getpid() != rank:
            raise
        outcome = _describe(error)
    write_file(result_file, pickle.dumps(outcome))
    if isinstance(outcome, Failure):
        raise SystemExit(1)


def _call(content: bytes) -> Any:
    pickled: PickledCall = pickle.loads(content)
    sys.path[:] = pickled.path
    for name, lines in pickled.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    function, args, kwargs = pickle.loads(pickled.call)
    return function(*args, **kwargs)


def _pickle(value: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__}, which cannot be sent back ({error}); return "
            f"arrays, numbers, text or containers of them"
        ) from error


def _describe(error: BaseException) -> Failure:
    sys.last_type, sys.last_value = type(error), error  # The store's ``leave`` looks there.
    try:
        pickled = _pickle(error)
    except Exception:
        pickled = None
    return Failure.of(error, __file__, pickled)


def read_file(descriptor: int) -> bytes:
    """Reads all of a file that several processes share, whatever their positions in it."""
    size, parts, start = os.fstat(descriptor).st_size, [], 0
    while start < size:
        parts.append(os.pread(descriptor, size - start, start))
        start += len(parts[-1])
    return b"".join(parts)


def write_file(descriptor: int, content: bytes) -> None:
    """Writes all of a file, in as many calls as it takes.

    Raises:
        ResourceError: There is no room for it.
    """
    view, start = memoryview(content), 0
    try:
        while start < len(view):
            start += os.pwrite(descriptor, view[start:], start)
    except OSError as error:
        raise ResourceError(
            f"there is no room for {len(view):,} bytes of a rank's function or result ({error.strerror}); "
            f"raise the limit of files if there is one (ulimit -f), or pass less"
        ) from None
