"""Every exception that flagcx raises on purpose, as one tree.

::

    FlagcxError
    ├── ArgumentError (ValueError)       the call itself is wrong; nothing was sent
    │   ├── ArrayError                   layout, dtype, shape or home of an array
    │   ├── OperationError               unknown reduce operation, or one the dtype lacks
    │   └── RankError                    a root or peer out of range
    ├── ScheduleError                    a schedule that would hang or give a wrong result
    ├── TopologyError (ValueError)       a machine, or a file about it, is not understood
    ├── BootstrapError                   the ranks could not find each other
    ├── LaunchError                      a launched rank failed
    ├── CommunicatorError                closed, used after fork, or by two threads at once
    ├── CommunicationError               an operation that began and could not end
    │   ├── PeerDiedError                a peer's process is gone
    │   ├── PeerTimeoutError (TimeoutError)  a peer did not come in time
    │   ├── MismatchError                ranks called different operations
    │   └── AbortedError                 another rank gave up and told this one, or this one called abort
    ├── ResourceError                    no memory, no room in /dev/shm, no descriptor left
    └── MissingDependencyError (ImportError)  an optional package is not installed

A message says what was wrong, the value that was got, the expected one, and the remedy.
"""

from __future__ import annotations

from functools import partial


class FlagcxError(Exception):
    """Base of all exceptions that flagcx raises on purpose."""


class ArgumentError(FlagcxError, ValueError):
    """The call is wrong. It was refused before anything was sent."""


class ArrayError(ArgumentError):
    """An array has a layout, dtype, shape or home that the operation cannot take."""


class OperationError(ArgumentError):
    """A reduce operation is unknown, or is not defined for the dtype."""


class RankError(ArgumentError):
    """A root or peer is not a rank of the communicator."""


class ScheduleError(FlagcxError):
    """A schedule would hang, race or end with a wrong result.

    Attributes:
        rank: The rank in whose program the fault lies, or None.
        step: The step of that program, or None.
        chunk: The chunk concerned, or None.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, step: int | None = None, chunk: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank, self.step, self.chunk = rank, step, chunk


class TopologyError(FlagcxError, ValueError):
    """A machine, or a file that describes one, cannot be understood."""


class BootstrapError(FlagcxError):
    """The ranks of a job could not find each other or agree on a start.

    Attributes:
        rank: The rank at fault where it is known, or None.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def text_of(error: BaseException) -> str:
    """An exception's text, also where its own ``__str__`` fails."""
    try:
        return str(error)
    except Exception:
        return "<its text cannot be made>"


def is_own_fault(error: BaseException) -> bool:
    """Whether an exception that is none of flagcx's kinds comes from a line of flagcx."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.startswith("flagcx.") and not isinstance(error, FlagcxError)


def what_it_raised(error: BaseException) -> str:
    """How a rank ended that raised an exception, as its peers are told."""
    if isinstance(error, SystemExit):
        code = error.code or 0
        return (
            f"it exited with code {code}" if isinstance(code, int) else f"it exited: {text_of(error)[:500]}"
        )
    return f"it raised {type(error).__name__}: {text_of(error)[:500]}".removesuffix(": ")


def reason_of(error: BaseException) -> str:
    """Why a rank gave up in a call that raised an exception, as its peers are told."""
    return text_of(error) if isinstance(error, FlagcxError) else what_it_raised(error)


class LaunchError(FlagcxError):
    """A launched rank failed.

    Attributes:
        rank: The first rank that failed.
        exit_code: Its exit code (negative: the signal that ended it), or None.
        traceback: Its traceback as text, or "".
    """

    def __init__(self, message: str, *, rank: int, exit_code: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.traceback = rank, exit_code, traceback

    def __reduce__(self) -> tuple:
        again = partial(type(self), rank=self.rank, exit_code=self.exit_code, traceback=self.traceback)
        return again, self.args


class CommunicatorError(FlagcxError):
    """A communicator is closed, was carried through a fork, or is used by two threads at once."""


class CommunicationError(FlagcxError):
    """An operation began and could not end. The communicator cannot be used afterwards.

    Attributes:
        peer: The rank at fault where it is known, or None.
    """

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerDiedError(CommunicationError):
    """A peer's process ended while this rank needed it."""


class PeerTimeoutError(CommunicationError, TimeoutError):
    """A peer did not take part within the time-out.

    Attributes:
        late: The ranks that did not, by their numbers in the job, where they are known.
    """

    def __init__(self, message: str, *, peer: int | None = None, late: tuple[int, ...] = ()) -> None:
        super().__init__(message, peer=peer)
        self.late = late


class MismatchError(CommunicationError):
    """Ranks of one communicator called operations that do not belong together."""


class AbortedError(CommunicationError):
    """Another rank found an error and told the others."""


class ResourceError(FlagcxError):
    """The machine has no room left: memory, shared memory or descriptors."""


class MissingDependencyError(FlagcxError, ImportError):
    """An optional package is needed and not installed. The message has the pip command."""
