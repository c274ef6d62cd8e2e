"""A rank's place in its job, read from the variables that its launcher set.

Every launcher has names of its own for the same four numbers::

    launcher  rank                size                  local rank                local size
    torchrun  RANK                WORLD_SIZE            LOCAL_RANK                LOCAL_WORLD_SIZE
    openmpi   (OMPI_COMM_WORLD_ before each:) RANK, SIZE, LOCAL_RANK, LOCAL_SIZE
    mvapich   (MV2_COMM_WORLD_ before each:) RANK, SIZE, LOCAL_RANK, LOCAL_SIZE
    jsrun     (JSM_NAMESPACE_ before each:) RANK, SIZE, LOCAL_RANK, LOCAL_SIZE
    horovod   (HOROVOD_ before each:) RANK, SIZE, LOCAL_RANK, LOCAL_SIZE
    mpich     PMI_RANK            PMI_SIZE              MPI_LOCALRANKID           MPI_LOCALNRANKS
    pals      PALS_RANKID         PMI_SIZE              PALS_LOCAL_RANKID         PALS_LOCAL_SIZE
    pals      PMI_RANK            PMI_SIZE              PMI_LOCAL_RANK            PMI_LOCAL_SIZE
    flux      FLUX_TASK_RANK      FLUX_JOB_SIZE         FLUX_TASK_LOCAL_ID        FLUX_JOB_NNODES
    slurm     SLURM_PROCID        SLURM_STEP_NUM_TASKS  SLURM_LOCALID             SLURM_STEP_TASKS_PER_NODE
    flagcx    FLAGCX_RANK         FLAGCX_SIZE           FLAGCX_LOCAL_RANK         FLAGCX_LOCAL_SIZE
    given     FLAGCX_RANK         FLAGCX_SIZE           not told: the ranks find out

Launchers are started by launchers (``srun torchrun``, mpirun in a Slurm step), so several rows may be
set. The innermost one counts: the table is in that order, and flagcx is last because its launcher removes the
other rows from its ranks' environment (``without_launchers``), so that one that is set beside it was set by a
launcher that a rank started. ``RANK`` and ``WORLD_SIZE`` may also be set by hand, and then come after flagcx;
without ``TORCHELASTIC_RUN_ID``, which torchrun sets, they must agree with MPI's. (mpich is Intel MPI too.)
The last row is set by hand, or by ``fc.init(rank=, size=, address=)``.

A launcher of which only a trace is found, such as prterun's ``PMIX_RANK``, is refused: its ranks would
otherwise be as many jobs of one rank.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from flagcx.errors import BootstrapError

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True, slots=True)
class Identity:
    """A rank's place in its job.

    Attributes:
        rank: This rank's number in the job, from 0.
        size: How many ranks the job has.
        local_rank: This rank's number among those of its host, from 0; -1 until that is found out.
        local_size: How many ranks its host has; 0 until that is found out.
        host: The host's name together with the boot id of its kernel. Equal on two ranks only if they
            run on one host.
        job: Tells this job from others of the same user.
        launcher: Its name in the table above, or "alone".
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    job: str
    launcher: str


class _Names(NamedTuple):
    """The variables of one launcher: a row of the table above."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


def _alike(launcher: str, prefix: str) -> _Names:
    return _Names(launcher, *(prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


_FLAGCX = _alike("flagcx", "FLAGCX_")
GIVEN = "given"
_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = _alike("openmpi", "OMPI_COMM_WORLD_")
_MVAPICH = _alike("mvapich", "MV2_COMM_WORLD_")
_JSRUN = _alike("jsrun", "JSM_NAMESPACE_")
_HOROVOD = _alike("horovod", "HOROVOD_")
_PALS = _Names("pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
_PALS_BY_PMI = _Names("pals", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
_MPICH = _Names("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_FLUX = _Names("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
_SLURM = _Names("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_OTHERS = (_OPENMPI, _MVAPICH, _JSRUN, _HOROVOD, _MPICH, _PALS, _PALS_BY_PMI, _FLUX, _SLURM)
_BY_PMI = (_MPICH, _PALS, _PALS_BY_PMI)
"""These share names, of which Flux and Slurm set some too; the whole row counts."""
_MPI_LAUNCHERS = frozenset(names.launcher for names in (_OPENMPI, _MVAPICH, _JSRUN, *_BY_PMI))
"""The launchers of MPI's own. Horovod's and Flux's ranks may do without."""
_BY_SLURM_FOR_MPI = ("PMIX_RANK", "PMI_RANK")
_SIZE_TELLS = (_FLAGCX, _TORCHRUN, _OPENMPI, _MVAPICH, _JSRUN, _HOROVOD, _MPICH)
"""Rows whose size, set alone, shows that the launcher was there."""

_JOB_VARIABLES = MappingProxyType(
    {
        "torchrun": (_TORCHRUN_MARK, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
        "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "mvapich": ("MPIRUN_ID", "MPIRUN_HOST", "MPIRUN_PORT"),
        "jsrun": ("LSB_JOBID", "JSM_NAMESPACE_ID"),
        "horovod": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        "pals": ("PALS_APID",),
        "flux": ("FLUX_JOB_ID",),
        "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    }
)
_TRACES = MappingProxyType(
    {
        "PMIX_RANK": "prterun, or another launcher that speaks PMIx",
        "PMI_ID": "a launcher that speaks PMI",
        "SLURM_PROCID": "srun",
        "MPIRUN_RANK": "MVAPICH's mpirun_rsh",
        "MVP_COMM_WORLD_LOCAL_RANK": "MVAPICH's mpirun_rsh",
        "PALS_RANKID": "PALS",
        "FLUX_TASK_RANK": "flux run",
        "ALPS_APP_PE": "aprun",
        "MPI_RANKID": "Platform MPI's mpirun",
        "MP_CHILD": "poe",
        "MPT_LRANK": "MPT's mpiexec",
    }
)
_ADDRESS, _KEY = "FLAGCX_STORE_ADDRESS", "FLAGCX_STORE_KEY"
_OF_THE_LAUNCHER = ("FLAGCX_JOB", _ADDRESS, _KEY)
_CONNECTIONS = ("PMIX_", "PMI_", "PMI2_")


def identify(environ: Mapping[str, str]) -> Identity:
    """Finds this rank's place in its job.

    Args:
        environ: The environment to read, as from ``config.environment()``.

    Returns:
        The rank's identity; rank 0 of 1 where no launcher set its variables.

    Raises:
        BootstrapError: A launcher's variables are incomplete, are not numbers, are out of range, or two
            launchers contradict each other. The message names the variables.

    Example:
        >>> identify({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).rank
        1
    """
    environ = of_the_job(environ)
    names = _innermost(environ)
    if names is None:
        _refuse_traces(environ)
        return Identity(0, 1, 0, 1, host_name(), "alone", "alone")
    if names is _FLAGCX and not {*_FLAGCX[3:]} & environ.keys():
        rank, size = _rank_and_size(names, environ)
        if size > 1 and _ADDRESS not in environ:
            raise BootstrapError(
                f"FLAGCX_RANK={rank} and FLAGCX_SIZE={size} are set by hand, and {_ADDRESS} is not; set it "
                f"to host:port of rank 0 on all ranks (127.0.0.1:PORT on one host), or start the ranks with "
                f"flagcx run"
            )
        return _given(rank, size, environ)
    rank, size, local_rank, local_size = _numbers(names, environ)
    if names is _TORCHRUN and _TORCHRUN_MARK not in environ:
        _check_agreement(names, rank, size, environ)
    job = _job(names.launcher, environ)
    return Identity(rank, size, local_rank, local_size, host_name(), job, names.launcher)


def place_given(environ: Mapping[str, str], rank: int, size: int, address: str, key: str) -> dict[str, str]:
    """An environment for a rank whose place its program gives, whatever started the process."""
    names = {*_FLAGCX[1:], *_OF_THE_LAUNCHER}
    kept = {name: value for name, value in without_launchers(environ).items() if name not in names}
    place = {_FLAGCX.rank: str(rank), _FLAGCX.size: str(size), _ADDRESS: address, _KEY: key}
    return kept | {name: value for name, value in place.items() if value}


def _given(rank: int, size: int, environ: Mapping[str, str]) -> Identity:
    address = environ.get(_ADDRESS, "")
    job = environ.get("FLAGCX_JOB", f"{GIVEN}-{address}")
    on_one_host = size == 1 or is_loopback(address)
    local = (rank, size) if on_one_host else (-1, 0)
    return Identity(rank, size, *local, host_name(), job, GIVEN)


def launched_by_mpi(identity: Identity, environ: Mapping[str, str]) -> bool:
    """Whether MPI knows the ranks of a job: it started them, or Slurm did with MPI's process manager."""
    if identity.launcher == _SLURM.launcher:
        return any(name in environ for name in _BY_SLURM_FOR_MPI)
    return identity.launcher in _MPI_LAUNCHERS


def is_loopback(address: str) -> bool:
    """Whether an address (``host:port``) leads to the host itself, from every host."""
    host = address.removeprefix("tcp:").rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def located(identity: Identity, hosts: Sequence[str]) -> Identity:
    """The identity with its place among the ranks of its host, of the hosts of all ranks."""
    ranks = [rank for rank, host in enumerate(hosts) if host == identity.host]
    return replace(identity, local_rank=ranks.index(identity.rank), local_size=len(ranks))


def of_the_job(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what ``flagcx run`` told its rank, where the rank started another launcher."""
    names = _innermost(environ)
    if not _is_set(_FLAGCX, environ) or names is _FLAGCX:
        return dict(environ)
    dropped = {*_FLAGCX[1:], *_OF_THE_LAUNCHER}
    return {name: value for name, value in environ.items() if name not in dropped}


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the names in the table: for the ranks of a new job of ``flagcx run``."""
    dropped = {name for names in (_TORCHRUN, *_OTHERS) for name in names[1:]} | {_TORCHRUN_MARK, *_TRACES}
    dropped -= {_FLUX.size, _FLUX.local_size}  # They belong to the allocation too.
    return {
        name: value
        for name, value in environ.items()
        if name not in dropped and (not name.startswith(_CONNECTIONS) or name.startswith("PMIX_MCA_"))
    }


def _innermost(environ: Mapping[str, str]) -> _Names | None:
    """The row of the table that counts; None if there is none."""
    rows = [_TORCHRUN, *_OTHERS, _FLAGCX]
    if _TORCHRUN_MARK not in environ and _is_set(_FLAGCX, environ):
        rows = [*_OTHERS, _FLAGCX, _TORCHRUN]
    found = [names for names in rows if _is_set(names, environ)]
    whole = [names for names in found if names not in _BY_PMI or all(name in environ for name in names[1:])]
    return next(iter(whole + found), None)


def _refuse_traces(environ: Mapping[str, str]) -> None:
    for name, launcher in _TRACES.items():
        # Slurm gives a batch script, which is no task of a step, the number 0.
        if name in environ and (name, environ[name]) != (_SLURM.rank, "0"):
            raise BootstrapError(
                f"{name}={environ[name]!r} is set, so {launcher} started this process as one of several, and "
                f"nothing says of how many; start the ranks with mpirun, srun, torchrun or flagcx run, or "
                f"give each RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (or unset {name} to run alone)"
            )


def host_name() -> str:
    """Names this host: ``<host name>/<boot id>``.

    The boot id alone is shared by all containers and namespaces of one kernel; the host name alone may
    be "localhost" on many machines.
    """
    return f"{socket.gethostname()}/{boot_id() or 'unknown'}"


def boot_id() -> str:
    """The kernel's id of its current boot; "" if it cannot be read."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _is_set(names: _Names, environ: Mapping[str, str]) -> bool:
    if names is _SLURM:
        # A batch script and the shell of an allocation have SLURM_PROCID or SLURM_NTASKS too, and are
        # no task of a step; only srun sets both of these.
        return names.rank in environ and names.size in environ
    return names.rank in environ or (names in _SIZE_TELLS and names.size in environ)


def _rank_and_size(names: _Names, environ: Mapping[str, str]) -> tuple[int, int]:
    for present, missing in ((names.rank, names.size), (names.size, names.rank)):
        if missing not in environ:
            raise BootstrapError(
                f"{present}={environ[present]!r} is set but {missing} is not, so this rank's place in the "
                f"job is unknown; set both, or unset {present} to run alone"
            )
    rank, size = _integer(names.rank, environ), _integer(names.size, environ)
    if size < 1:
        raise BootstrapError(f"{names.size}={size} is not a number of ranks; expected at least 1")
    if not 0 <= rank < size:
        raise BootstrapError(
            f"{names.rank}={rank} is no rank of {names.size}={size}; expected 0 to {size - 1}"
        )
    return rank, size


def _numbers(names: _Names, environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    rank, size = _rank_and_size(names, environ)
    missing_names = [name for name in names[3:] if name not in environ]
    if size == 1 and len(missing_names) == 2:
        return rank, size, 0, 1
    if missing_names:
        raise BootstrapError(
            f"{names.rank}={rank} and {names.size}={size} are set but {missing_names[0]} is not; set it too, "
            f"or start the ranks with flagcx run, torchrun, mpirun or srun, which set all of them"
        )
    local_rank = _integer(names.local_rank, environ)
    local_size = {_SLURM: _slurm_local_size, _FLUX: _flux_local_size}.get(
        names, lambda environ: _integer(names.local_size, environ)
    )(environ)
    if not 1 <= local_size <= size:
        raise BootstrapError(
            f"{names.local_size}={local_size} contradicts {names.size}={size}; expected 1 to {size}"
        )
    if not 0 <= local_rank < local_size:
        raise BootstrapError(
            f"{names.local_rank}={local_rank} contradicts {names.local_size}={local_size}; "
            f"expected 0 to {local_size - 1}"
        )
    return rank, size, local_rank, local_size


def _slurm_local_size(environ: Mapping[str, str]) -> int:
    """Reads the entry of this host in, for example, ``4(x2),3``: four tasks on two hosts, then three."""
    text = environ[_SLURM.local_size]
    host_index = _integer("SLURM_NODEID", environ) if "SLURM_NODEID" in environ else 0
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise BootstrapError(f"{_SLURM.local_size}={text!r} cannot be read; expected a list like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= host_index < len(counts):
        raise BootstrapError(f"SLURM_NODEID={host_index} is not in {_SLURM.local_size}={text!r}")
    return counts[host_index]


def _flux_local_size(environ: Mapping[str, str]) -> int:
    """Flux tells how many hosts there are, and gives each as many ranks where that comes out even."""
    size, hosts = _integer(_FLUX.size, environ), _integer(_FLUX.local_size, environ)
    if hosts < 1 or size % hosts:
        raise BootstrapError(
            f"{_FLUX.size}={size} ranks are spread unevenly over {_FLUX.local_size}={hosts} hosts, so it is "
            f"not known how many are here; use flux run --tasks-per-node, or set RANK, WORLD_SIZE, "
            f"LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return size // hosts


def _integer(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise BootstrapError(f"{name}={environ[name]!r} is not an integer") from None


def _check_agreement(names: _Names, rank: int, size: int, environ: Mapping[str, str]) -> None:
    """Raises if variables set by hand contradict MPI's. (Slurm's may differ: it may have started mpirun.)"""
    for other in (_OPENMPI, _MPICH):
        if other.rank not in environ or other.size not in environ:
            continue
        other_rank, other_size = _integer(other.rank, environ), _integer(other.size, environ)
        if (rank, size) != (other_rank, other_size):
            raise BootstrapError(
                f"{names.rank}={rank} and {names.size}={size} contradict {other.rank}={other_rank} and "
                f"{other.size}={other_size}; unset the pair that does not belong to this job"
            )


def _job(launcher: str, environ: Mapping[str, str]) -> str:
    if "FLAGCX_JOB" in environ or launcher == "flagcx":
        return environ.get("FLAGCX_JOB", launcher)
    told = [environ[name] for name in _JOB_VARIABLES.get(launcher, ()) if name in environ]
    if told or launcher in ("torchrun", "openmpi", "slurm"):
        return "-".join([launcher, *told])
    return _hydra_job(launcher)


def _hydra_job(launcher: str) -> str:
    """MPICH gives its job no name, but all ranks of a host descend from one process, its proxy."""
    pid = "self"
    try:
        while pid != "1":
            pid = _stat(pid)[1][1]
            name, numbers = _stat(pid)
            if name.startswith("hydra"):
                return f"{launcher}-{pid}-{numbers[19]}"
    except (OSError, IndexError):
        pass
    raise BootstrapError(
        f"{launcher} started this rank, but no hydra process is among its ancestors, so its job has no name; "
        f"start the ranks with mpirun, or set FLAGCX_JOB to a name that all ranks of this job share"
    )


def _stat(pid: str) -> tuple[str, list[str]]:
    """A process's name and the fields after it in its stat line: state, parent, ..., start time (19)."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        head, _, tail = file.read().rpartition(")")
    return head.partition("(")[2], tail.split()
