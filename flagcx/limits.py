"""A limit of the process that was met, in the words of an error: which one, its value, how to raise it."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from flagcx.errors import ResourceError


def remedy(error: OSError) -> str:
    """What to do about an error that a limit has caused; "" if none has."""
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return (
            f"the process may make files of {limit:,} bytes at most, and shared memory is one; raise the "
            f"limit before the job starts: ulimit -f unlimited"
        )
    if error.errno == errno.ENFILE:
        return "the machine has as many files open as it may; end other programs, or raise sysctl fs.file-max"
    if error.errno != errno.EMFILE:
        return ""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = f"ulimit -n {most}" if limit < most else f"ulimit -n, as root, since {most:,} is the hard limit"
    return (
        f"the process may have {limit:,} descriptors open at once; close files and communicators, or allow "
        f"more before the job starts: {more}"
    )


def described(error: OSError) -> str:
    """The error's text, with the remedy where a limit has caused it."""
    return "; ".join(filter(None, (str(error), remedy(error))))


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raises a ``ResourceError`` with the remedy in place of an error that a limit causes.

    Args:
        what: What cannot be done, as the beginning of the message.
    """
    try:
        yield
    except OSError as error:
        if way_out := remedy(error):
            raise ResourceError(f"{what} ({error.strerror}): {way_out}") from error
        raise
