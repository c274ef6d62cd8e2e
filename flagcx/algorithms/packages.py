"""Algorithms of installed packages: the entry points of the group ``flagcx.algorithms``.

A package names a function without arguments, which calls ``fc.register`` for each of its algorithms::

    [project.entry-points."flagcx.algorithms"]
    torus = "my_package.algorithms:register_all"

The functions are called once in a process: when an algorithm is named that is not known, or all are listed.
"""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib import metadata

GROUP = "flagcx.algorithms"
logger = logging.getLogger("flagcx")


class _Packages:
    """Whether the entry points were loaded, and what went wrong: state of the process, changed once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a package that looks an algorithm up comes here again
        self.loaded = False
        self.failures: list[str] = []

    def load(self) -> list[str]:
        with self.lock:
            if not self.loaded:
                from importlib import metadata  # not on import: every rank would start later

                self.loaded = True
                for point in metadata.entry_points(group=GROUP):
                    self._load(point)
            return self.failures

    def _load(self, point: metadata.EntryPoint) -> None:
        try:
            point.load()()
        except Exception as error:  # of a package that has nothing to do with the caller, perhaps
            package = point.dist.name if point.dist is not None else point.value.partition(":")[0]
            said = f"{type(error).__name__}: {error}"
            failure = f"package {package} failed to register its algorithms ({point.value}): {said}"
            self.failures.append(failure)
            logger.warning("%s", failure)


@lru_cache(maxsize=1)
def _packages() -> _Packages:
    """The one state of the process, made when first needed."""
    return _Packages()


def load_packages() -> list[str]:
    """Has the installed packages register their algorithms, where that was not done before.

    Returns:
        What went wrong, a sentence for each package that failed; each was logged once.
    """
    return _packages().load()
