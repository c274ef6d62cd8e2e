"""How a rank failed, as its launcher reports it: the exception that it raised, the end of its process."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from flagcx.errors import LaunchError

_CONSEQUENCE = re.compile(
    r"^flagcx\.errors\.(PeerDied|PeerTimeout|Aborted|Communication)Error\b", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank's process ended.

    Attributes:
        rank: The rank.
        code: Its exit code; negative: the signal that ended it.
        after_signal: Whether the launcher had told it to end.
    """

    rank: int
    code: int
    after_signal: bool

    def describe(self) -> str:
        """The exit in words: "exit code 3" or "killed by SIGKILL"."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


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


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks as the subject of a sentence: "rank 1 was" or "ranks 0, 1 were"."""
    names = ", ".join(map(str, ranks))
    return f"rank {names} was" if len(ranks) == 1 else f"ranks {names} were"


def is_consequence(traceback: str) -> bool:
    """Whether a traceback, or an error's full name, only says that another rank failed."""
    return _CONSEQUENCE.search(traceback) is not None
