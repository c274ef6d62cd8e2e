"""What a flight record says of the surroundings of a rank: settings, versions, the command line."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from importlib import metadata
from typing import Any

from flagcx.config import Config, environment

_PREFIXES = ("FLAGCX_", "NCCL_", "OMP_NUM", "CUDA_VISIBLE", "OMPI_MCA_", "UCX_")
_SECRET = "KEY"
_PACKAGES = ("flagcx", "numpy", "cupy", "mpi4py", "torch", "ml_dtypes")
_MOST = 100


def surroundings(config: Config) -> dict[str, Any]:
    """Describes them as plain values. Keys and other variables of the environment are left out."""
    environ = environment()
    variables = {
        name: environ[name][:500]
        for name in sorted(environ)
        if name.startswith(_PREFIXES) and _SECRET not in name
    }
    return {
        "command": [argument[:500] for argument in sys.orig_argv[:_MOST]],
        "directory": _directory(),
        "settings": asdict(config),
        "variables": dict(list(variables.items())[:_MOST]),
        "versions": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            **{name: _version(name) for name in _PACKAGES if name in sys.modules},
        },
    }


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "gone"


def _version(name: str) -> str:
    module = sys.modules[name]
    found = getattr(module, "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
