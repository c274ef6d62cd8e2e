"""``flagcx doctor``: the parts that flagcx can use on this machine; or what a flight record says."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import typer

from flagcx.config import environment, unknown_settings

_OK, _NOTE = "[green]yes[/]", "[yellow]no[/]"
_SMALL_SHM_NBYTES = 256 << 20
_UNLIMITED = 10_000
"""Columns where the output is no terminal: each finding stays in one line."""
# Two sibling processes, as ranks are: one shows the address of a secret, the other reads it there.
_SHOW = """
import ctypes, sys
secret = ctypes.create_string_buffer(b"flagcx", 6)
print(ctypes.addressof(secret), flush=True)
sys.stdin.read()
"""
_PEEK = """
import ctypes, sys
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]
pid, address = map(int, sys.argv[1:])
buffer = ctypes.create_string_buffer(6)
local, remote = Vector(ctypes.addressof(buffer), 6), Vector(address, 6)
ctypes.CDLL(None).process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
sys.exit(buffer.raw != b"flagcx")
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table.

    Attributes:
        what: The part.
        good: Whether it is as it should be; None where either is fine.
        found: Its state, in words.
        advice: The remedy, if one is needed.
    """

    what: str
    good: bool | None
    found: str
    advice: str = ""


def doctor(
    record: list[Path] = typer.Argument(  # noqa: B008
        None, help="A flight record (one file of each host), to be told what went wrong in its job."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show what this machine offers, and what flagcx finds missing; or what a flight record says.

    Files of this user's in /dev/shm that killed jobs of Open MPI have left, and no process uses, are removed.
    """
    if record:
        _tell(record, as_json)
    elif as_json:
        print(json.dumps([asdict(finding) for finding in examine()], indent=1))
    else:
        _examine_machine()


def _tell(paths: Sequence[Path], as_json: bool) -> None:
    """Says what a flight record says."""
    from flagcx.cli.status import report
    from flagcx.diagnosis.account import account

    found = account(*paths)
    if as_json:
        said = {
            "job": found.headline,
            "words": found.sentences,
            "culprits": found.explanation.culprits,
            "circles": found.explanation.circles,
            "ranks": [state.to_dict() for state in found.states],
        }
        print(json.dumps(said, indent=1))
        return
    print(found.headline, "", *found.sentences, report(found.states), "", sep="\n")
    for rank, places in sorted(found.places.items()):
        if places:
            print(f"rank {rank} {'; '.join(places)}")


def _examine_machine() -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="flagcx doctor", title_justify="left")
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in examine():
        mark = {True: _OK, False: _NOTE, None: ""}[finding.good]
        table.add_row(mark, finding.what, escape(finding.found), escape(finding.advice))
    Console(width=None if sys.stdout.isatty() else _UNLIMITED).print(table)


def examine() -> Iterator[Finding]:
    """Examines all parts, and yields a finding for each."""
    from flagcx.kernels.cuda import driver_cuda, pip_command

    yield Finding("flagcx", None, _version("flagcx") or "from a source tree, not installed")
    yield Finding("Python", (3, 10) <= sys.version_info < (3, 14), platform.python_version())
    yield Finding("system", sys.platform == "linux", f"{platform.system()} {platform.release()}")
    usable = len(os.sched_getaffinity(0))
    yield Finding("cores", None, f"{usable} usable of {os.cpu_count()}")
    yield _shared_memory()
    yield _cross_memory()
    yield _package("NumPy", "numpy", "numpy")
    yield _gpus()
    for_gpus = pip_command(driver_cuda())
    yield _package("CuPy", "cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy", advice=for_gpus)
    yield _package("NCCL", "nvidia.nccl", "nvidia-nccl-cu12", "nvidia-nccl-cu13", advice=for_gpus)
    yield _package("mpi4py", "mpi4py", "mpi4py", advice="pip install 'flagcx[mpi]'")
    mpirun = shutil.which("mpirun")
    yield Finding("mpirun", mpirun is not None, mpirun or "not on PATH")
    yield _package("PyTorch", "torch", "torch", advice="pip install 'flagcx[torch]'")
    yield _package("matplotlib", "matplotlib", "matplotlib", advice="pip install 'flagcx[plot]'")
    yield _settings()


def _settings() -> Finding:
    environ = environment()
    names = [name for name in sorted(environ) if name.startswith("FLAGCX_")]
    unknown = unknown_settings(environ)
    return Finding("FLAGCX_ settings", not unknown, ", ".join(names) or "none", "; ".join(unknown))


def _shared_memory() -> Finding:
    from flagcx.bootstrap.mpi_leftovers import remove_ownerless

    try:
        freed = remove_ownerless()
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", False, str(error), "mount a tmpfs there: ranks of one host need it")
    found = f"{usage.free >> 20} MiB free of {usage.total >> 20} MiB"
    if freed:
        found += f", after {freed >> 20} MiB were removed that jobs of Open MPI had left"
    good = usage.free >= _SMALL_SHM_NBYTES
    return Finding("/dev/shm", good, found, "" if good else "give the container more: --shm-size=1g")


def _cross_memory() -> Finding:
    try:
        allowed = can_read_siblings()
    except OSError:
        allowed = False
    if allowed:
        return Finding("cross-memory attach", True, "allowed")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    detail = f"ptrace_scope is {scope.read_text().strip()}" if scope.exists() else "refused by the system"
    advice = "large messages go the slower way; sysctl kernel.yama.ptrace_scope=0, or --cap-add=SYS_PTRACE"
    return Finding("cross-memory attach", False, detail, advice)


def can_read_siblings() -> bool:
    """Whether one rank may read another's memory: tried between two new processes."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _SHOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shower:
        assert shower.stdout is not None
        address = shower.stdout.readline().strip()
        peek = [sys.executable, "-S", "-c", _PEEK, str(shower.pid), address]
        return subprocess.run(peek, check=False, stderr=subprocess.DEVNULL).returncode == 0


def _gpus() -> Finding:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except Exception as error:  # No package, no library, no driver, no device: all mean the same here.
        return Finding("GPUs", False, f"none ({error})", "NumPy arrays work without")
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Finding("GPUs", bool(names), f"{kinds or 'none'}, driver {driver}")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _package(what: str, module: str, *distributions: str, advice: str = "") -> Finding:
    versions = [f"{name} {_version(name)}" for name in distributions if _version(name)]
    if versions:
        return Finding(what, True, ", ".join(versions))
    with contextlib.suppress(ImportError):
        if importlib.util.find_spec(module) is not None:
            return Finding(what, True, "found, version unknown")
    return Finding(what, False, "not installed", advice or f"pip install {distributions[0]}")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
