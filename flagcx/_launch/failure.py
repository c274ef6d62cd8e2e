"""The exception of a rank, as its launcher reports it."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import dataclass

from flagcx.errors import LaunchError

_CONSEQUENCE = re.compile(
    r"^flagcx\.errors\.(PeerDied|PeerTimeout|Aborted|Communication)Error\b", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception of a rank.

    Attributes:
        at: The time on the host's monotonic clock, in seconds.
        kind: The exception's class, with its module.
        message: The exception's text.
        traceback: The traceback's text.
        exception: The pickled exception, or None if it cannot be pickled or was raised in this process.
    """

    at: float
    kind: str
    message: str
    traceback: str
    exception: bytes | None = None

    @classmethod
    def of(cls, error: BaseException, file: str, exception: bytes | None = None) -> Failure:
        """Describes an exception, without the outermost frames of its traceback, which are in ``file``."""
        at, frames = time.monotonic(), error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == file:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return cls(at, kind, str(error), text, exception)

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank failed."""
        return is_consequence(self.kind)

    def launch_error(self, rank: int) -> LaunchError:
        """The error of ``fc.launch`` that blames this rank."""
        text = f"rank {rank} raised {self.kind}: {self.message}\n\n{self.traceback}"
        return LaunchError(text, rank=rank, exit_code=1, traceback=self.traceback)


def is_consequence(traceback: str) -> bool:
    """Whether a traceback, or an error's full name, only says that another rank failed."""
    return _CONSEQUENCE.search(traceback) is not None
