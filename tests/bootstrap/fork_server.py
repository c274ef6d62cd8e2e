"""Forks processes that run programs: from one that has imported what ranks import, so that none has to.

Each ends as an interpreter does, for it returns to the end of this file.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys

import ml_dtypes  # noqa: F401
import numpy as np  # noqa: F401

from flagcx import world  # noqa: F401
from flagcx.bootstrap import environment, rendezvous  # noqa: F401
from flagcx.diagnosis import own_page  # noqa: F401
from flagcx.executor import host  # noqa: F401
from flagcx.transport import shared_memory, stream_order  # noqa: F401

MOST_NBYTES = 1 << 17
"""Of a program, its environment and its directory, pickled."""


def serve(link: socket.socket) -> str:
    """Forks a process for each message, and answers with its number. Returns its program in it; else ""."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, MOST_NBYTES, 2)
        if not message:
            return ""
        number, told = os.pipe()
        between = os.fork()  # ends at once, which gives its child to the process that has asked
        if not between:
            child = os.fork()
            if child:
                os.write(told, b"%d" % child)
                os._exit(0)
            for descriptor in (number, told, link.detach()):
                os.close(descriptor)
            return _begin(*pickle.loads(message), *descriptors)
        os.waitpid(between, 0)
        link.send(os.read(number, 64))
        for descriptor in (number, told, *descriptors):
            os.close(descriptor)


def _begin(program: str, environ: dict[str, str], directory: str, read: int, write: int) -> str:
    """What a new process does first."""
    os.setsid()
    os.chdir(directory)
    for source, standard in ((read, 0), (write, 1), (write, 2)):
        os.dup2(source, standard)
    os.close(read)
    os.close(write)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[:] = ["-c"]
    return program


if __name__ == "__main__":
    text = serve(socket.socket(fileno=int(sys.argv[1])))
    exec(compile(text, "<string>", "exec", dont_inherit=True))
