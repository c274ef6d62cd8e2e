"""Starts ``flagcx run`` as a shell would."""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import termios

from tests.bootstrap.processes import bare_environment


def command(*arguments):
    return [sys.executable, "-m", "flagcx.cli", "run", *arguments]


def flagcx_run(*arguments, stdin="", **changes):
    return subprocess.run(
        command(*arguments),
        env=bare_environment(**changes),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@contextlib.contextmanager
def running(*arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": bare_environment()} | options
    with subprocess.Popen(command(*arguments), text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(descriptor, pattern):
    found = b""
    while not re.search(pattern, found):
        try:
            found += os.read(descriptor, 4096)
        except OSError:
            break
    return found


def lead_a_session():
    """For ``preexec_fn``: makes stdin the terminal that controls the process."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
