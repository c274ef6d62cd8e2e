"""Resources in a forked child: copies of their parent's, which are let go of there without a word to anyone.

A child shares its parent's sockets and shared memory. Whatever it then does (ends in good order, collects
garbage, closes the communicator), the parent goes on with its job as if there were no child.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import lru_cache
from typing import Protocol

FORKED = (
    "this communicator was made before a fork and cannot be used in the child; start ranks with flagcx run, "
    "fc.launch or multiprocessing's spawn method, and call fc.init() in each"
)


class Inherited(Protocol):
    """A resource of which a forked child must not use its copy."""

    def abandon(self) -> None:
        """Lets go of the copy in this child, without a word to peers; every further use is refused.

        Threads of the parent don't exist here, and locks that they held stay locked.
        """


def abandon_in_children(resource: Inherited) -> None:
    """Calls the resource's ``abandon`` in every child that this process forks while the resource lives."""
    _resources().add(resource)


def keep_in_child(*objects: object) -> None:
    """Keeps objects from being freed in this child, even at its end: its parent uses what they stand for."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


@lru_cache(maxsize=1)
def _resources() -> weakref.WeakSet[Inherited]:
    """The resources of this process that a child inherits."""
    resources: weakref.WeakSet[Inherited] = weakref.WeakSet()

    def in_child() -> None:
        for resource in list(resources):
            resource.abandon()

    os.register_at_fork(after_in_child=in_child)
    return resources
