"""Settings, read once. The only module that looks at the process's environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path

from flagcx.errors import ArgumentError
from flagcx.migration import keyword_hint

_PREFIX = "FLAGCX_"
_MOST_S = 1e8
_TOLD_TO_RANKS = (
    "RANK",
    "SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "JOB",
    "STORE_ADDRESS",
    "STORE_KEY",
    "RESTARTS",
)
_OF_TESTS = ("TEST_RANKS", "TEST_PERFETTO")


def environment() -> dict[str, str]:
    """A copy of the process's environment, to pass on to ranks or to read a launcher's variables from."""
    return dict(os.environ)


def cache_directory(environ: Mapping[str, str]) -> Path:
    """The directory that keeps this user's tables and kernels from job to job; it may not exist yet."""
    base = environ.get("XDG_CACHE_HOME", "")
    cache = Path(base) if os.path.isabs(base) else Path(environ.get("HOME") or Path.home()) / ".cache"
    return cache / "flagcx"


def state_directory(environ: Mapping[str, str]) -> Path:
    """The directory that keeps what past jobs of this user have left to read; it may not exist yet."""
    base = environ.get("XDG_STATE_HOME", "")
    home = Path(environ.get("HOME") or Path.home())
    return (Path(base) if os.path.isabs(base) else home / ".local" / "state") / "flagcx"


def set_default(name: str, value: str) -> None:
    """Sets a variable that a library reads from the process's environment, unless it is set."""
    os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set from outside. Each field is read from ``FLAGCX_<NAME>``.

    Attributes:
        timeout_s: How long an operation waits for a peer, in seconds.
        init_timeout_s: How long ``init`` waits for all ranks, in seconds. Where lost ranks are started again
            it waits as long as ``timeout_s``, if that is longer, for ranks that are in the middle of a step.
        slot_nbytes: Size of one piece of a message on its way through shared memory, in bytes.
        cross_memory: Whether large messages may go straight from one process's memory to another's.
        peer_memory: Whether GPUs of one host may access each other's memory directly, without NCCL.
        topology_detection: Whether the machine's links are detected when they are first needed.
        share_gpu: Whether several ranks may use one GPU, as ``flagcx run --share-gpu`` arranges.
        tuning: Whether tables that ``flagcx tune`` measured choose the algorithms. Rank 0's setting counts.
        tuning_file: The table to use; by default the one in the user's cache directory.
        live_tuning: Whether a job that has a table tries alternatives now and then, and corrects it.
        profile: Whether operations are recorded; see ``Communicator.profiler``.
        deterministic: Whether the rule alone chooses, so that a call gives the same bits in every run.
        transport: What carries arrays, such as "shared_memory", "mpi" or "ucx"; chosen by where the ranks
            are if empty. See ``flagcx.transport.registry``.
        throttle: A slow link to imitate between ranks of one host, for trials: GB/s, and optionally a comma
            and the latency in us, such as "0.0125,50"; no limit if empty.
        kill_after_s: How long ranks that ``flagcx run`` or ``fc.launch`` tells to end (SIGTERM, Ctrl-C) have
            before they are killed, in seconds: time for a checkpoint.
        explain_wait_s: How long a rank waits for a peer, in seconds, before it looks into why and says so.
        record: The directory for flight records (see ``flagcx doctor``); ``~/.local/state/flagcx/records`` if
            empty, none if "0".
        debug: "check" compares every call between ranks before it runs; "" does not.
    """

    timeout_s: float = 300.0
    init_timeout_s: float = 120.0
    slot_nbytes: int = 1 << 20
    cross_memory: bool = True
    peer_memory: bool = True
    topology_detection: bool = True
    share_gpu: bool = False
    tuning: bool = True
    tuning_file: str = ""
    live_tuning: bool = True
    profile: bool = True
    deterministic: bool = False
    transport: str = ""
    throttle: str = ""
    kill_after_s: float = 10.0
    explain_wait_s: float = 5.0
    record: str = ""
    debug: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), type(field.default))
        for name in ("timeout_s", "init_timeout_s", "explain_wait_s"):
            seconds = getattr(self, name)
            if not 0 < seconds <= _MOST_S:
                raise ArgumentError(
                    f"{name} must be above 0 and at most {_MOST_S:.0e} seconds, which is three years, got "
                    f"{seconds!r}"
                )
        if not self.kill_after_s >= 0:
            raise ArgumentError(f"kill_after_s must be from 0 seconds up, got {self.kill_after_s!r}")
        if self.slot_nbytes < 4096 or self.slot_nbytes % 4096:
            raise ArgumentError(f"slot_nbytes must be a multiple of 4096 bytes, got {self.slot_nbytes!r}")
        if self.debug not in ("", "check"):
            raise ArgumentError(f'debug must be "" or "check", got {self.debug!r}')

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides) -> Config:
        """Reads ``FLAGCX_*`` from ``environ`` (the process's own by default); ``overrides`` win.

        Raises:
            ArgumentError: A value cannot be read as its field's type, or there is no such field.
        """
        check_settings(overrides)
        environ = os.environ if environ is None else environ
        values = {}
        for field in fields(cls):
            text = environ.get(_PREFIX + field.name.upper())
            if text is not None:
                values[field.name] = _parse(_PREFIX + field.name.upper(), text, type(field.default))
        return replace(cls(**values), **overrides)


def check_settings(names: Iterable[str], others: Sequence[str] = ()) -> None:
    """Checks the names of settings that a call was given.

    Args:
        names: The names.
        others: What else the call takes by name.

    Raises:
        ArgumentError: There is no setting of one of the names.
    """
    known = [field.name for field in fields(Config)]
    for name in names:
        if name not in known:
            hint = keyword_hint(name, (*others, *known))
            raise ArgumentError(f"there is no setting {name!r}; expected one of {', '.join(known)}{hint}")


def unknown_settings(environ: Mapping[str, str]) -> list[str]:
    """Says of each ``FLAGCX_*`` variable that nothing reads what may have been meant.

    Example:
        >>> unknown_settings({"FLAGCX_TIMEOUT": "5"})
        ['FLAGCX_TIMEOUT=5 has no effect: there is no such setting; do you mean FLAGCX_TIMEOUT_S?']
    """
    from difflib import get_close_matches  # not on import, which must be quick

    known = sorted({*(field.name.upper() for field in fields(Config)), *_TOLD_TO_RANKS, *_OF_TESTS})
    said = []
    for name in sorted(environ):
        if name.upper().startswith(_PREFIX) and name.removeprefix(_PREFIX) not in known:
            near = get_close_matches(name.upper().removeprefix(_PREFIX), known, 1)
            hint = f"do you mean {_PREFIX}{near[0]}?" if near else "fc.Config lists them"
            said.append(f"{name}={environ[name]} has no effect: there is no such setting; {hint}")
    return said


def _check_type(name: str, value: object, kind: type) -> None:
    """Refuses a setting of another type than its default's.

    Raises:
        ArgumentError: It is.
    """
    if kind is bool:
        fits, wanted = not getattr(value, "shape", ()) and value in (True, False), "True or False"
    elif kind is str:
        fits, wanted = isinstance(value, (str, os.PathLike)), "a str"
    else:
        real = Real if kind is float else Integral
        fits = isinstance(value, real) and not isinstance(value, bool)
        wanted = "a number" if kind is float else "an int"
    if not fits:
        raise ArgumentError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")


def _parse(name: str, text: str, kind: type):
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off", ""):
            return False
        raise ArgumentError(f"{name}={text!r} is not a switch; use 1 or 0")
    try:
        return kind(text)
    except ValueError:
        raise ArgumentError(f"{name}={text!r} is not of type {kind.__name__}") from None
