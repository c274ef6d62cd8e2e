"""A GPU for several ranks: NVIDIA's multi-process service (MPS), private to one job.

Without it the processes of a GPU take turns of some milliseconds, and a rank that waits for another inside a
kernel wastes its whole turn. With it their kernels run at the same time. The service's daemon has a private
directory, apart from those of other jobs, and a guardian ends it: a process that only waits until its pipe
from the launcher is closed, which happens even if the launcher is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from flagcx.errors import LaunchError

logger = logging.getLogger("flagcx")

CONTROL = "nvidia-cuda-mps-control"
DRIVER = "/dev/nvidiactl"
SHARED = MappingProxyType({"FLAGCX_SHARE_GPU": "1"})
_START_LIMIT_S = 20.0
_END_LIMIT_S = 20.0

# Reads until the launcher closes the pipe; then ends the daemon, by force if it must, and removes its files.
_GUARDIAN = """
trap '' INT TERM HUP
cat > /dev/null
echo quit | timeout 10 "$1" > /dev/null 2>&1 ||
  kill -9 $(cat "$2"/pipe/*.pid 2> /dev/null) 2> /dev/null
rm -rf "$2"
"""


@contextlib.contextmanager
def shared_gpu(environ: Mapping[str, str], control: str = CONTROL) -> Iterator[dict[str, str]]:
    """Lets the ranks of one job share GPUs while the context lasts.

    Args:
        environ: The environment of the launcher.
        control: The program that controls MPS; without it ranks take turns, which is slow.

    Yields:
        Variables for every rank.

    Raises:
        LaunchError: The daemon cannot be started, or has no directory for its files.
    """
    import shutil  # not on import: every launcher would start later
    import tempfile

    program = shutil.which(control, path=environ.get("PATH"))
    if program is None or "CUDA_MPS_PIPE_DIRECTORY" in environ:
        if program is None:
            logger.warning("%s is not installed: the ranks take turns on the GPU, which is slow", control)
        yield dict(SHARED)  # A daemon that the caller has started is used as it is.
        return
    try:
        directory = tempfile.mkdtemp(prefix="flagcx-mps-")
        service = _prepare(directory)
    except OSError as error:
        raise LaunchError(
            f"MPS, with which ranks share a GPU, has no directory for its files ({error}); set TMPDIR to one "
            f"that can be written",
            rank=0,
        ) from error
    guardian = _guard(program, directory, {**environ, **service})
    try:
        _start(program, {**environ, **service})
        yield {**SHARED, **service, **_renumbered(environ)}
    finally:
        assert guardian.stdin is not None
        guardian.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guardian.wait(_END_LIMIT_S)


@contextlib.contextmanager
def sharing(environ: Mapping[str, str], share: bool) -> Iterator[dict[str, str]]:
    """The environment for ranks, which share GPUs if ``share``. Warns if there is no GPU to share."""
    if not share:
        yield dict(environ)
        return
    if not os.path.exists(DRIVER):
        logger.warning(
            "there is no NVIDIA GPU here to share (no %s): the ranks have NumPy arrays only", DRIVER
        )
        yield {**environ, **SHARED}
        return
    with shared_gpu(environ) as variables:
        yield {**environ, **variables}


def _renumbered(environ: Mapping[str, str]) -> dict[str, str]:
    """The GPUs that the daemon was started with, as its clients have to name them.

    ``CUDA_VISIBLE_DEVICES=2,3`` makes GPUs 0 and 1 of the daemon's; clients with the same variable would look
    for a third and fourth among these two. Names by UUID hold for both.
    """
    entries = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not all(entry.strip().isdigit() for entry in entries):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(number) for number in range(len(entries)))}


def _prepare(directory: str) -> dict[str, str]:
    places = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
    for place in places.values():
        os.mkdir(os.path.join(directory, place))
    return {name: os.path.join(directory, place) for name, place in places.items()}


def _guard(program: str, directory: str, environ: Mapping[str, str]) -> subprocess.Popen:
    command = ["sh", "-c", _GUARDIAN, "flagcx-mps-guardian", program, directory]
    null = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=null, stderr=null, env=dict(environ), start_new_session=True
    )


def _start(program: str, environ: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            [program, "-d"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"MPS, with which ranks share a GPU, cannot be started: {error}", rank=0) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise LaunchError(f"MPS, with which ranks share a GPU, cannot be started: {said}", rank=0)
