"""What a script needs of the machine, asked for before any rank is started."""

from __future__ import annotations

import sys


def need_gpu() -> None:
    """Ends the script with a line that says what to install, where arrays on GPUs cannot be made."""
    from flagcx.errors import MissingDependencyError
    from flagcx.kernels.cuda import load_cupy

    try:
        load_cupy()
    except MissingDependencyError as error:
        sys.exit(str(error))
